//! Text of a picture: what is not shown as it is, its width, and its lines.
//!
//! The font is monospaced, so that the width of a text is known without the font.

/// Returns text that any viewer can show: XML allows no control characters, and marks of direction
/// would reorder what stands beside them. A control character becomes its picture (`␛`).
pub(super) fn shown(text: &str) -> String {
    let whole: String = text
        .chars()
        .map(|c| match c {
            '\t' | '\n' | '\r' => ' ',
            '\0'..='\x1f' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('\u{fffd}'),
            '\x7f' => '\u{2421}',
            '\u{80}'..='\u{9f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' => '\u{fffd}',
            // No characters, and no XML.
            _ if u32::from(c) & 0xfffe == 0xfffe => '\u{fffd}',
            _ => c,
        })
        .collect();
    // As an SVG viewer does with white space.
    whole.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the width of a character in columns. Characters that may be wide count as such.
fn width(c: char) -> usize {
    if c >= '\u{1100}' && !('\u{2000}'..'\u{2600}').contains(&c) { 2 } else { 1 }
}

/// Returns the width of a text in columns.
pub(super) fn columns(text: &str) -> usize {
    text.chars().map(width).sum()
}

/// Breaks text into lines of at most `most` columns, between words where it can. Nothing is cut
/// off.
pub(super) fn lines(text: &str, most: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let needed = columns(word);
        let Some(line) = lines.last_mut() else { break };
        if used > 0 && used + 1 + needed <= most {
            line.push(' ');
            line.push_str(word);
            used += 1 + needed;
            continue;
        }
        if used > 0 {
            lines.push(String::new());
            used = 0;
        }
        for c in word.chars() {
            if used + width(c) > most && used > 0 {
                lines.push(String::new());
                used = 0;
            }
            if let Some(line) = lines.last_mut() {
                line.push(c);
            }
            used += width(c);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_xml_or_a_viewer_cannot_show_is_replaced() {
        assert_eq!(shown("a\x1b[31m\0b\x7f"), "a␛[31m␀b␡");
        assert_eq!(shown(" a \t\n b\u{85}c "), "a b\u{fffd}c", "U+0085 is a control character");
        assert_eq!(shown("x\u{202e}y\u{2066}z\u{ffff}"), "x\u{fffd}y\u{fffd}z\u{fffd}");
        assert_eq!(shown("größe ≤ 4 KiB, ×2 & <b>"), "größe ≤ 4 KiB, ×2 & <b>");
    }

    #[test]
    fn lines_are_narrow_enough_and_lose_nothing() {
        let long = "x".repeat(25);
        let text = format!("one two three {long} four 漢字漢字漢字");
        let lines = lines(&text, 10);
        assert!(lines.iter().all(|line| columns(line) <= 10), "{lines:?}");
        assert_eq!(lines.concat().replace(' ', ""), text.replace(' ', ""));
        assert_eq!(lines[0], "one two");
        assert_eq!(super::lines("", 10), [""]);
    }
}
