//! Unwind safety of the handles.
//!
//! A panic that unwinds past a handle leaves it usable:
//!
//! - Pools, streams and budgets keep their state in atomics and behind locks that ignore poison. No
//!   code of the program runs while one of these locks is held: hooks, sinks, reclaimers, gates and
//!   sources are called without it. So a panic of such code leaves no state half changed.
//! - A block is an address with its uses. A method that takes `&mut` or by value either completes
//!   or, if it fails, has changed nothing.
//! - `T` is only the type of the elements. They are on the device, and no value of it is here.

use crate::{
    AddressRegistration, Block, DeviceArena, DeviceBuffer, DevicePages, DevicePool, DeviceSlice,
    DeviceSliceMut, Direct, Graph, GraphPool, Parkable, ReceivedBlock, Reserved, SharedBlock,
    StableBlock, StreamOrdered, Tenant,
};

aquifer_core::__unwind_safe! {
    [] DevicePool, [] Tenant, [] Parkable, [] GraphPool, [] Graph, [] Direct, [] StreamOrdered,
    [] Block, [] StableBlock, [] SharedBlock, [] ReceivedBlock, [] AddressRegistration,
    [] DeviceArena, [] DevicePages,
    [T] DeviceBuffer<T>, [T] Reserved<T>, [T] DeviceSlice<'_, T>, [T] DeviceSliceMut<'_, T>,
}
