//! The common interface of all allocators of device memory.

use crate::Block;
use aquifer_core::Opaque;
use aquifer_stream::Stream;
use std::fmt::Debug;

/// A source of device memory: the caching pool, the driver's own allocators, a
/// [`SourcePool`](crate::SourcePool) over a custom source, and wrappers around any of them,
/// including those of aquifer-adapters. Its methods are those of [`Opaque`]; implementing
/// [`Opaque`] implements it. It is object safe.
///
/// ```
/// use aquifer::{
///     DeviceId, DevicePool, Direct, MemoryError, Opaque, PoolConfig, Request, Resource, Stream,
///     error::Result, sim::Sim,
/// };
/// fn one_block(from: &dyn Resource, stream: &Stream) -> Result<u64> {
///     Ok(from.allocate(stream, Request::bytes(4096))?.bytes())
/// }
/// let driver = Sim::h200(1).driver();
/// let pool = DevicePool::open(driver.clone(), DeviceId(0), PoolConfig::default())?;
/// let direct = Direct::new(driver, pool.streams().clone(), None);
/// let stream = pool.stream()?;
/// assert_eq!((one_block(&pool, &stream)?, one_block(&direct, &stream)?), (4096, 4096));
/// # Ok::<(), MemoryError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a source of device memory",
    label = "a source of device memory is needed here",
    note = "pass a `DevicePool`, a `Tenant` or a wrapper around one; memory of your own is a `SourcePool` over a `RangeSource`"
)]
pub trait Resource: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync {}

impl<R: Opaque<Stream = Stream, Block = Block> + Debug + Send + Sync> Resource for R {}
