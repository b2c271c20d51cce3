//! The atomics of this crate: the standard ones, or loom's when a model of them is checked.

#[cfg(not(loom))]
pub(crate) use std::sync::{Arc, atomic};

#[cfg(loom)]
pub(crate) use loom::sync::{Arc, atomic};
