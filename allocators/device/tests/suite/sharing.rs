//! Tests of blocks that are sent to other processes: the receiver sees the same bytes, the memory
//! stays in place while the block lives, and no message can harm the receiver.
#![expect(unsafe_code, reason = "receives memory that others work with")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, plain, read};
use aquifer_core::{Budget, MemoryError, Tag};
use aquifer_device::{
    Block, DeviceBuffer, DevicePool, PoolConfig, ReceivedBlock, Request, ShareError, check_peer,
};
use aquifer_driver::{
    Call, DeviceId, ExportTypes,
    sim::{Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread,
    time::Duration,
};

const UNIT: u64 = 2 * MIB;

fn sharing(limit_mib: u64, set: impl FnOnce(&mut PoolConfig)) -> Rig {
    Rig::on(Sim::h200(1), limit_mib, |config| {
        config.shareable = true;
        set(config);
    })
}

/// The pool of the other process.
fn other_pool(rig: &Rig) -> DevicePool {
    DevicePool::open(rig.sim.driver(), DeviceId(0), PoolConfig::default()).unwrap()
}

fn receive(
    pool: &DevicePool,
    s: &Stream,
    socket: &UnixStream,
) -> Result<ReceivedBlock, ShareError> {
    // SAFETY: 1. All work is on one stream. 2. The tests close it before its block is freed.
    unsafe { pool.receive(s, socket) }
}

/// Sends a block and receives it in another pool.
fn pass(rig: &Rig, to: &DevicePool, s: &Stream, block: &Block, name: &str) -> ReceivedBlock {
    let (here, there) = UnixStream::pair().unwrap();
    let shared = rig.pool.share(block, name).unwrap();
    // More than one batch waits for the receiver.
    thread::scope(|threads| {
        threads.spawn(move || shared.send(&here).unwrap());
        receive(to, s, &there).unwrap()
    })
}

fn read_back(s: &Stream, block: &ReceivedBlock) -> Vec<u8> {
    let mut back = vec![0; block.bytes() as usize];
    let all = 0..back.len();
    s.scope(|c| c.download(block.slice::<u8>(all).unwrap(), &mut back)).unwrap().unwrap();
    back
}

fn filled(rig: &Rig, s: &Stream, bytes: u64, value: u8) -> DeviceBuffer<u8> {
    let mut buffer = rig.bytes(s, bytes);
    s.fill(&mut buffer, value).unwrap();
    buffer
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_block_of_a_cache_is_received_at_its_offset_and_both_sides_write() {
    let rig = sharing(64, |_| ());
    let (s, other) = (rig.stream(), other_pool(&rig));
    let blocks: Vec<_> = (1..=3).map(|n| filled(&rig, &s, 3 * MIB / 2, n)).collect();
    for (block, value) in blocks.iter().zip(1..) {
        let mut theirs = pass(&rig, &other, &s, block.block(), &format!("block {value}"));
        assert_eq!(theirs.name(), format!("block {value}"));
        assert_eq!(theirs.range().bytes, 3 * MIB / 2);
        assert_eq!(read_back(&s, &theirs), vec![value; block.len()]);
        let len = block.len();
        s.fill(&mut theirs.slice_mut::<u8>(len - 1..len).unwrap(), 0x80).unwrap();
        assert_eq!(read(&s, block)[len - 2..], [value, 0x80]);
        assert_eq!(theirs.close(), Ok(true));
    }
    assert_eq!(
        (other.stats().physical, other.stats().live),
        (0, 0),
        "charged where it was created"
    );
    drop(blocks);
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.sim.outstanding().handles, 0);
    rig.assert_silent();
}

#[test]
fn a_block_of_hundreds_of_handles_arrives_with_few_descriptors_open() {
    let rig = sharing(512, |config| config.handle_bytes = UNIT);
    let (s, other) = (rig.stream(), other_pool(&rig));
    let block = filled(&rig, &s, 150 * UNIT + 512, 7);
    assert_eq!(rig.pool.share(block.block(), "").unwrap().handles(), 151);
    let before = open_descriptors();
    for _ in 0..2 {
        let theirs = pass(&rig, &other, &s, block.block(), "");
        assert!(read_back(&s, &theirs).iter().all(|&byte| byte == 7));
        theirs.close().unwrap();
    }
    // Other tests of this process open some too, but not hundreds.
    assert!(open_descriptors() < before + 150);
    rig.assert_silent();
}

#[test]
fn memory_under_a_shared_block_stays_while_all_around_it_is_compacted() {
    let rig = sharing(64, |config| {
        config.handle_bytes = UNIT;
        config.slack = 6;
    });
    let (s, other) = (rig.stream(), other_pool(&rig));
    let mut blocks: Vec<_> = (0..32).map(|n| Some(filled(&rig, &s, UNIT, n))).collect();
    let kept = blocks[9].take().unwrap();
    let theirs = pass(&rig, &other, &s, kept.block(), "kept");
    // Half of the memory is freed in parts, and one block takes all of it.
    blocks.iter_mut().step_by(2).for_each(|block| drop(block.take()));
    s.synchronize().unwrap();
    let moved = rig.pool.stats().moves;
    let large = filled(&rig, &s, 15 * UNIT, 0xff);
    assert!(rig.pool.stats().moves > moved, "handles have moved");
    rig.pool.trim(0).unwrap();
    assert_eq!(read_back(&s, &theirs), vec![9; UNIT as usize]);
    assert_eq!(read(&s, &kept), vec![9; UNIT as usize]);
    theirs.close().unwrap();
    drop((large, blocks, kept));
    rig.assert_silent();
}

#[test]
fn the_device_keeps_memory_that_a_receiver_maps_when_the_sender_is_gone() {
    let rig = sharing(64, |_| ());
    let (s, other) = (rig.stream(), other_pool(&rig));
    let u = other.stream().unwrap();
    let block = filled(&rig, &s, 4 * MIB, 5);
    let theirs = pass(&rig, &other, &u, block.block(), "");
    s.synchronize().unwrap();
    drop((block, s));
    rig.assert_empty();
    assert_eq!(read_back(&u, &theirs), vec![5; 4 * MIB as usize]);
    // Without `close`, a trim unmaps it.
    drop(theirs);
    u.synchronize().unwrap();
    other.trim(0).unwrap();
    assert_eq!(rig.sim.outstanding().handles, 0);
    rig.assert_silent();
}

#[test]
fn a_close_waits_for_the_work_of_other_streams_that_was_not_recorded() {
    let rig = Rig::on(Sim::h200(1).seeded(3), 64, |config| config.shareable = true);
    let (s, other) = (rig.stream(), other_pool(&rig));
    let block = filled(&rig, &s, 4 * MIB, 5);
    let theirs = pass(&rig, &other, &s, block.block(), "");
    let u = rig.stream();
    u.wait_for(&s).unwrap();
    // A kernel of another library, which no one records.
    rig.sim.access(u.raw(), theirs.range(), aquifer_driver::Access::Read, None).unwrap();
    assert_eq!(theirs.close(), Ok(true));
    rig.assert_silent();
}

#[test]
fn a_close_while_a_capture_is_announced_leaves_the_device_alone() {
    let rig = sharing(64, |_| ());
    let (s, u, other) = (rig.stream(), rig.stream(), other_pool(&rig));
    let block = filled(&rig, &s, 4 * MIB, 5);
    let theirs = pass(&rig, &other, &s, block.block(), "");
    let announced = other.graph_pool().unwrap().announce(&u).unwrap();
    let waits = rig.calls(Call::DeviceSynchronize);
    assert_eq!(theirs.close(), Ok(false));
    assert_eq!(rig.calls(Call::DeviceSynchronize), waits);
    drop(announced);
    other.trim(0).unwrap();
    drop(block);
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.sim.outstanding().handles, 0);
    rig.assert_silent();
}

#[test]
fn stable_blocks_and_blocks_of_graph_pools_are_shared_too() {
    let rig = sharing(64, |_| ());
    let (s, other) = (rig.stream(), other_pool(&rig));
    let stable = rig.stable(&s, 3 * MIB);
    let graphs = rig.pool.graph_pool().unwrap();
    let raw = s.raw();
    let announced = graphs.announce_all_where(move |stream| stream == raw).unwrap();
    let first = filled(&rig, &s, MIB, 1);
    let second = filled(&rig, &s, 5 * MIB, 2);
    drop(announced);
    assert_eq!(graphs.stats().blocks, 2);
    for (block, value) in [(first.block(), 1), (second.block(), 2)] {
        let theirs = pass(&rig, &other, &s, block, "");
        assert_eq!(read_back(&s, &theirs), vec![value; block.bytes() as usize]);
        theirs.close().unwrap();
    }
    let theirs = pass(&rig, &other, &s, stable.block(), "");
    assert_eq!((theirs.bytes(), theirs.address() % UNIT), (3 * MIB, 0));
    let again = rig.pool.share(theirs.mapping().block(), "");
    let foreign =
        |refused| matches!(refused, Err(ShareError::Memory(MemoryError::ForeignBlock { .. })));
    assert!(foreign(again), "a block of another pool");
    let again = other.share(theirs.mapping().block(), "").unwrap_err();
    let unsupported = matches!(again, ShareError::Memory(MemoryError::Unsupported { .. }));
    assert!(unsupported, "received memory: {again}");
    theirs.close().unwrap();
    rig.assert_silent();
}

#[test]
fn memory_that_was_not_created_for_it_is_refused_before_anything_is_sent() {
    let mut without_files = SimConfig::h200(1);
    without_files.devices[0].info.export_types = ExportTypes::NONE;
    let shareable = |config: &mut PoolConfig| config.shareable = true;
    let rigs = [
        Rig::new(64),
        Rig::on(plain(), 64, shareable),
        Rig::on(Sim::new(without_files), 64, shareable),
    ];
    for rig in rigs {
        let s = rig.stream();
        let block = rig.alloc(&s, MIB);
        let refused = rig.pool.share(&block, "").unwrap_err();
        assert!(
            matches!(refused, ShareError::Memory(MemoryError::Unsupported { .. })),
            "{refused}"
        );
    }
    let rig = sharing(64, |_| ());
    let block = rig.alloc(&rig.stream(), MIB);
    assert!(matches!(
        rig.pool.share(&block, &"x".repeat(65)),
        Err(ShareError::BadField { value: 65, .. })
    ));
}

#[test]
fn where_the_system_forbids_exportable_memory_blocks_are_served_without() {
    let rig = sharing(64, |_| ());
    let s = rig.stream();
    // CUDA_ERROR_NOT_PERMITTED.
    rig.sim.fail(Call::HandleCreate, 1, 800);
    let block = rig.alloc(&s, MIB);
    let refused = rig.pool.share(&block, "").unwrap_err();
    assert!(matches!(refused, ShareError::Memory(MemoryError::Unsupported { .. })), "{refused}");
    // A lack of memory is no such refusal.
    rig.sim.fail_every(Call::HandleCreate, 1, 2);
    assert!(rig.pool.alloc_stable(&s, Request::bytes(40 * MIB)).is_err());
    rig.sim.clear_failures();
    let large = rig.stable(&s, 40 * MIB);
    assert!(rig.pool.share(large.block(), "").is_ok());
    rig.assert_silent();
}

#[test]
fn memory_that_can_be_parked_is_not_shared_since_it_does_not_stay() {
    let rig = sharing(64, |_| ());
    let (s, tag) = (rig.stream(), Tag::named("sharer"));
    let parkable = rig.pool.parkable(tag).unwrap();
    let graphs = rig.pool.parkable_graph_pool(tag).unwrap();
    let raw = s.raw();
    let announced = graphs.announce_all_where(move |stream| stream == raw).unwrap();
    let of_graph = rig.alloc(&s, MIB);
    drop(announced);
    for block in [of_graph, parkable.alloc(&s, Request::bytes(MIB)).unwrap()] {
        let refused = rig.pool.share(&block, "").unwrap_err();
        assert!(
            matches!(refused, ShareError::Memory(MemoryError::Unsupported { .. })),
            "{refused}"
        );
    }
}

const HEADER: usize = 256;

#[test]
fn a_receiver_waits_no_longer_than_its_sockets_timeout() {
    let rig = sharing(64, |_| ());
    let s = rig.stream();
    let (mut here, there) = UnixStream::pair().unwrap();
    there.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    here.write_all(b"aq").unwrap();
    let refused = receive(&rig.pool, &s, &there).unwrap_err();
    assert!(matches!(refused, ShareError::TimedOut), "{refused}");
}

#[test]
fn a_sender_is_told_that_its_receiver_is_gone_and_is_not_killed() {
    let rig = sharing(512, |config| config.handle_bytes = UNIT);
    let s = rig.stream();
    let block = rig.alloc(&s, 70 * UNIT);
    let shared = rig.pool.share(&block, "").unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    drop(there);
    assert!(matches!(shared.send(&here), Err(ShareError::Io(_))), "no SIGPIPE");
    let (here, there) = UnixStream::pair().unwrap();
    let mut first = [0; HEADER];
    thread::scope(|threads| {
        threads.spawn(move || (&there).read_exact(&mut first).unwrap());
        assert!(shared.send(&here).is_err(), "gone after the header");
    });
}

#[test]
fn a_driver_that_refuses_to_import_map_or_open_leaves_nothing() {
    let rig = sharing(64, |config| config.handle_bytes = UNIT);
    let (s, other) = (rig.stream(), other_pool(&rig));
    let block = filled(&rig, &s, 3 * UNIT, 1);
    let before = rig.sim.outstanding();
    let calls = [
        (Call::HandleImport, 3),
        (Call::AddressReserve, 1),
        (Call::Map, 1),
        (Call::Map, 3),
        (Call::SetAccess, 1),
    ];
    for (call, nth) in calls {
        let (here, there) = UnixStream::pair().unwrap();
        rig.pool.share(block.block(), "").unwrap().send(&here).unwrap();
        rig.sim.fail(call, nth, 999);
        let refused = receive(&other, &s, &there).unwrap_err();
        assert!(refused.to_string().contains(call.name()), "{call:?}: {refused}");
        assert_eq!(rig.sim.outstanding(), before, "{call:?}");
    }
    // The driver refuses the unmap as well: a later sweep does it.
    let (here, there) = UnixStream::pair().unwrap();
    rig.pool.share(block.block(), "").unwrap().send(&here).unwrap();
    rig.sim.fail(Call::SetAccess, 1, 999);
    rig.sim.fail(Call::Unmap, 1, 999);
    assert!(receive(&other, &s, &there).is_err());
    let _swept = other.trim(0);
    other.trim(0).unwrap();
    assert_eq!(rig.sim.outstanding(), before);
    rig.assert_silent();
}

#[test]
fn the_other_end_is_of_the_same_user() {
    let (here, there) = UnixStream::pair().unwrap();
    check_peer(&here).unwrap();
    check_peer(&there).unwrap();
    let other = ShareError::OtherUser { expected: 1000, actual: 0 };
    assert_eq!(other.to_string(), "the other end belongs to user 0 instead of 1000");
}

#[test]
fn free_memory_of_a_graph_pool_serves_alone_and_goes_back_to_it() {
    let rig = Rig::new(16);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    graphs.retain_free();
    assert!(graphs.alloc_free(&s, Request::bytes(MIB)).unwrap().is_none(), "it has nothing");
    let raw = s.raw();
    let announced = graphs.announce_all_where(move |stream| stream == raw).unwrap();
    let spare = filled(&rig, &s, 8 * MIB, 1);
    let address = spare.block().address();
    drop(announced);
    let rest = rig.alloc(&u, 8 * MIB);
    drop(spare);
    assert!(rig.pool.alloc(&u, Request::bytes(6 * MIB)).is_err());
    let used = rig.budget.used();
    let served = graphs.alloc_free(&u, Request::bytes(6 * MIB)).unwrap().unwrap();
    assert_eq!((served.address(), rig.budget.used()), (address, used));
    assert!(graphs.alloc_free(&u, Request::bytes(6 * MIB)).unwrap().is_none());
    let mut served = DeviceBuffer::<u8>::from_block(served).unwrap();
    s.synchronize().unwrap();
    u.fill(&mut served, 3).unwrap();
    drop(served);
    assert!(graphs.alloc_free(&s, Request::bytes(8 * MIB)).unwrap().is_some(), "it is back");
    drop(rest);
    rig.assert_silent();
}

#[test]
fn a_budget_is_charged_for_shared_memory_once() {
    let budget = Budget::new("both", 8 * MIB);
    let rig = Rig::on(Sim::h200(1), 8, |config| {
        config.budget = Some(budget.clone());
        config.shareable = true;
    });
    let mut config = PoolConfig::with_budget(budget.clone());
    config.shareable = true;
    let other = DevicePool::open(rig.sim.driver(), DeviceId(0), config).unwrap();
    let s = rig.stream();
    let block = rig.stable(&s, 8 * MIB);
    let theirs: Vec<_> = (0..3).map(|_| pass(&rig, &other, &s, block.block(), "")).collect();
    assert_eq!(budget.used(), 8 * MIB);
    for theirs in theirs {
        theirs.close().unwrap();
    }
}
