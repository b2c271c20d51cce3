//! Which pages are taken: a bit for each.

use std::ops::Range;

/// A bit for each page.
#[derive(Debug)]
pub(super) struct Bitmap {
    words: Box<[u64]>,
    len: usize,
}

impl Bitmap {
    /// `len` bits, all clear; `None` if there is no memory for them.
    pub(super) fn new(len: usize) -> Option<Self> {
        let mut words = Vec::new();
        words.try_reserve_exact(len.div_ceil(64)).ok()?;
        words.resize(len.div_ceil(64), 0);
        Some(Self { words: words.into_boxed_slice(), len })
    }

    /// Where the lowest run of `count` clear bits begins.
    pub(super) fn first_run(&self, count: usize) -> Option<usize> {
        let mut start = 0;
        loop {
            start = self.next(start, false)?;
            let end = self.next(start, true).unwrap_or(self.len);
            if end - start >= count {
                return Some(start);
            }
            start = end;
        }
    }

    /// Sets or clears a range, which lies below `len`.
    pub(super) fn set(&mut self, range: Range<usize>, to: bool) {
        let mut at = range.start;
        while at < range.end {
            let (word, low) = (at / 64, at % 64);
            let count = (64 - low).min(range.end - at);
            let mask = (u64::MAX >> (64 - count)) << low;
            if to {
                self.words[word] |= mask;
            } else {
                self.words[word] &= !mask;
            }
            at += count;
        }
    }

    /// The first bit from `from` on that is `set`.
    fn next(&self, from: usize, set: bool) -> Option<usize> {
        let mut at = from;
        while at < self.len {
            let word = if set { self.words[at / 64] } else { !self.words[at / 64] };
            let rest = word >> (at % 64);
            if rest != 0 {
                let found = at + rest.trailing_zeros() as usize;
                return (found < self.len).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}
