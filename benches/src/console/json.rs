//! JSON with fields in a chosen order.

use serde_json::Value;
use std::fmt::{Display, Write};

/// Formats an object with one field per line, in the given order. A value's `Display` output must
/// be JSON.
pub fn object<V: Display>(fields: &[(&str, V)]) -> String {
    let mut text = String::from("{\n");
    for (place, (name, value)) in fields.iter().enumerate() {
        let comma = if place + 1 == fields.len() { "" } else { "," };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}: {value}{comma}", Value::from(*name));
    }
    text.push('}');
    text
}

/// Formats a list of objects as the value of a field of an [`object`]: one object per line, with
/// fields in the given order.
pub fn table<R: AsRef<[(&'static str, Value)]>>(rows: impl IntoIterator<Item = R>) -> String {
    let rows = rows.into_iter().map(|row| {
        let fields =
            row.as_ref().iter().map(|(name, value)| format!("{}: {value}", Value::from(*name)));
        format!("\n    {{{}}}", fields.collect::<Vec<_>>().join(", "))
    });
    let rows = rows.collect::<Vec<_>>().join(",");
    if rows.is_empty() { "[]".to_owned() } else { format!("[{rows}\n  ]") }
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

    #[test]
    fn a_table_is_a_field_of_an_object() {
        let rows = table([
            [("name", json!("p\"")), ("also", json!(1))],
            [("name", json!("q")), ("also", json!(null))],
        ]);
        let text = object(&[("rows", rows), ("none", table::<[_; 0]>([]))]);
        assert!(text.find("name") < text.find("also"));
        let expected =
            json!({"rows": [{"name": "p\"", "also": 1}, {"name": "q", "also": null}], "none": []});
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
    }
}
