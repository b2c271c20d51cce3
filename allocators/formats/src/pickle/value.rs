//! The values of a pickle.

use super::Word;

/// A value in a pickle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    /// A whole number that fits into 64 bits.
    Int(i64),
    /// A known string.
    Word(Word),
    /// Another string, by its number. Only with details.
    Text(u32),
    /// A call stack, by its number. Only with details.
    Stack(u32),
    /// A list, or a tuple that contains objects, by its index.
    List(u32),
    /// A dictionary, by its index.
    Dict(u32),
    /// Anything else.
    Other,
}
