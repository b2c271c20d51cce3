//! Fitting text into columns. What is returned is [printable](crate::console::foreign).

use crate::console::foreign::printable;

/// Returns `text` cut to `width` columns. An ellipsis marks a cut.
pub fn clip(text: &str, width: usize) -> String {
    let text = printable(text);
    if text.chars().count() <= width {
        return text;
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// Returns `text` cut in its middle to `width` columns, since both ends of a path matter.
pub fn clip_middle(text: &str, width: usize) -> String {
    let text = printable(text);
    let all = text.chars().count();
    if all <= width {
        return text;
    }
    let kept = width.saturating_sub(1);
    let head = kept / 2;
    let tail = kept - head;
    let mut cut: String = text.chars().take(head).collect();
    cut.push('…');
    cut.extend(text.chars().skip(all - tail));
    cut
}

/// Wraps `text` between words into lines of at most `width` columns. A longer word is cut.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let (text, mut lines) = (printable(text), Vec::<String>::new());
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let word = clip(word, width);
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_wider_than_it_may_be() {
        assert_eq!(clip("abcdef", 6), "abcdef");
        assert_eq!(clip("abcdefg", 6), "abcde…");
        assert_eq!(clip_middle("abcdefghij", 7), "abc…hij");
        assert_eq!(wrap("one two three four", 9), ["one two", "three", "four"]);
        assert_eq!(wrap("immeasurable", 6), ["immea…"]);
        assert!(wrap("", 9).is_empty());
    }
}
