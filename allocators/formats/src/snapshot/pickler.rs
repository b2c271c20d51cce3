//! A writer for pickles of protocol 4.
//!
//! Only instructions that PyTorch's memory viewer supports are used: it runs pickles in its own
//! interpreter of 35 instructions.

use std::collections::HashMap;

/// Items of a list that are appended at once, as Python's own pickler does. The viewer appends all
/// of them by one call.
const BATCH: usize = 1000;

/// One pickle under construction.
#[derive(Debug)]
pub(super) struct Pickler {
    out: Vec<u8>,
    /// The memo index of each word that was written before.
    memo: HashMap<&'static str, u32>,
}

impl Pickler {
    pub(super) fn new() -> Self {
        Self { out: vec![0x80, 4], memo: HashMap::new() }
    }

    /// Returns the bytes of the whole pickle.
    pub(super) fn end(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// Writes a string that is likely to be written again, and is then a reference.
    pub(super) fn word(&mut self, word: &'static str) {
        if let Some(index) = self.memo.get(word) {
            self.out.push(b'j');
            self.out.extend(index.to_le_bytes());
            return;
        }
        self.text(word);
        self.out.push(0x94);
        debug_assert!(self.memo.len() < 1 << 17, "the tags of a process are fewer");
        self.memo.insert(word, self.memo.len() as u32);
    }

    /// Writes any string, truncated to 4 GiB.
    pub(super) fn text(&mut self, text: &str) {
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.out.push(b'X');
        self.out.extend(length.to_le_bytes());
        self.out.extend(&text.as_bytes()[..length as usize]);
    }

    /// Writes an integer. The bits of large values are kept, so they may read as negative.
    pub(super) fn int(&mut self, value: u64) {
        match i32::try_from(value) {
            Ok(value) => {
                self.out.push(b'J');
                self.out.extend(value.to_le_bytes());
            }
            Err(_) => {
                self.out.extend([0x8a, 8]);
                self.out.extend(value.to_le_bytes());
            }
        }
    }

    /// Writes `True`.
    pub(super) fn yes(&mut self) {
        self.out.push(0x88);
    }

    /// Writes a pair.
    pub(super) fn pair(&mut self, first: u64, second: u64) {
        self.int(first);
        self.int(second);
        self.out.push(0x86);
    }

    /// Writes a list of items, each by `write`.
    pub(super) fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T),
    ) {
        self.out.push(b']');
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            self.out.push(b'(');
            items.by_ref().take(BATCH).for_each(|item| write(self, item));
            self.out.push(b'e');
        }
    }

    /// Writes a dictionary. `fill` writes keys and values alternately.
    pub(super) fn dict(&mut self, fill: impl FnOnce(&mut Self)) {
        self.out.extend(b"}(");
        fill(self);
        self.out.push(b'u');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Pickler)) -> Vec<u8> {
        let mut pickler = Pickler::new();
        write(&mut pickler);
        pickler.end()
    }

    #[test]
    fn an_integer_keeps_its_value() {
        let int = |value| written(|p| p.int(value))[2..].to_vec();
        assert_eq!(int(0), b"J\0\0\0\0.");
        assert_eq!(int(0x7fff_ffff), b"J\xff\xff\xff\x7f.");
        // The topmost bit of four bytes would be a sign.
        assert_eq!(int(0x8000_0000), b"\x8a\x08\0\0\0\x80\0\0\0\0.");
        assert_eq!(int(1 << 63), b"\x8a\x08\0\0\0\0\0\0\0\x80.");
    }

    #[test]
    fn a_repeated_word_is_written_as_a_memo_reference() {
        let bytes = written(|p| p.list(["addr", "size", "addr"], |p, word| p.word(word)));
        assert_eq!(bytes, b"\x80\x04](X\x04\0\0\0addr\x94X\x04\0\0\0size\x94j\0\0\0\0e.");
    }

    #[test]
    fn a_long_list_is_appended_in_batches() {
        let bytes = written(|p| p.list(0..2 * BATCH + 1, |p, _| p.yes()));
        assert_eq!(bytes.iter().filter(|&&byte| byte == b'e').count(), 3);
    }
}
