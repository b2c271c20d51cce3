//! Tests that a launch takes all of its blocks or none.
//!
//! - A refusal at any point leaves no use recorded: the next caller finds every block unchanged.
//! - A block listed twice counts as one, with both kinds of access.
//! - A forgotten launch leaks its blocks, which are never reused under its work.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(unsafe_code, reason = "adopts a stream")]

use crate::support::{MIB, Rig, range};
use aquifer_core::{DeviceId, MemoryError};
use aquifer_device::{Block, DeviceBuffer, DevicePool, PoolConfig, Request};
use aquifer_driver::{
    Access, Call, Operand,
    sim::{Sim, SimKernel},
};
use aquifer_stream::{Launch, Stream, StreamLifetime};
use std::{mem::ManuallyDrop, time::Duration};

/// Returns whether a write can be prepared immediately, which means that no use is open.
fn free(block: &Block, on: &Stream) -> bool {
    block.prepare(on, Access::Write).map(aquifer_stream::Use::abort).is_ok()
}

/// Queues a kernel that reads the first block and writes the second one.
fn add(rig: &Rig, on: &Stream, from: &Block, to: &Block) {
    let kernel = SimKernel::new("add")
        .reads(range(from), Some(from.generation()))
        .writes(range(to), Some(to.generation()));
    rig.sim.launch(on.raw(), kernel).unwrap();
}

#[test]
fn a_launch_is_ordered_with_every_block_and_each_stream_is_waited_for_once() {
    let rig = Rig::stepped(64);
    let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
    let blocks: Vec<_> = (0..6).map(|_| rig.alloc(&s, MIB)).collect();
    let other = rig.alloc(&v, MIB);
    for block in blocks.iter().chain([&other]) {
        rig.sim
            .access(block.home().raw(), range(block), Access::Write, Some(block.generation()))
            .unwrap();
    }
    let made = |call| rig.calls(call);
    let mut launch = Launch::on(&u).writes(&other);
    for block in &blocks {
        launch = launch.reads(block);
    }
    let ready = launch.preflight().unwrap();
    assert_eq!(
        (made(Call::EventRecord), made(Call::StreamWaitEvent)),
        (2, 2),
        "for seven blocks of two streams"
    );
    blocks.iter().for_each(|block| add(&rig, &u, block, &other));
    ready.commit().unwrap();
    assert_eq!(made(Call::EventRecord), 2, "stamping asks nothing of the driver");
    drop((blocks, other));
    for (home, bytes) in [(&s, 6 * MIB), (&v, MIB)] {
        drop(rig.alloc(home, bytes));
    }
    rig.assert_silent();
}

#[test]
fn a_busy_block_refuses_the_whole_launch_wherever_it_stands() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let blocks: Vec<_> = (0..10).map(|_| rig.alloc(&s, MIB)).collect();
    for busy in &blocks {
        let held = busy.prepare(&s, Access::Write).unwrap();
        let before = rig.sim.driver().calls().made();
        let launch = blocks.iter().fold(Launch::on(&u), |launch, block| launch.reads(block));
        assert_eq!(
            launch.preflight().map(drop),
            Err(MemoryError::Busy { address: busy.address() })
        );
        assert_eq!(rig.sim.driver().calls().made(), before, "found out before any wait");
        drop(held);
        assert!(blocks.iter().all(|block| free(block, &s)));
    }
    // A ready launch also refuses others.
    let ready = blocks
        .iter()
        .fold(Launch::on(&u), |launch, block| launch.reads(block))
        .preflight()
        .unwrap();
    assert!(blocks.iter().all(|block| !free(block, &s)));
    ready.abort();
    assert!(blocks.iter().all(|block| free(block, &s)));
}

#[test]
fn a_wait_that_fails_refuses_the_whole_launch() {
    let rig = Rig::stepped(64);
    let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
    let (a, b) = (rig.alloc(&s, MIB), rig.alloc(&v, MIB));
    for call in [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent] {
        for nth in 1..=2 {
            rig.sim.clear_failures();
            rig.sim.access(s.raw(), range(&a), Access::Write, None).unwrap();
            rig.sim.access(v.raw(), range(&b), Access::Write, None).unwrap();
            rig.sim.fail(call, nth, 999);
            let refused = Launch::on(&u).reads(&a).writes(&b).preflight();
            rig.sim.clear_failures();
            if let Err(error) = refused {
                assert!(matches!(error, MemoryError::Driver(_)), "{error:?}");
            } else {
                // Events are left from earlier calls.
                assert_eq!(call, Call::EventCreate);
            }
            assert!(free(&a, &s) && free(&b, &v), "{call:?} {nth}");
        }
    }
    let (at_a, at_b) = (a.address(), b.address());
    drop((a, b));
    assert_eq!(rig.pool.stats().pending, 0, "no use of a refused launch holds them back");
    let again = (rig.pool.alloc(&s, Request::bytes(MIB)), rig.pool.alloc(&v, Request::bytes(MIB)));
    assert_eq!((again.0.unwrap().address(), again.1.unwrap().address()), (at_a, at_b));
}

#[test]
fn a_block_of_another_device_refuses_the_whole_launch() {
    let sim = Sim::h200(2);
    let pools = [0, 1]
        .map(|id| DevicePool::open(sim.driver(), DeviceId(id), PoolConfig::default()).unwrap());
    let streams = [pools[0].stream().unwrap(), pools[1].stream().unwrap()];
    let [a, b] = [0, 1].map(|id| pools[id].alloc(&streams[id], Request::bytes(MIB)).unwrap());
    let refused = Launch::on(&streams[0]).reads(&a).reads(&b).preflight();
    let wrong = MemoryError::WrongDevice { expected: DeviceId(1), actual: DeviceId(0) };
    assert_eq!(refused.map(drop), Err(wrong));
    assert!(free(&a, &streams[0]) && free(&b, &streams[1]));
}

#[test]
fn a_block_listed_twice_is_one_with_both_kinds_of_access() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, MIB);
    let read = Launch::on(&u).reads(&block).reads(&block).preflight().unwrap();
    let other = block.prepare(&s, Access::Read).unwrap();
    drop((read, other));
    for twice in [
        Launch::on(&u).reads(&block).writes(&block),
        Launch::on(&u).writes(&block).reads(&block),
        Launch::on(&u).writes(&block).writes(&block),
        Launch::on(&u).updates(&block).reads(&block),
    ] {
        let ready = twice.preflight().unwrap();
        assert!(block.prepare(&s, Access::Read).is_err(), "it is written");
        ready.commit().unwrap();
    }
}

#[test]
fn a_strict_launch_refuses_bytes_listed_twice_and_takes_parts_that_do_not_overlap() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let mut buffer: DeviceBuffer<u32> = rig.pool.buffer(&s, 1024).unwrap();
    let twice = MemoryError::ListedTwice { address: buffer.block().address() };
    {
        let (low, high, middle) = (
            buffer.slice(0..512).unwrap(),
            buffer.slice(512..1024).unwrap(),
            buffer.slice(511..513).unwrap(),
        );
        let strict = || Launch::on(&u).strict();
        assert_eq!(strict().reads(&low).writes(&middle).preflight().map(drop), Err(twice.clone()));
        assert_eq!(strict().writes(&buffer).reads(&high).preflight().map(drop), Err(twice.clone()));
        assert_eq!(strict().updates(&low).updates(&low).preflight().map(drop), Err(twice));
        strict().reads(&low).writes(&high).preflight().unwrap().commit().unwrap();
        strict().reads(&low).reads(&middle).reads(&buffer).preflight().unwrap().commit().unwrap();
        Launch::on(&u).reads(&low).writes(&middle).preflight().unwrap().commit().unwrap();
    }
    // The refused launch left nothing behind.
    let part = buffer.slice_mut(0..1).unwrap();
    part.order(s.raw(), None, Access::Write).unwrap();
}

#[test]
fn a_launch_that_is_dropped_ends_as_if_its_work_were_queued() {
    let rig = Rig::stepped(8);
    let (s, u) = (rig.stream(), rig.stream());
    let (a, b) = (rig.alloc(&s, 3 * MIB), rig.alloc(&s, 3 * MIB));
    let ready = Launch::on(&u).reads(&a).writes(&b).preflight().unwrap();
    add(&rig, &u, &a, &b);
    drop(ready);
    drop((a, b));
    drop(rig.alloc(&s, 6 * MIB));
    rig.assert_silent();
}

#[test]
fn a_forgotten_launch_keeps_its_blocks_for_good_and_never_races() {
    let rig = Rig::on(Sim::h200(1), 8, |config| config.wait = Duration::ZERO);
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, 6 * MIB);
    let _forgotten = ManuallyDrop::new(Launch::on(&u).updates(&block).preflight().unwrap());
    drop(block);
    let refused = rig.pool.alloc(&s, Request::bytes(6 * MIB)).unwrap_err();
    let MemoryError::OutOfMemory(refused) = refused else { panic!("{refused:?}") };
    assert_eq!(refused.pending, 6 * MIB);
    rig.assert_silent();
}

#[test]
fn a_launch_on_a_stream_that_is_fenced_at_once_records_one_event() {
    let rig = Rig::stepped(64);
    let s = rig.stream();
    let raw = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this driver. 2. never destroyed.
    let fenced = unsafe { rig.pool.streams().adopt(raw, StreamLifetime::Fenced) }.unwrap();
    let blocks: Vec<_> = (0..10).map(|_| rig.alloc(&s, MIB)).collect();
    for commit in [true, false] {
        let ready = blocks
            .iter()
            .fold(Launch::on(&fenced), |launch, block| launch.writes(block))
            .preflight()
            .unwrap();
        let before = rig.calls(Call::EventRecord);
        if commit {
            ready.commit().unwrap();
        } else {
            drop(ready);
        }
        assert_eq!(rig.calls(Call::EventRecord), before + 1);
    }
}

/// A launch on one part, or one that writes what another reads, does not end the borrow of the
/// other.
#[test]
fn a_launch_ends_no_borrow_of_another_part_nor_of_a_reader() {
    for part in [true, false] {
        let rig = Rig::stepped(8);
        let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
        let mut buffer: DeviceBuffer<u8> = rig.pool.buffer(&s, 6 * MIB as usize).unwrap();
        let use_on_v = |range, access| rig.sim.access(v.raw(), range, access, None).unwrap();
        if part {
            let (a, b) = buffer.split_at_mut(1000).unwrap();
            b.order(v.raw(), None, Access::Write).unwrap();
            use_on_v(b.range(), Access::Write);
            Launch::on(&u).writes(&a).preflight().unwrap().commit().unwrap();
            use_on_v(b.range(), Access::Write);
        } else {
            let reader = buffer.as_slice();
            reader.order(v.raw(), None, Access::Read).unwrap();
            use_on_v(reader.range(), Access::Read);
            Launch::on(&u).writes(&buffer).preflight().unwrap().abort();
            drop(buffer.block().prepare(&u, Access::Write).unwrap());
            use_on_v(reader.range(), Access::Read);
        }
        drop(buffer);
        // The work that `u` waited for runs here. Work queued on `v` after it does not.
        u.synchronize().unwrap();
        let again = rig.alloc(&s, 6 * MIB);
        rig.write(&s, &again);
        rig.assert_silent();
    }
}
