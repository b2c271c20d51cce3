//! Device memory: a cache for each stream, over physical memory that goes where the need is.
//!
//! | type | is |
//! |---|---|
//! | [`DevicePool`] | the caching pool of one device |
//! | [`Block`] | memory that goes home when it is dropped |
//! | [`DeviceBuffer`] | a block with elements of one type |
//! | [`DeviceArena`] | a block that is handed out in parts, and taken back whole |
//! | [`StableBlock`] | a block whose memory never moves, for whoever keeps its address; can be exported |
//! | [`GraphPool`], [`Graph`] | memory of CUDA graphs, which belongs to them while they can be launched |
//! | [`Reserved`] | elements at addresses that stay while memory behind them comes and goes |
//! | [`Allocating`] | a request that waits for room as a future |
//! | [`Resource`] | what all sources of device memory have in common |
//! | [`RangeSource`], [`SourcePool`] | memory from a source of one's own; [`conformance`](conformance()) checks it |
//! | [`Direct`], [`StreamOrdered`] | the driver's own allocators as resources |
//! | [`Log`], [`FailureCallback`] | resources that wrap another; limits, counts, tags, a fallback and a choice by size are aquifer-adapters', which wrap device memory as they do the host's |
//!
//! # When an allocation does not fit
//!
//! A stream's cache serves it without a driver call. When it has no room the pool tries, in this
//! order and with a new look after each step:
//!
//! 1. the stream's own frees whose other users are done;
//! 2. an event behind every stream that has freed something, and a look which have passed;
//! 3. new physical memory, free memory of other caches, memory still in use that the stream waits
//!    for *on the device*, and handles from under free memory, in an order that depends on how much
//!    is left: see below;
//! 4. free handles given back to the driver and new ones made, where what is free and what is left
//!    would do together and are in each other's way;
//! 5. others who have registered what they can give back ([`Reclaim`]), the cheapest first: as a
//!    rule the driver's own pools, then applications, then other pools under the same budget;
//! 6. the oldest work that keeps something from being free, waited for on the host up to a
//!    deadline;
//! 7. others once more, with the time that is left: their queued work is waited for too, and
//!    whoever cannot give without waiting is asked now, pinned memory last;
//! 8. [`OutOfMemory`](aquifer_core::OutOfMemory), which says what stood in the way and what to do.
//!
//! Stable and reserved memory comes from new handles only: what is free goes back to the driver for
//! it, and then it takes steps 5 to 8 like any other.
//!
//! Where a budget has refused, those are asked whose memory is charged to it or below it: what
//! stands in the way of a tenant's own limit is in the tenant's own caches. Where the driver has
//! refused, those are asked that have memory of this device, whatever their budget is called, as
//! long as it has the same root. An application registers with
//! [`Budget::on_need`](aquifer_core::Budget::on_need), at the budget of the pool; what a foreign
//! library needs is given back by [`DevicePool::give_back`].
//!
//! # What it costs others
//!
//! | who | offers | for | waits |
//! |---|---|---|---|
//! | a driver's own pool ([`StreamOrdered`]) | what is reserved and in no block | 50 µs, and 0.4 for each MiB | no |
//! | a pool that maps | what lies idle or is about to | 44 µs for each handle, 1.3 for each MiB, 1 ms for each handle and peer | no |
//! | a pool that cannot map | the same | 52 µs for each 64 MiB, 0.4 for each MiB | for the device |
//! | a quarantine ([`Debugging`]) | what is in it | 54 µs for each MiB, which is read | for streams |
//! | pinned memory | free regions | 50 µs for each MiB, and 4.4 ms that launches are held up for | for the device |
//!
//! The figures are those of an H200: what it takes to give the memory back and to take it anew. An
//! application says itself what it costs to evict, and so where it stands among these. Memory of
//! blocks whose work is not done is not given back by who may not wait, which is why step 7 asks
//! them again.
//!
//! Two pools that ask each other get somewhere: nobody waits for one who is being asked while he is
//! asked himself, nobody is asked again who has nothing new, and a pool takes the budget for what
//! it is missing at once or not at all, so that of two that look for the same bytes one gets all of
//! them.
//!
//! No lock is held over a driver call or a wait, so one thread's shortage never stops another's hot
//! path.
//!
//! # Which memory first, and what was tried
//!
//! | there is | a stream without room takes |
//! |---|---|
//! | half of the budget, and less than a third lies idle | new memory: streams keep apart |
//! | half of the budget, and as much has been in use before as with it | for blocks from 8 MiB: what others have freed, waiting on the device if it has to; then new memory, as long as the block |
//! | half of the budget, and more lies idle | for blocks from 16 MiB: what others have freed, waiting on the device if it has to; then new memory |
//! | more held than seven fourths of what was ever in use | the same, and handles move before there is new memory |
//! | less than half of the budget, and several streams | what is free belongs to all of them: the lowest address that is ready, whoever used it last |
//!
//! A handle is a 4096th of what the pool could still give, from 2 to 64 MiB: large ones are made in
//! a fraction of the time (17 ms a GiB in 2 MiB, 1 ms in 32 MiB), and a small block that stays pins
//! a whole one. Handles of at most a 64th made growth twelve times as fast, and two of the three
//! recorded programs no longer fit 1.02 times their live bytes.
//!
//! The recorded serving program, four streams, in moves of a handle under 1.05 times its live bytes
//! and in the smallest limit that it fits:
//!
//! | policy | moves | fits |
//! |---|---|---|
//! | each stream its own whole slots, best fit (until now) | 11,000 | 1.019 |
//! | the same, any unit can change hands when it is short | 10,900 | 1.019 |
//! | all free memory together from half of the budget on, lowest address first, handles moved from the shortest stretch | 250 | 1.010 |
//! | the same, handles moved from the highest address | 0–140 | 1.008 |
//! | all together, best fit | 3,300–26,000 | 1.010 |
//!
//! Lowest address first wins because what is free gathers at the high end, where whole handles come
//! loose. The price is a slow path for nearly each block above 64 KiB while memory is short.
//!
//! Nearly at the limit, with less than a thirty-second of the budget left or free, one more rule
//! counts: of windows that need equally few handles, and of what is free in common, a block takes
//! the place where it keeps the fewest handles from being moved that are wholly free. What is lost
//! there is the rest of handles that only a part of is in use, and in later rounds more of it than
//! in the first: handles stand apart by then, and each end of a stretch is such a rest.
//!
//! | the serving program fits, over its live bytes | on one stream | on its four |
//! |---|---|---|
//! | the lowest place | 1.0102 | 1.0089 |
//! | the place that pins the fewest free handles, nearly at the limit | 1.0098 | 1.0082 |
//! | the same at any time | 1.0094 | 1.0076, and three times as many moves under 1.05 |
//! | the same, and of equal places the smallest that fits | 1.0106 | 1.0114 |
//! | streams alone share with themselves, and go to the lowest place | 1.0091, and the training program 1.0201 | – |
//!
//! With everything that has come since, the recorded programs (`llama_train`, `resnet_train`,
//! `serve_mixed`) fit in 1.0092, 1.0082 and 1.0092 times their live bytes on their own streams, and
//! in 1.0092, 1.0056 and 1.0098 on one.
//!
//! # What is kept, and what goes back
//!
//! All of this happens on slow paths and in [`DevicePool::trim`], never where a stream's cache
//! serves a request.
//!
//! | setting | bounds | what is above it |
//! |---|---|---|
//! | [`release_threshold`](PoolConfig::release_threshold) | what lies idle in the pool | goes back to the driver; what is missed afterwards is kept from then on, so a loop pays once |
//! | [`warm_reserve`](PoolConfig::warm_reserve), [`DevicePool::warm`] | what is held, from below | – ; only pressure takes what is below |
//! | [`stream_cache`](PoolConfig::stream_cache) | what lies idle in one stream's cache | belongs to all streams |
//!
//! What is free of a stream that nobody leases any more, or that has been retired, belongs to all
//! streams as well, as soon as one of them has no room: before there is new memory, and though
//! nobody is short. When its last block has come home and its work is known to be done, its cache
//! serves another stream. So neither caches nor events add up with the streams that have lived.
//!
//! # Tenants and tags
//!
//! [`DevicePool::for_tenant`] counts blocks as a tenant's live bytes, and [`DevicePool::limit_tag`]
//! as a tag's; what is beyond the limit is refused by an error that names whose it is. These limits
//! are no part of the pool's own budget, which is charged for physical memory.
//!
//! # Memory of graphs
//!
//! A graph keeps addresses. What is allocated for captured work comes from a [`GraphPool`], which
//! is nobody else's while a graph can be launched: captures are announced, other work goes on
//! meanwhile.
//!
//! # Memory that sleeps
//!
//! Blocks of a tag that come from its [`Parkable`] can be [parked](DevicePool::park): their
//! contents go to pinned memory and their handles to the driver, until a
//! [resume](DevicePool::resume) brings them back at the same addresses.
//!
//! # What the environment can set
//! `AQUIFER_TRACE=FILE` writes the life of every block of every pool, for `aquifer replay`;
//! `AQUIFER_BYPASS=1` makes each block an allocation of its own from the driver, so that memory
//! checkers see it. A value that cannot be followed is an error of [`DevicePool::open`].
//!
//! `AQUIFER_DEBUG` makes every pool check its blocks, as [`PoolConfig::debug`] does for one:
//! `AQUIFER_DEBUG=poison,canaries,quarantine=64MiB,overlap,leaks`, or any part of this list, or
//! `all`. What is found is written to the standard error stream too, unless the program has set
//! [`Debugging::hook`]. An item that says nothing, and canaries or a quarantine beside bypass, are
//! errors of [`DevicePool::open`].
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
//! A free never blocks for any of them. Reading happens inside a later [`DevicePool::alloc`] that
//! finds the quarantine over its bound (with canaries alone: any freed block), when memory is
//! short, in [`DevicePool::trim`] and [`DevicePool::check`], and when the pool closes; those block
//! until the work queued on the blocks' streams is done. A use after the free that reaches
//! another's live block is found by none of them; the simulated GPU finds it.

// Whether a source of memory may be sent is asked through all that its blocks reach, deeper than
// 128 types.
#![recursion_limit = "256"]

mod apart;
mod arena;
mod backend;
mod block;
mod buffer;
mod chain;
mod checked;
mod config;
mod conformance;
mod decorators;
mod direct;
mod environment;
mod graphs;
mod home;
mod leasing;
mod pages;
mod park;
mod physical;
mod pool;
mod raw;
mod reclaim;
mod request;
mod reserved;
mod resource;
mod retention;
mod snapshot;
mod source;
mod stable;
mod stream_ordered;
mod tenants;
mod waiting;

pub use aquifer_core::{
    BLOCK_ALIGN, Opaque, Request,
    budget::{Offer, Reclaim, Room},
};
pub use arena::DeviceArena;
pub use block::Block;
pub use buffer::{Adopted, Chunks, ChunksMut, Declined, DeviceBuffer, DeviceSlice, DeviceSliceMut};
pub use checked::{
    BlockRecord, CANARY, Debugging, Fault, Finding, FindingHook, GUARD_BYTES, LeakGroup,
    LeakReport, POISON_ALLOCATED, POISON_FREED,
};
pub use config::{Adoption, PoolConfig};
pub use conformance::{BrokenPromise, conformance};
pub use decorators::{FailureCallback, Log, OnFailure};
pub use direct::Direct;
pub use graphs::{Announced, Captured, Graph, GraphPool};
pub use pages::{DevicePages, ForeignPages, PageRun};
pub use park::{Elsewhere, Park, ParkReport, Parkable, ResumeReport};
pub use pool::DevicePool;
pub use request::MAX_ALIGN;
pub use reserved::Reserved;
pub use resource::Resource;
pub use source::{Dependencies, RangeSource, SourcePool};
pub use stable::{Exported, Registration, StableBlock};
pub use stream_ordered::StreamOrdered;
pub use tenants::Tenant;
pub use waiting::Allocating;
