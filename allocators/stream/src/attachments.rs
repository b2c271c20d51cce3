//! The numbers that pools store for a stream.

use std::sync::{OnceLock, PoisonError, RwLock};

/// One number for each pool. The first pool's is read without a lock, because most streams have one
/// pool.
#[derive(Default)]
pub(crate) struct Attachments {
    first: OnceLock<Attachment>,
    more: RwLock<Vec<Attachment>>,
}

/// A pool's key and its number.
type Attachment = (u64, u32);

impl Attachments {
    #[inline]
    pub(crate) fn get(&self, key: u64) -> Option<u32> {
        match self.first.get() {
            Some(&(first, number)) if first == key => Some(number),
            Some(_) => self.get_other(key),
            None => None,
        }
    }

    #[cold]
    fn get_other(&self, key: u64) -> Option<u32> {
        let more = self.more.read().unwrap_or_else(PoisonError::into_inner);
        more.iter().find(|(other, _)| *other == key).map(|&(_, number)| number)
    }

    /// Stores `number` unless one is stored already. Returns the stored number.
    pub(crate) fn attach(&self, key: u64, number: u32) -> u32 {
        let mut more = self.more.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(stored) =
            self.first.get().into_iter().chain(more.iter()).find(|(other, _)| *other == key)
        {
            return stored.1;
        }
        if self.first.set((key, number)).is_err() {
            more.push((key, number));
        }
        number
    }

    /// Removes the number of `key`, except that of the first pool.
    pub(crate) fn detach(&self, key: u64) {
        self.more
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|(other, _)| *other != key);
    }
}
