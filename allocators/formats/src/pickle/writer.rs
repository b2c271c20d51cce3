//! A writer for pickles of protocol 4.
//!
//! Only the instructions that PyTorch's memory viewer supports are used: it runs pickles in its own
//! interpreter of 35 instructions. The viewer appends all items between a mark and `APPENDS` by one
//! call, so a list is written in pieces, as Python's own pickler does.

use super::Word;
use std::{
    collections::HashMap,
    io::{self, Write},
};

/// Items of a list that are appended at once.
const BATCH: usize = 1000;

/// Writes one pickle, from its first byte to [`end`](Pickler::end).
pub(crate) struct Pickler<W> {
    out: W,
    /// The memo index of each string that was written before.
    memo: HashMap<&'static str, u32>,
}

impl<W: Write> Pickler<W> {
    pub(crate) fn begin(mut out: W) -> io::Result<Self> {
        out.write_all(&[0x80, 4])?;
        Ok(Self { out, memo: HashMap::new() })
    }

    /// Ends the pickle and flushes the writer.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.out.write_all(b".")?;
        self.out.flush()
    }

    /// Writes a word.
    pub(crate) fn word(&mut self, word: Word) -> io::Result<()> {
        self.memo_text(word.text())
    }

    /// Writes a string of the format. Repeated strings are written as memo references.
    pub(crate) fn memo_text(&mut self, text: &'static str) -> io::Result<()> {
        if let Some(&index) = self.memo.get(text) {
            return match u8::try_from(index) {
                Ok(index) => self.out.write_all(&[b'h', index]),
                Err(_) => {
                    self.out.write_all(b"j")?;
                    self.out.write_all(&index.to_le_bytes())
                }
            };
        }
        self.text(text)?;
        debug_assert!(self.memo.len() < 1 << 17);
        // The format and the tags of a process have fewer than 2^17 strings.
        self.memo.insert(text, self.memo.len() as u32);
        self.out.write_all(&[0x94])
    }

    /// Writes any string, truncated to 4 GiB.
    pub(crate) fn text(&mut self, text: &str) -> io::Result<()> {
        let bytes = text.as_bytes();
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.out.write_all(b"X")?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(&bytes[..length as usize])
    }

    /// Writes an integer. The bits of large values are kept, so they may read as negative.
    pub(crate) fn int(&mut self, value: u64) -> io::Result<()> {
        match value {
            0..=0xff => self.out.write_all(&[b'K', value as u8]),
            0x100..=0xffff => {
                self.out.write_all(b"M")?;
                self.out.write_all(&(value as u16).to_le_bytes())
            }
            _ => {
                // The fewest bytes that keep the sign, which is the topmost bit of the last byte.
                let bits = 64 - (value as i64).unsigned_abs().leading_zeros();
                let length = (bits as usize / 8 + 1).min(8);
                self.out.write_all(&[0x8a, length as u8])?;
                self.out.write_all(&value.to_le_bytes()[..length])
            }
        }
    }

    pub(crate) fn boolean(&mut self, value: bool) -> io::Result<()> {
        self.out.write_all(&[if value { 0x88 } else { 0x89 }])
    }

    pub(crate) fn pair(&mut self, first: u64, second: u64) -> io::Result<()> {
        self.int(first)?;
        self.int(second)?;
        self.out.write_all(&[0x86])
    }

    /// Writes a list of items, each by `write`.
    pub(crate) fn list<T>(
        &mut self,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"]")?;
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            self.out.write_all(b"(")?;
            for item in items.by_ref().take(BATCH) {
                write(self, item)?;
            }
            self.out.write_all(b"e")?;
        }
        Ok(())
    }

    /// Writes a dictionary. `fill` writes keys and values alternately.
    pub(crate) fn dict(
        &mut self,
        fill: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        self.out.write_all(b"}(")?;
        fill(self)?;
        self.out.write_all(b"u")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        Pickler { out: &mut bytes, memo: HashMap::new() }.int(value).unwrap();
        bytes
    }

    #[test]
    fn integers_use_the_fewest_bytes_that_keep_their_value() {
        assert_eq!(written(0), [b'K', 0]);
        assert_eq!(written(255), [b'K', 255]);
        assert_eq!(written(256), [b'M', 0, 1]);
        assert_eq!(written(0xffff), [b'M', 0xff, 0xff]);
        assert_eq!(written(0x1_0000), [0x8a, 3, 0, 0, 1]);
        // The topmost bit would be a sign.
        assert_eq!(written(0x80_0000), [0x8a, 4, 0, 0, 0x80, 0]);
        assert_eq!(written(0x7f00_0000_0000), [0x8a, 6, 0, 0, 0, 0, 0, 0x7f]);
        assert_eq!(written(1 << 63), [0x8a, 8, 0, 0, 0, 0, 0, 0, 0, 0x80]);
    }

    #[test]
    fn a_repeated_string_is_written_as_a_memo_reference() {
        let mut bytes = Vec::new();
        let mut pickler = Pickler::begin(&mut bytes).unwrap();
        pickler.list(["addr", "size", "addr"], |p, word| p.memo_text(word)).unwrap();
        pickler.end().unwrap();
        assert_eq!(bytes, b"\x80\x04](X\x04\0\0\0addr\x94X\x04\0\0\0size\x94h\x00e.");
    }

    #[test]
    fn a_long_list_is_appended_in_batches() {
        let mut bytes = Vec::new();
        let mut pickler = Pickler::begin(&mut bytes).unwrap();
        pickler.list(0..2 * BATCH as u64 + 1, |p, _| p.boolean(true)).unwrap();
        pickler.end().unwrap();
        assert_eq!(bytes.iter().filter(|&&byte| byte == b'e').count(), 3);
    }
}
