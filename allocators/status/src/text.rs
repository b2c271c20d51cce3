//! Texts in words: their length, then their bytes.

use crate::layout::WORD;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns at most `most` bytes of the text, cut between two characters.
///
/// ```
/// assert_eq!(aquifer_status::text::cut("añb", 2), "a");
/// ```
#[must_use]
pub fn cut(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Writes a text behind its length. See the example of [`read_text`].
pub fn write_text(words: &[AtomicU64], at: usize, text: &str) {
    debug_assert!(at + text.len().div_ceil(WORD) < words.len(), "the text has room");
    words[at].store(text.len() as u64, Ordering::Relaxed);
    for (word, bytes) in words[at + 1..].iter().zip(text.as_bytes().chunks(WORD)) {
        let mut whole = [0; WORD];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
    }
}

/// Returns the text at this word. Whatever is no UTF-8 is replaced.
///
/// ```
/// use aquifer_status::text::{read_text, write_text};
/// use std::sync::atomic::AtomicU64;
/// let words: [AtomicU64; 3] = Default::default();
/// write_text(&words, 0, "a command");
/// assert_eq!(read_text(&words.map(AtomicU64::into_inner), 0, 16), "a command");
/// ```
#[must_use]
pub fn read_text(words: &[u64], at: usize, most: usize) -> String {
    let len = words.get(at).map_or(0, |&len| len.min(most as u64) as usize);
    let bytes: Vec<u8> = words
        .iter()
        .skip(at + 1)
        .take(most.div_ceil(WORD))
        .flat_map(|word| word.to_ne_bytes())
        .take(len)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(cut("añb", 2), "a");
        assert_eq!(cut("añb", 3), "añ");
        assert_eq!(cut("añb", 9), "añb");
    }
}
