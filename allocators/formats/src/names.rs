//! Interned text and call stacks.

use std::{borrow::Borrow, collections::HashMap, hash::Hash, sync::Arc};

/// Different values by number, from 0 on, in the order of their first use. Value 0 is the empty
/// one.
///
/// See the example of [`MemoryHistory`](crate::history::MemoryHistory).
#[derive(Debug)]
pub struct InternTable<T: ?Sized + Eq + Hash> {
    numbers: HashMap<Arc<T>, u32>,
    values: Vec<Arc<T>>,
}

/// Names: tags, streams, threads and frames of stacks.
pub type NameTable = InternTable<str>;
/// Call stacks: the numbers of their frames' names, the innermost first.
pub type StackTable = InternTable<[u32]>;

// Derived, it would demand the same of `T`.
impl<T: ?Sized + Eq + Hash> Clone for InternTable<T> {
    fn clone(&self) -> Self {
        Self { numbers: self.numbers.clone(), values: self.values.clone() }
    }
}

impl<T: ?Sized + Eq + Hash> Default for InternTable<T>
where
    Arc<T>: Default,
{
    fn default() -> Self {
        let empty: Arc<T> = Arc::default();
        Self { numbers: HashMap::from([(empty.clone(), 0)]), values: vec![empty] }
    }
}

impl<T: ?Sized + Eq + Hash> InternTable<T>
where
    Arc<T>: Borrow<T> + for<'a> From<&'a T>,
{
    /// Returns the number of a value, which is added if it is new. Returns 0 for a new one if there
    /// are 2³² already.
    pub(crate) fn intern(&mut self, value: &T) -> u32 {
        if let Some(&number) = self.numbers.get(value) {
            return number;
        }
        let Ok(number) = u32::try_from(self.values.len()) else { return 0 };
        let value: Arc<T> = value.into();
        self.values.push(value.clone());
        self.numbers.insert(value, number);
        debug_assert_eq!(self.numbers.len(), self.values.len(), "each value has one number");
        number
    }
}

impl<T: ?Sized + Eq + Hash> InternTable<T> {
    /// Returns the value of a number. Panics if there is none.
    #[must_use]
    pub fn get(&self, number: u32) -> &T {
        &self.values[number as usize]
    }

    /// Returns how many values there are.
    #[expect(clippy::len_without_is_empty, reason = "the empty value is always there")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }
}
