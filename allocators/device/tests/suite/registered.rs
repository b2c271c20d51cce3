//! Tests of registered device memory: one registration for each chunk, which ends before the memory
//! is released and after the work of its parts.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_core::MemoryError;
use aquifer_device::{
    AddressRegistration, Block, Opaque, RegisteredDevicePool, Registrar, Request, conformance,
};
use aquifer_driver::{
    ExportTypes,
    sim::{Outstanding, Sim},
};
use aquifer_stream::Stream;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

/// A transport that refuses as it is told.
#[derive(Clone, Debug)]
struct Transport {
    sim: Sim,
    export: ExportTypes,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes by address.
    registered: BTreeMap<u64, u64>,
    begun: u64,
    refuses: bool,
}

impl Registrar for Transport {
    type Handle = u64;
    fn register(&self, memory: &AddressRegistration) -> Result<u64, i32> {
        let mut state = self.state.lock().unwrap();
        if state.refuses {
            return Err(5);
        }
        let range = memory.range();
        assert_eq!(state.registered.insert(range.address, range.bytes), None, "registered twice");
        state.begun += 1;
        Ok(range.address)
    }
    fn export(&self) -> ExportTypes {
        self.export
    }
    fn unregister(&self, memory: &AddressRegistration, handle: &u64) -> Result<(), i32> {
        let Outstanding { allocations, handles, .. } = self.sim.outstanding();
        assert!(allocations + handles > 0, "the memory is released already");
        assert_eq!(memory.range().address, *handle);
        let mut state = self.state.lock().unwrap();
        if state.refuses {
            return Err(5);
        }
        state.registered.remove(handle).map(drop).ok_or(1)
    }
}

/// Chunks of 4 MiB, on a machine with a limit.
struct Registered {
    rig: Rig,
    transport: Transport,
    pool: RegisteredDevicePool<Transport>,
}

impl Registered {
    fn on(sim: Sim, limit_mib: u64) -> Self {
        Self::exported(ExportTypes::NONE, sim, limit_mib)
    }

    fn exported(export: ExportTypes, sim: Sim, limit_mib: u64) -> Self {
        let rig = Rig::on(sim, limit_mib, |_| ());
        let transport = Transport { sim: rig.sim.clone(), export, state: Arc::default() };
        let pool = RegisteredDevicePool::new(&rig.pool, 3 * MIB + 1, transport.clone()).unwrap();
        Self { rig, transport, pool }
    }

    fn take(&self, stream: &Stream, mib: u64) -> Block {
        self.pool.allocate(stream, Request::bytes(mib * MIB)).unwrap()
    }

    fn refuse(&self, refuses: bool) {
        self.transport.state.lock().unwrap().refuses = refuses;
    }

    /// Returns the MiB of what is registered, in order of size.
    fn chunks(&self) -> Vec<u64> {
        let state = self.transport.state.lock().unwrap();
        let mut chunks: Vec<_> = state.registered.values().map(|bytes| bytes / MIB).collect();
        chunks.sort_unstable();
        chunks
    }

    fn assert_ended(&self) {
        self.pool.trim(0).unwrap();
        assert_eq!((self.chunks(), self.rig.budget.used()), (vec![], 0));
        self.rig.assert_silent();
        let Outstanding { allocations, handles, mappings, .. } = self.rig.sim.outstanding();
        assert_eq!((allocations, handles, mappings), (0, 0, 0));
    }
}

#[test]
fn a_chunk_is_registered_once_and_a_larger_request_gets_one_of_its_size() {
    let all = Registered::on(Sim::h200(1), 64);
    let s = all.rig.stream();
    let blocks = [1, 1, 5, 1, 1].map(|mib| all.take(&s, mib));
    assert_eq!(all.chunks(), [4, 6]);
    let ranges: Vec<_> = all.pool.chunks().iter().map(|chunk| chunk.bytes / MIB).collect();
    assert_eq!((ranges, all.rig.budget.used()), (vec![4, 6], 10 * MIB));
    let address = blocks[0].address();
    assert!(blocks.iter().filter(|block| block.address() != address).count() == 4);
    drop(blocks);
    s.synchronize().unwrap();
    all.assert_ended();
    conformance(&all.pool, &[s, all.rig.stream()], 300, 7).unwrap();
    all.assert_ended();
}

#[test]
fn a_chunk_is_one_handle_that_the_transport_can_export_if_it_says_so() {
    let wanted = ExportTypes::POSIX_FD.and(ExportTypes::FABRIC).with_rdma();
    let all = Registered::exported(wanted, Sim::h200(1), 64);
    let s = all.rig.stream();
    let blocks = [1, 1, 5].map(|mib| all.take(&s, mib));
    assert_eq!((all.chunks(), all.rig.budget.used()), (vec![4, 6], 10 * MIB));
    let Outstanding { allocations, handles, mappings, .. } = all.rig.sim.outstanding();
    assert_eq!((allocations, handles, mappings), (0, 2, 2));
    let chunk = all.pool.chunks()[0];
    let driver = all.rig.pool.driver();
    assert!(!driver.is_legacy_ipc_capable(chunk.device, chunk.address).unwrap());
    drop(blocks);
    s.synchronize().unwrap();
    all.assert_ended();
    conformance(&all.pool, &[s, all.rig.stream()], 300, 7).unwrap();
    all.assert_ended();
    // A device that has no such memory has chunks of the other kind.
    let all = Registered::exported(ExportTypes::FABRIC, Sim::h200(1), 64);
    let s = all.rig.stream();
    let block = all.take(&s, 1);
    assert_eq!(all.rig.sim.outstanding().allocations, 1);
    drop(block);
    s.synchronize().unwrap();
    all.assert_ended();
}

#[test]
fn a_registration_ends_after_the_work_of_the_last_part_and_before_the_release() {
    let all = Registered::on(Sim::h200(1).stepped(), 64);
    let (s, u) = (all.rig.stream(), all.rig.stream());
    let (first, last) = (all.take(&s, 1), all.take(&s, 1));
    all.rig.write(&s, &last);
    all.rig.uses(&u, &last, aquifer_driver::Access::Read);
    drop((first, last));
    all.pool.trim(0).unwrap();
    assert_eq!(all.chunks(), [4]);
    s.synchronize().unwrap();
    all.pool.trim(0).unwrap();
    assert_eq!(all.chunks(), [4], "the other stream has not read yet");
    u.synchronize().unwrap();
    all.assert_ended();
}

#[test]
fn a_freed_part_is_its_own_streams_at_once_and_others_after_its_work() {
    let all = Registered::on(Sim::h200(1).stepped(), 64);
    let (s, u) = (all.rig.stream(), all.rig.stream());
    let freed = all.take(&s, 3);
    let address = freed.address();
    all.rig.write(&s, &freed);
    drop(freed);
    let other = all.take(&u, 3);
    assert_eq!((all.chunks().len(), other.address() == address), (2, false));
    let again = all.take(&s, 2);
    assert_eq!((all.chunks().len(), again.address()), (2, address));
    for (stream, block) in [(&s, &again), (&u, &other)] {
        all.rig.write(stream, block);
    }
    drop(again);
    s.synchronize().unwrap();
    drop(all.take(&u, 3));
    drop(other);
    u.synchronize().unwrap();
    all.assert_ended();
}

#[test]
fn without_room_an_allocation_waits_for_freed_parts_and_is_then_refused() {
    let all = Registered::on(Sim::h200(1).seeded(3), 8);
    let (s, u) = (all.rig.stream(), all.rig.stream());
    let (first, second) = (all.take(&s, 4), all.take(&s, 4));
    all.rig.write(&s, &first);
    let refused = all.pool.allocate(&u, Request::bytes(1)).unwrap_err();
    assert!(matches!(refused, MemoryError::OutOfMemory(_)), "{refused:?}");
    assert_eq!(all.chunks(), [4, 4]);
    drop(first);
    // As large as the freed chunk, and larger.
    let third = all.take(&u, 4);
    drop((second, third));
    let whole = all.take(&u, 8);
    assert_eq!(all.chunks(), [8]);
    drop(whole);
    u.synchronize().unwrap();
    all.assert_ended();
}

#[test]
fn a_refused_registration_is_an_error_and_leaves_nothing() {
    let all = Registered::on(Sim::h200(1), 64);
    let s = all.rig.stream();
    all.refuse(true);
    let refused = all.pool.allocate(&s, Request::bytes(MIB)).unwrap_err();
    assert!(
        matches!(refused, MemoryError::Registration { bytes, code: 5, .. } if bytes == 4 * MIB)
    );
    s.synchronize().unwrap();
    all.assert_ended();
    all.refuse(false);
    drop(all.take(&s, 1));
    assert_eq!(all.transport.state.lock().unwrap().begun, 1);
}

#[test]
fn memory_that_cannot_be_unregistered_is_kept_and_tried_again() {
    let all = Registered::on(Sim::h200(1), 64);
    let s = all.rig.stream();
    let block = all.take(&s, 1);
    all.refuse(true);
    drop(block);
    s.synchronize().unwrap();
    all.pool.trim(0).unwrap();
    assert_eq!((all.chunks(), all.rig.budget.used()), (vec![4], 4 * MIB));
    all.refuse(false);
    // What is on its way out is not given out again.
    let next = all.take(&s, 1);
    assert_eq!(all.chunks(), [4]);
    let Registered { rig, transport, pool } = all;
    drop(pool);
    assert_eq!(transport.state.lock().unwrap().registered.len(), 1, "the block keeps its pool");
    transport.state.lock().unwrap().refuses = true;
    drop(next);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 4 * MIB, "a transport may write to it");
    rig.assert_silent();
}
