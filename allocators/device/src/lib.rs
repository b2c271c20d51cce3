//! Device memory: a cache for each stream, over physical memory that goes where the need is.
//!
//! | type | is |
//! |---|---|
//! | [`DevicePool`] | the caching pool of one device |
//! | [`Block`] | memory that goes home when it is dropped |
//! | [`DeviceBuffer`] | a block with elements of one type |
//! | [`StableBlock`] | a block whose memory never moves, for whoever keeps its address; can be exported |
//! | [`Reserved`] | elements at addresses that stay while memory behind them comes and goes |
//! | [`Resource`] | what all sources of device memory have in common |
//! | [`Direct`], [`StreamOrdered`] | the driver's own allocators as resources |
//! | [`Limit`], [`Log`], [`FailureCallback`] | resources that wrap another |
//!
//! # When an allocation does not fit
//!
//! A stream's cache serves it without a driver call. When it has no room the pool tries, in this order and with a new
//! look after each step:
//!
//! 1. the stream's own frees whose other users are done;
//! 2. an event behind every stream that has freed something, and a look which have passed;
//! 3. what is free and backed in its own cache and in others', pieced together, as far as it is seen done;
//! 4. the same with gaps: new physical memory within the budget, and where that is refused, handles from under free
//!    ranges that are done, moved to where they are missing;
//! 5. the same with ranges that are not done: the stream waits for them *on the device*, the host does not;
//! 6. [`Reclaim`] handlers, other pools among them;
//! 7. the oldest work that keeps something from being free, waited for on the host up to a deadline;
//! 8. [`OutOfMemory`](aquifer_core::OutOfMemory), which says what stood in the way and what to do.
//!
//! No lock is held over a driver call or a wait, so one thread's shortage never stops another's hot path.
//!
//! # What the environment can set
//! `AQUIFER_TRACE=FILE` writes the life of every block of every pool, for `aquifer replay`; `AQUIFER_BYPASS=1` makes each
//! block an allocation of its own from the driver, so that memory checkers see it. A value that cannot be followed is an
//! error of [`DevicePool::open`].
//!
//! `AQUIFER_DEBUG` makes every pool check its blocks, as [`PoolConfig::debug`] does for one:
//! `AQUIFER_DEBUG=poison,canaries,quarantine=64MiB,overlap,leaks`, or any part of this list, or `all`. What is found is
//! written to the standard error stream too, unless the program has set [`Debugging::hook`]. An item that says nothing,
//! and canaries or a quarantine beside bypass, are errors of [`DevicePool::open`].
//!
//! # What debugging finds
//! | check | finds | costs |
//! |---|---|---|
//! | `poison` | reads of what was never written: [`POISON_ALLOCATED`], and of what was freed: [`POISON_FREED`] | a fill at the allocation, one at the free |
//! | `canaries` | writes right before and right behind a block | two fills of [`GUARD_BYTES`]; two reads that wait for the block's stream |
//! | `quarantine` | writes to a block after its free; keeps it from use meanwhile | a fill at the free; a read of the block that waits for its stream |
//! | `overlap` | a block that lies over another that is held | a look into a tree |
//! | `leaks` | blocks that are live when their pool closes, or now | a note for each block |
//! | `backtraces` | nothing by itself: it adds call stacks to all that is found | microseconds for each block |
//!
//! A free never blocks for any of them. Reading happens inside a later [`DevicePool::alloc`] that finds the quarantine
//! over its bound (with canaries alone: any freed block), when memory is short, in [`DevicePool::trim`] and
//! [`DevicePool::check`], and when the pool closes; those block until the work queued on the blocks' streams is done.
//! A use after the free that reaches another's live block is found by none of them; the simulated GPU finds it.

mod apart;
mod backend;
mod block;
mod buffer;
mod chain;
mod checked;
mod config;
mod decorators;
mod direct;
mod environment;
mod home;
mod leasing;
mod physical;
mod pool;
mod raw;
mod request;
mod reserved;
mod resource;
mod stable;
mod stream_ordered;

pub use block::Block;
pub use buffer::{Adopted, Chunks, ChunksMut, Declined, DeviceBuffer, DeviceSlice, DeviceSliceMut};
pub use checked::{
    BlockRecord, CANARY, Debugging, Fault, Finding, FindingHook, GUARD_BYTES, LeakGroup, LeakReport,
    POISON_ALLOCATED, POISON_FREED,
};
pub use config::{Adoption, PoolConfig};
pub use decorators::{FailureCallback, Limit, Log, OnFailure};
pub use direct::Direct;
pub use pool::DevicePool;
pub use request::{BLOCK_ALIGN, MAX_ALIGN, Request};
pub use reserved::Reserved;
pub use resource::{Reclaim, Resource};
pub use stable::{Exported, Registration, StableBlock};
pub use stream_ordered::StreamOrdered;
