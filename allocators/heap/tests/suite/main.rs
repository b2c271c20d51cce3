//! The tests of this crate.

mod bump;
mod heap;
