//! Text of other processes and of files, such as names, paths and commands, on the terminal.
//!
//! It may have characters that a terminal obeys, that begin a line which looks like one of ours, or
//! that change the order of what is read. [`printable`] is the one way by which such text is shown.
//! The functions of [`layout`](crate::console::layout) apply it to what they fit into columns.

use std::path::Path;

/// Returns whether a character does not stand for itself on a terminal: control characters, ends of
/// lines, marks of direction, and characters that cannot be seen.
pub fn is_acting(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

/// Returns the text as one line that acts on no terminal. What does not stand for itself is written
/// as an escape of JSON, so a line of JSON keeps its meaning.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            c if is_acting(c) => {
                let mut units = [0; 2];
                let units = c.encode_utf16(&mut units).iter();
                shown.extend(units.map(|unit| format!("\\u{unit:04x}")));
            }
            c => shown.push(c),
        }
    }
    shown
}

/// Returns a path as it is shown.
pub fn path(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_act_on_a_terminal_is_escaped() {
        let text = printable("a\u{1b}[2J\u{202e}b\n<b>\u{9b}é\r\t\0\u{7f}\u{200b}\u{e0041}漢");
        assert_eq!(text, r"a\u001b[2J\u202eb\n<b>\u009bé\r\t\u0000\u007f\u200b\udb40\udc41漢");
        assert_eq!(printable(&text), text);
        assert_eq!(path(Path::new("a\nb")), "a\\nb");
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"a\u{200b}": "\u{9b}31m\u{7f}\u{1b}\n\u{e0041}\u{85}\\é"});
        let shown = printable(&value.to_string());
        assert!(!shown.chars().any(is_acting), "{shown:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).ok(), Some(value));
    }
}
