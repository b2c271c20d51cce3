//! The one interface of everything that gives out device memory.

use crate::Block;
use aquifer_core::Opaque;
use aquifer_stream::Stream;
use std::fmt::Debug;

/// A source of device memory: the caching pool, the driver's own allocators, and whatever wraps one of them, by
/// aquifer-adapters' wrappers too. Its methods are those of [`Opaque`]. Object safe.
pub trait Resource: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync {}

impl<R: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync> Resource for R {}
