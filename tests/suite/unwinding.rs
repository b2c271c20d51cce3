//! Tests that a panic that unwinds past a handle is allowed, and leaves it usable.

use aquifer::{
    Block, Budget, DeviceArena, DeviceBuffer, DevicePages, DevicePool, DeviceSlice, Direct, Graph,
    GraphPool, Lease, Parkable, PinnedAllocator, PinnedBuf, PinnedPool, Placer, Request, Reserved,
    Runtime, StableBlock, Stager, Stream, StreamOrdered, StreamPool, Tenant,
    budget::{BudgetLease, Charge, HookRegistration, Leased, Reservation},
    device::{ReceivedBlock, SharedBlock},
    sim::Sim,
    vec::Vec,
};
use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};

const fn is_unwind_safe<T: UnwindSafe + RefUnwindSafe>() {}

const _: () = {
    is_unwind_safe::<Runtime>();
    is_unwind_safe::<Placer>();
    is_unwind_safe::<Lease>();
    is_unwind_safe::<Budget>();
    is_unwind_safe::<Charge>();
    is_unwind_safe::<Reservation>();
    is_unwind_safe::<BudgetLease>();
    is_unwind_safe::<Leased>();
    is_unwind_safe::<HookRegistration>();
    is_unwind_safe::<Stream>();
    is_unwind_safe::<StreamPool>();
    is_unwind_safe::<DevicePool>();
    is_unwind_safe::<Tenant>();
    is_unwind_safe::<Parkable>();
    is_unwind_safe::<GraphPool>();
    is_unwind_safe::<Graph>();
    is_unwind_safe::<Direct>();
    is_unwind_safe::<StreamOrdered>();
    is_unwind_safe::<Block>();
    is_unwind_safe::<DeviceBuffer<f32>>();
    is_unwind_safe::<DeviceSlice<'_, f32>>();
    is_unwind_safe::<DeviceArena>();
    is_unwind_safe::<DevicePages>();
    is_unwind_safe::<Reserved<f32>>();
    is_unwind_safe::<StableBlock>();
    is_unwind_safe::<SharedBlock>();
    is_unwind_safe::<ReceivedBlock>();
    is_unwind_safe::<PinnedPool>();
    is_unwind_safe::<PinnedAllocator>();
    is_unwind_safe::<PinnedBuf<f32>>();
    is_unwind_safe::<Stager>();
    is_unwind_safe::<Vec<u8, PinnedAllocator>>();
};

/// The owners of memory that a buffer of Arrow accepts, by arrow-buffer's own bounds.
trait Allocation: RefUnwindSafe + Send + Sync {}
impl<T: RefUnwindSafe + Send + Sync> Allocation for T {}

#[test]
fn a_pinned_vector_owns_the_memory_of_a_foreign_buffer_and_handles_outlive_a_panic() {
    let rt = Runtime::on(Sim::h200(1).driver()).unwrap();
    let mut rows = Vec::new_in(rt.pinned_near(0).allocator());
    rows.extend(0..1000_u32);
    let owner: std::sync::Arc<dyn Allocation> = std::sync::Arc::new(rows);
    let (pool, s) = (rt.device(0).unwrap().clone(), rt.device(0).unwrap().stream().unwrap());
    let panicked = catch_unwind(|| {
        let _block = pool.alloc(&s, Request::bytes(4096)).unwrap();
        panic!("on purpose");
    });
    assert!(panicked.is_err());
    assert_eq!(pool.stats().live, 0, "the block went with the panic");
    drop(pool.alloc(&s, Request::bytes(4096)).unwrap());
    drop(owner);
    assert_eq!(rt.pinned_near(0).stats().memory.live, 0);
}
