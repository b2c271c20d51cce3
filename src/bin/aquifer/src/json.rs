//! JSON in an order that a person would choose.

use serde_json::Value;
use std::fmt::Write;

/// An object with a field a line, in the order given.
pub(crate) fn object(fields: &[(&str, Value)]) -> String {
    let mut text = String::from("{\n");
    for (place, (name, value)) in fields.iter().enumerate() {
        let comma = if place + 1 == fields.len() { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}: {value}{comma}", Value::from(*name));
    }
    text.push('}');
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_is_valid_json_in_its_own_order() {
        let text = object(&[("b", json!(1)), ("a", json!("x\n\"y\"")), ("c", json!(null))]);
        assert!(text.find("\"b\"") < text.find("\"a\""));
        assert_eq!(
            serde_json::from_str::<Value>(&text).unwrap(),
            json!({"a": "x\n\"y\"", "b": 1, "c": null})
        );
    }
}
