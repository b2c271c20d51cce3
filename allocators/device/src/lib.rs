//! Device memory: a cache for each stream, over physical memory that moves between the caches. Part
//! of aquifer; promises no stability beyond what aquifer re-exports.
//!
//! | type | is |
//! |---|---|
//! | [`DevicePool`] | the caching pool of one device |
//! | [`Block`] | memory that returns to its pool when it is dropped |
//! | [`DeviceBuffer`] | a block with elements of one type |
//! | [`DeviceArena`] | a block that is allocated in parts, and reset as a whole |
//! | [`StableBlock`] | a block at a permanent address, whose memory never moves |
//! | [`RegisteredDevicePool`] | memory that a transport registers, in whole chunks |
//! | [`SharedBlock`], [`ReceivedBlock`] | a block sent to another process, and its mapping there |
//! | [`GraphPool`], [`Graph`] | memory of CUDA graphs, which is theirs while they can be launched |
//! | [`Reserved`] | elements at permanent addresses, whose memory is committed and released |
//! | [`Allocating`] | a request that waits for room as a future |
//! | [`Resource`] | the common interface of all sources of device memory |
//! | [`RangeSource`], [`SourcePool`] | memory from a user's own source |
//! | [`conformance`](conformance()) | checks a [`RangeSource`] |
//! | [`Direct`], [`StreamOrdered`] | the driver's own allocators as resources |
//! | [`Log`], [`FailureCallback`] | resources that wrap another |
//!
//! More wrappers (limits, counts, tags, a fallback, a choice by size) are in aquifer-adapters. They
//! wrap device memory as they do host memory.
//!
//! Caches round sizes as `aquifer_heap::Config::device` says: up to 16 KiB to the size classes of
//! `aquifer_heap::classes`, above to multiples of 512 bytes. Where another stream may reuse freed
//! memory is told at the head of `base/pending.rs`.
//!
//! # When an allocation does not fit
//!
//! A stream's cache serves a request without a driver call. If it has no room, or if the request is
//! to be served from shared memory (see below), the pool takes these steps in order, and tries
//! again after each:
//!
//! 1. release the stream's own frees whose other users are done;
//! 2. record an event behind every stream whose free memory has none yet, and behind the users of
//!    pending frees, and poll the events;
//! 3. the shared free list, with the free memory of streams that are gone and the warm reserve, new
//!    physical memory, free memory of other caches, memory still in use that the stream waits for
//!    *on the device*, and handles from under free memory, in an order that depends on how much is
//!    left: see below;
//! 4. release free handles to the driver and create new ones, where free memory and the rest of the
//!    budget would suffice but are fragmented;
//! 5. reclaim from others registered with the budget ([`Reclaim`]), the cheapest first: usually the
//!    driver's own pools, then applications, then other pools under the same budget. The pool also
//!    releases its own idle memory where that is enough for the budget that refuses;
//! 6. wait on the host, up to a deadline, for work that keeps memory from being free;
//! 7. step 5 again, with the time that is left: now the queued work of others is waited for too,
//!    and reclaimers that cannot give without waiting are asked, pinned memory last;
//! 8. return [`OutOfMemory`](aquifer_core::OutOfMemory), with the causes and the remedies.
//!
//! If another thread had memory in transfer between caches meanwhile, its end is waited for, and
//! all steps are repeated.
//!
//! Stable and reserved memory comes from new handles only, and so does new memory of graphs and of
//! parkable blocks. Free memory is given back to the driver for it, then it takes steps 5 to 8.
//!
//! If a budget refuses, only memory charged to it or below it is reclaimed. At a tenant's limit
//! only the reclaimers registered with the tenant's budget are called, and not those of the pool.
//! If the driver refuses, reclaim covers all holders of memory of this device whose budgets have
//! the same root. An application registers with [`Budget::on_need`](aquifer_core::Budget::on_need)
//! at the pool's budget. For a foreign library, [`DevicePool::give_back`] releases memory.
//!
//! # What reclaim costs
//!
//! | holder | offers | cost | waits |
//! |---|---|---|---|
//! | driver's own pool ([`StreamOrdered`]) | unused reserved memory | 50 µs + 0.4 µs/MiB | no |
//! | pool that maps | memory idle now or soon | 44 µs/handle + 1.3 µs/MiB + 1 ms/peer | no |
//! | [`Reserved`] | [idle](Reserved::idle) steps | 44 µs/step + 1.3 µs/MiB | no |
//! | pool that cannot map, or in bypass mode | the same | 52 µs/64 MiB + 0.4 µs/MiB | for the device |
//! | pool with guards ([`Debugging`]) | freed blocks, after a read | as the pool | for streams |
//! | pinned memory | free regions | 50 µs/MiB + 4.4 ms of blocked launches | for the device |
//! | application ([`on_need`](aquifer_core::Budget::on_need)) | what it states | what it states | if it says so |
//! | other processes, by a ledger | what they hold above their guarantees | 10 ms/MiB | for them |
//!
//! The cost is that of an H200 to give the memory back and to take it again. The 1 ms for a peer
//! applies to each handle. An application states its own cost of eviction, which decides its place
//! in the order. A reclaimer that may not wait gives no memory of blocks whose work is not done,
//! which is why step 7 repeats the reclaim.
//!
//! Two pools that reclaim from each other neither deadlock nor livelock:
//!
//! - A thread that is inside a [`Reclaim::reclaim`] waits for no other reclaimer. Any other thread
//!   may wait for a reclaimer that another thread is running, up to its deadline.
//! - Within one search, a reclaimer is called again only if the last call has lowered its offer, if
//!   the offer has changed since, or if it may wait now and could not then.
//! - A pool charges the whole shortfall of a block to the budget at once or not at all, so of two
//!   pools that need the same bytes one gets all of them. A request with a reservation is charged
//!   handle by handle instead, first to the reservation.
//!
//! No lock is held over a driver call or a wait, so a shortage in one thread never stops another
//! thread's hot path.
//!
//! # Which memory comes first
//!
//! Before step 3, the free memory of streams that have no lease moves to the shared free list,
//! where the warm reserve lies too. A ready range of this list is tried next, except with
//! [`Adoption::Never`]. The later searches all see the list.
//!
//! "New memory" is what is missing at the best place: a block goes to where the fewest handles are
//! missing, among free ranges and unused addresses. So warmed memory is used before a handle is
//! created. Spare handles, which the pool holds and has mapped nowhere, come before new ones.
//!
//! A pool holds at most its [slack](PoolConfig::slack) more than the peak of its live bytes; more
//! where threads allocate at once. Where this bound leaves less than the budget, it counts as the
//! budget in all rules of this section, and held memory as its use. The head of
//! `allocators/device/src/sharing_policy.rs` says which memory a block gets that fits nowhere in
//! its stream's cache.
//!
//! A handle has 2 to 64 MiB: a 64th of what is held, less if the slack is set below the default, or
//! a 1024th of what the pool could still take, the lesser of the two, or if it is more, a 16th of
//! the block, or of the mean live block if that is smaller. Large handles are created faster for
//! each byte, but one small block keeps a whole handle in place.
//!
//! Shared memory is allocated at the lowest address first, so that free memory gathers at the high
//! end, where whole handles become free. The price is a slow path for every block above 64 KiB
//! while all free memory is shared, and once half of the budget is live also for most smaller ones,
//! since caches then keep nothing. This includes a block as large as the one that its stream has
//! just freed: the cache, with its last freed block, is not tried first.
//!
//! # What is kept, and what is given back
//!
//! All of this happens on slow paths and in [`DevicePool::trim`], never where a stream's cache
//! serves a request.
//!
//! - [`release_threshold`](PoolConfig::release_threshold) bounds the idle memory of the pool. The
//!   excess goes back to the driver, also when a stream of the pool is synchronised, and in
//!   [`DevicePool::poll`].
//! - [`warm_reserve`](PoolConfig::warm_reserve) and [`DevicePool::warm`] bound the held memory from
//!   below. Only pressure takes what is below the bound.
//! - [`stream_cache`](PoolConfig::stream_cache) bounds the idle memory of one stream's cache. The
//!   excess is shared by all streams.
//!
//! The free memory of a stream that has no lease any more, or is retired, becomes shared as soon as
//! another stream has no room: before new memory is taken, even without a shortage. When the last
//! block of the stream has been returned and its work is known to be done, its cache serves another
//! stream. So the number of caches and events does not grow with the number of streams created.
//!
//! # What is moved, reclaimed and counted
//!
//! A live block never moves. All rows but that of parked blocks are part of
//! [`physical`](aquifer_core::PoolStats::physical).
//!
//! | kind of memory | moved? | reclaimed under pressure? | fields of `PoolStats` |
//! |---|---|---|---|
//! | live block of a cache | no | no | `live` |
//! | free memory of a cache, or shared | handles that lie wholly under it | the same handles, once its work is done | `cached` |
//! | warm reserve, while it is free | as other free memory | as other free memory; a trim leaves it | `cached` |
//! | spare handle | mapped where memory is missing | yes, before all others | `cached` |
//! | zombie: the old mapping of a moved handle | no | unmapped once its work is done | none: the handle counts where it is mapped now |
//! | pending free: other streams may still use it | no | once these uses are over | `pending` |
//! | block held back by debugging | no | after it has been read | `pending` |
//! | live [stable](StableBlock) block | no | no | `live` |
//! | committed memory of [`Reserved`] | no | no | `live`, and no `blocks` |
//! | live [parkable](Parkable) block | no | no; a park releases it | `live` |
//! | parked block | has no memory | has no memory | `blocks` |
//! | free memory between parkable blocks | no | handles that lie wholly under it, once its work is done | `cached` |
//! | live block of a graph | no | no | `live` and `graphs` |
//! | free memory of graphs | no, only captures reuse it | handles that lie wholly under it, once its work is done, if no captured work has used them | `graphs` |
//! | live block of a [plan](PoolConfig::plan) | no | no | `live` |
//! | free memory of a plan's range | no | no; the whole range once the plan is dropped and no block of it lives | `cached` |
//! | retiring: dropped stable blocks, decommitted elements, memory of ended graphs | no | once its work is done and no registration keeps the address | `pending` |
//! | stranded: the driver has refused the release | no | the release is tried again | `pending` |
//!
//! On devices without virtual memory a pool caches nothing: each block is an allocation of the
//! driver, as in [bypass mode](PoolConfig::bypass), and refuses alignments above [`BLOCK_ALIGN`].
//! There [`StreamOrdered`] is quicker, and no pool has memory of graphs.
//!
//! A freed block of a graph or of parkable memory that other streams may still use is `pending`
//! too. That of a graph is then also part of `graphs`.
//!
//! # Tenants and tags
//!
//! [`DevicePool::for_tenant`] counts blocks as a tenant's live bytes, [`DevicePool::limit_tag`] as
//! a tag's. A request beyond the limit is refused with an error that names the tenant or the tag.
//! These limits are no part of the pool's own budget, which is charged for physical memory.
//!
//! # Memory of graphs
//!
//! A graph stores addresses. Allocations for captured work come from a [`GraphPool`], whose memory
//! no other work uses while a graph can be launched. Captures are announced, and other work
//! continues during a capture.
//!
//! # Parked memory
//!
//! Blocks of a tag that come from its [`Parkable`] can be [parked](DevicePool::park): their
//! contents are copied to pinned memory and their handles are released to the driver. A
//! [resume](DevicePool::resume) restores them at the same addresses.
//!
//! # Environment variables
//! `AQUIFER_TRACE=FILE` writes the events of every block of every pool, for `aquifer replay`.
//! `AQUIFER_BYPASS=1` makes each block an allocation of its own from the driver, so that memory
//! checkers see it. An invalid value is an error of [`DevicePool::open`].
//!
//! `AQUIFER_DEBUG` makes every pool check its blocks, as [`PoolConfig::debug`] does for one:
//! `AQUIFER_DEBUG=poison,canaries,leaks`, or any part of this list, or `all`. Findings are also
//! written to the standard error stream, unless the program has set [`Debugging::hook`]. Invalid
//! items, and canaries beside bypass, are errors of [`DevicePool::open`].
//!
//! # What debugging finds
//! | check | finds | costs |
//! |---|---|---|
//! | `poison` | reads of [unwritten](POISON_ALLOCATED) or [freed](POISON_FREED) memory | fills |
//! | `canaries` | writes right before and right behind a block | two fills and two reads |
//! | `leaks` | blocks that are live when their pool closes, or now | a record for each block |
//! | `backtraces` | nothing: adds call stacks to findings | microseconds for each block |
//!
//! Poison fills a block at its allocation and at its free. Canaries fill and read [`GUARD_BYTES`]
//! on each side of a block. A read waits for the block's stream, and a freed block is not reused
//! until its guards have been read.
//!
//! A free never blocks for any of them. Guards are read inside the next [`DevicePool::alloc`], when
//! memory is short, in [`DevicePool::trim`] and [`DevicePool::check`], and when the pool closes.
//! Those calls block until the work queued on the blocks' streams is done. A write after the free
//! is found by none of the checks. The simulated GPU finds it, and so does compute-sanitizer with
//! `AQUIFER_BYPASS=1`.

// The compiler checks `Send` of a source through all types that its blocks contain, which nest
// deeper than 128.
#![recursion_limit = "256"]

mod arena;
mod backing;
mod base;
mod block;
mod buffer;
mod bypass;
mod checked;
mod config;
mod conformance;
mod debugging;
mod decorators;
mod dedicated;
mod direct;
mod environment;
mod graphs;
mod limits;
mod mapped_memory;
mod pages;
mod park;
mod peaks;
mod planned;
mod pool;
mod pool_core;
mod publisher;
mod raw_table;
mod reclaim;
mod registered;
mod request;
mod reserved;
mod resource;
mod retention;
mod sharing_policy;
mod slot_memory;
mod slow_path;
mod snapshot;
mod source;
mod stable;
mod stream_cache;
mod stream_ordered;
mod tenants;
mod unwind;
mod waiting;

pub use aquifer_core::{
    BLOCK_ALIGN, Opaque, Request,
    budget::{Offer, Reclaim, Room},
};
pub use arena::DeviceArena;
pub use base::record::BlockRecord;
pub use block::Block;
pub use buffer::{Adopted, Declined, DeviceBuffer, DeviceSlice, DeviceSliceMut};
pub use checked::{CANARY, GUARD_BYTES, POISON_ALLOCATED, POISON_FREED};
pub use config::{Adoption, PoolConfig};
pub use conformance::{BrokenPromise, conformance};
pub use debugging::{Debugging, Fault, Finding, FindingHook, LeakGroup, LeakReport};
pub use decorators::{FailureCallback, Log, OnFailure};
pub use direct::Direct;
pub use graphs::{Announced, Captured, Graph, GraphPool};
pub use pages::{DevicePages, ForeignPages, PageRun};
pub use park::{Park, ParkReport, Parkable, PendingPark, PendingResume, ResumeReport};
pub use pool::DevicePool;
pub use registered::{RegisteredDevicePool, Registrar};
pub use request::MAX_ALIGN;
pub use reserved::Reserved;
pub use resource::Resource;
pub use source::{Dependencies, RangeSource, SourcePool};
pub use stable::{
    AddressRegistration, ReceivedBlock, ShareError, ShareServer, SharedBlock, StableBlock,
    check_peer,
};
pub use stream_ordered::StreamOrdered;
pub use tenants::Tenant;
pub use waiting::Allocating;
