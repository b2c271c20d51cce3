//! Tests of copies in safe code over pinned memory: whatever is waited for, dropped or forgotten,
//! nothing races.
//!
//! - The copy owns the host side until it is done, or borrows it in a scope that waits.
//! - A refusal returns the host side unchanged, and leaves no gate closed.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{self, Bytes, MIB, Rig, assert_silent, read, small, within};
use aquifer::{
    Access, DeviceBuffer, DeviceId, DevicePool, MemoryError, PinnedBuf, PoolConfig, Runtime,
    StagerConfig,
    boxed::Box as PinnedBox,
    driver::Call,
    sim::Sim,
    stream::{HostOwned, InFlight, RefusedCopy, StreamLifetime},
    vec::Vec as PinnedVec,
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

fn refused<H>(flight: Result<InFlight<H>, RefusedCopy<H>>) -> RefusedCopy<H> {
    let Err(refused) = flight else { unreachable!("this copy cannot be") };
    refused
}

#[test]
fn a_vector_goes_up_and_comes_down_the_same() {
    let mut rig = Rig::stepped();
    let mut v = rig.bytes(0);
    v.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 % 251) as u8);
    let (before, address) = (v.to_vec(), v.as_ptr());
    let mut v = rig.s.upload(v, &mut rig.x).unwrap().wait().unwrap();
    assert_eq!(v.as_ptr(), address, "it is the same vector");
    v.fill(0);
    let v = rig.s.download(&rig.x, v).unwrap().wait().unwrap();
    assert!(v[..] == before[..]);
    assert_eq!(v.capacity(), MIB);
    drop(v);
    assert_silent(&rig.sim);
}

#[test]
fn boxes_and_buffers_fly_like_vectors_and_elements_may_be_of_any_plain_type() {
    let rig = Rig::stepped();
    let (pool, pinned) = (rig.rt.device(0).unwrap(), rig.rt.pinned_near(0));
    let mut x: DeviceBuffer<[f64; 4]> = pool.buffer(&rig.s, 1000).unwrap();
    let mut up = PinnedBuf::<[f64; 4]>::new_in(pinned, 1000).unwrap();
    up.iter_mut().enumerate().for_each(|(i, four)| *four = [i as f64, 1.0, -1.0, 0.5]);
    assert!(up.is_pinned());
    let up = rig.s.upload(up, &mut x).unwrap().wait().unwrap();
    let mut down: PinnedVec<[f64; 4], _> = PinnedVec::new_in(pinned.allocator());
    down.resize(1000, [0.0; 4]);
    let down: PinnedBox<[[f64; 4]], _> = down.into_boxed_slice();
    let down = rig.s.download(&x, down).unwrap().wait().unwrap();
    assert!(down[..] == up[..]);
    assert_silent(&rig.sim);
}

#[test]
fn a_part_of_a_buffer_is_copied_alone() {
    let mut rig = Rig::stepped();
    rig.s.fill(&mut rig.x, 9).unwrap();
    let mut part = rig.bytes(1);
    part.truncate(1000);
    let mut middle = rig.x.slice_mut(500..1500).unwrap();
    drop(rig.s.upload(part, &mut middle).unwrap());
    let back = read(&rig.s, &rig.x);
    assert!(back[..500].iter().chain(&back[1500..]).all(|&byte| byte == 9));
    assert!(back[500..1500].iter().all(|&byte| byte == 1));
}

#[test]
fn a_flight_is_done_when_the_copy_is_and_a_deadline_gives_it_back() {
    let mut rig = Rig::stepped();
    let v = rig.bytes(3);
    let flight = rig.s.upload(v, &mut rig.x).unwrap();
    assert!(!flight.is_done());
    let start = Instant::now();
    let flight = flight.wait_until(start + Duration::from_millis(10)).unwrap().unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(10));
    assert!(!flight.is_done(), "looking does not make it so");
    rig.sim.run_all();
    assert!(flight.is_done());
    let v = flight.wait_until(start).unwrap().unwrap();
    assert!(v.iter().all(|&byte| byte == 3));
}

#[test]
fn a_flight_waits_for_its_own_copy_and_not_for_what_comes_after_it() {
    let mut rig = Rig::stepped();
    let v = rig.bytes(1);
    let mut y: DeviceBuffer<u8> = rig.rt.device(0).unwrap().buffer(&rig.s, MIB).unwrap();
    let flight = rig.s.upload(v, &mut rig.x).unwrap();
    assert!(!flight.is_done(), "an event stands behind it from here on");
    rig.s.fill(&mut y, 2).unwrap();
    drop(flight.wait().unwrap());
    assert_eq!(rig.sim.pending(rig.s.raw()), 1);
}

#[test]
fn the_block_of_a_flight_dropped_early_is_pending_until_the_copy_is_done() {
    let mut rig = Rig::stepped();
    let v = rig.bytes(7);
    let address = v.as_ptr().addr();
    let flight = rig.s.upload(v, &mut rig.x).unwrap();
    drop(flight);
    let pinned = rig.rt.pinned_near(0);
    assert_eq!(pinned.stats().memory.pending, MIB as u64);
    let others: Vec<_> = (0..2).map(|_| rig.bytes(0xff)).collect();
    assert!(
        others.iter().all(|other| other.as_ptr().addr() != address),
        "somebody else has it already"
    );
    rig.sim.run_all();
    assert_eq!(rig.next_address(), address, "done, it can be had again");
    assert_eq!(pinned.stats().memory.pending, 0);
    assert!(
        read(&rig.s, &rig.x).iter().all(|&byte| byte == 7),
        "what was copied is what was handed in"
    );
    drop(others);
    assert_silent(&rig.sim);
}

#[test]
fn a_download_dropped_early_writes_into_memory_without_an_owner() {
    let mut rig = Rig::stepped();
    rig.s.fill(&mut rig.x, 7).unwrap();
    let v = rig.bytes(0);
    let address = v.as_ptr().addr();
    drop(rig.s.download(&rig.x, v).unwrap());
    let others: Vec<_> = (0..3).map(|_| rig.bytes(1)).collect();
    assert!(others.iter().all(|other| other.as_ptr().addr() != address));
    rig.sim.run_all();
    assert!(others.iter().flatten().all(|&byte| byte == 1));
    assert_eq!(rig.next_address(), address);
    assert_silent(&rig.sim);
}

#[test]
fn many_dropped_flights_reuse_few_blocks() {
    let sim = Sim::h200(1).seeded(5);
    let mut config = small();
    config.patience = support::PATIENCE;
    let builder = Runtime::builder().driver(sim.driver()).pinned(config);
    let rt = builder.pinned_budget(4 << 20).build().unwrap();
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let mut kept = Vec::new();
    for round in 0..32u8 {
        let mut v = PinnedVec::new_in(rt.pinned_near(0).allocator());
        v.resize(MIB, round);
        let mut x: DeviceBuffer<u8> = pool.buffer(&s, MIB).unwrap();
        drop(s.upload(v, &mut x).unwrap());
        kept.push(x);
    }
    for (round, x) in (0..32u8).zip(&kept) {
        assert!(read(&s, x).iter().all(|&byte| byte == round), "round {round}");
    }
    assert!(rt.pinned_near(0).stats().memory.peak_physical <= 4 << 20);
    assert_silent(&sim);
}

/// Passes in `host`, expects a refusal, and asserts that it is returned unchanged and that its
/// memory is free afterwards.
#[track_caller]
fn comes_back(
    rig: &Rig,
    v: Bytes,
    refuse: impl FnOnce(Bytes) -> RefusedCopy<Bytes>,
) -> MemoryError {
    let (address, before) = (v.as_ptr().addr(), v.to_vec());
    let refused = refuse(v);
    assert_eq!(refused.to_string(), refused.error.to_string());
    let v = refused.host;
    assert_eq!(v.as_ptr().addr(), address);
    assert!(v[..] == before[..]);
    drop(v);
    assert_eq!(rig.next_address(), address, "nothing holds the block back");
    assert_eq!(rig.rt.pinned_near(0).stats().memory.pending, 0);
    refused.error
}

#[test]
fn lengths_that_differ_are_refused_with_both() {
    let mut rig = Rig::stepped();
    let mut v = rig.bytes(1);
    v.truncate(1000);
    let error = comes_back(&rig, v, |v| refused(rig.s.download(&rig.x, v)));
    assert_eq!(error, MemoryError::LengthMismatch { from: MIB as u64, to: 1000 });
    let v = rig.bytes(1);
    let mut half = rig.x.slice_mut(0..MIB / 2).unwrap();
    let back = refused(rig.s.upload(v, &mut half));
    assert_eq!(back.error, MemoryError::LengthMismatch { from: MIB as u64, to: MIB as u64 / 2 });
    let empty = Bytes::new_in(rig.rt.pinned_near(0).allocator());
    let back = refused(rig.s.upload(empty, &mut rig.x));
    assert_eq!(back.error, MemoryError::LengthMismatch { from: 0, to: MIB as u64 });
    assert_eq!(rig.sim.pending(rig.s.raw()), 0, "nothing was queued");
}

#[test]
fn a_buffer_of_another_device_is_refused() {
    let rig = Rig::new(Sim::h200(2).stepped());
    let there = rig.rt.device(1).unwrap();
    let mut y: DeviceBuffer<u8> = there.buffer(&there.stream().unwrap(), MIB).unwrap();
    let wrong = MemoryError::WrongDevice { expected: DeviceId(0), actual: DeviceId(1) };
    let v = rig.bytes(1);
    assert_eq!(comes_back(&rig, v, |v| refused(rig.s.upload(v, &mut y))), wrong);
    let v = rig.bytes(1);
    assert_eq!(comes_back(&rig, v, |v| refused(rig.s.download(&y, v))), wrong);
    let bytes = vec![0; MIB];
    assert_eq!(rig.s.scope(|c| c.upload(&bytes, &mut y)), Ok(Err(wrong)));
}

#[test]
fn a_driver_that_refuses_the_copy_leaves_no_gate_shut() {
    let mut rig = Rig::stepped();
    let v = rig.bytes(1);
    rig.sim.fail(Call::CopyToDevice, 1, 999);
    let mut x = std::mem::replace(&mut rig.x, {
        let pool = rig.rt.device(0).unwrap();
        pool.buffer(&rig.s, 512).unwrap()
    });
    let error = comes_back(&rig, v, |v| refused(rig.s.upload(v, &mut x)));
    assert!(matches!(error, MemoryError::Driver(_)), "{error:?}");
    let v = rig.bytes(1);
    rig.sim.fail(Call::CopyToHost, 1, 999);
    let error = comes_back(&rig, v, |v| refused(rig.s.download(&x, v)));
    assert!(matches!(error, MemoryError::Driver(_)), "{error:?}");
    let v = rig.bytes(5);
    drop(rig.s.upload(v, &mut x).unwrap());
    assert!(read(&rig.s, &x).iter().all(|&byte| byte == 5), "and the next copy goes well");
    assert_silent(&rig.sim);
}

#[test]
fn a_copy_into_a_prepared_block_is_refused_until_the_use_ends() {
    let mut rig = Rig::stepped();
    let u = rig.rt.device(0).unwrap().stream().unwrap();
    let address = rig.x.block().address();
    let prepared = rig.x.block().prepare(&u, Access::Read).unwrap();
    let v = rig.bytes(1);
    let back = refused(rig.s.upload(v, &mut rig.x));
    assert_eq!(back.error, MemoryError::Busy { address });
    let v = rig.s.download(&rig.x, back.host).unwrap().wait().unwrap();
    prepared.finish().unwrap();
    drop(rig.s.upload(v, &mut rig.x).unwrap());
    assert_silent(&rig.sim);
}

#[test]
#[expect(unsafe_code, reason = "plays another library")]
fn a_retired_stream_refuses_copies() {
    let mut rig = Rig::stepped();
    let foreign = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this device, 2. retired below before it is destroyed.
    let adopted =
        unsafe { rig.rt.device(0).unwrap().streams().adopt(foreign, StreamLifetime::Retired) }
            .unwrap();
    let v = rig.bytes(4);
    let flight = adopted.upload(v, &mut rig.x).unwrap();
    adopted.clone().retire().unwrap();
    // SAFETY: 1. it has been retired, and nothing uses it from here on.
    unsafe { rig.sim.driver().stream_destroy(foreign) }.unwrap();
    assert!(flight.is_done());
    let v = flight.wait().unwrap();
    let back = refused(adopted.upload(v, &mut rig.x));
    assert_eq!(back.error, MemoryError::UnknownId);
    let bytes = vec![0; MIB];
    assert_eq!(adopted.scope(|c| c.upload(&bytes, &mut rig.x)), Ok(Err(MemoryError::UnknownId)));
    assert!(read(&rig.s, &rig.x).iter().all(|&byte| byte == 4));
    assert_silent(&rig.sim);
}

/// A use of a block on its own stream needs no check, so the stream itself must refuse.
#[test]
#[expect(unsafe_code, reason = "plays another library")]
fn a_retired_stream_refuses_copies_of_its_own_blocks() {
    let rig = Rig::stepped();
    let pool = rig.rt.device(0).unwrap();
    let foreign = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. a stream of this device, 2. retired below before it is destroyed.
    let adopted = unsafe { pool.streams().adopt(foreign, StreamLifetime::Retired) }.unwrap();
    let [mut x, mut y]: [DeviceBuffer<u8>; 2] = [0, 1].map(|_| pool.buffer(&adopted, MIB).unwrap());
    adopted.clone().retire().unwrap();
    // SAFETY: 1. it has been retired, and nothing uses it from here on.
    unsafe { rig.sim.driver().stream_destroy(foreign) }.unwrap();

    let v = rig.bytes(4);
    let back = refused(adopted.upload(v, &mut x));
    assert_eq!(back.error, MemoryError::UnknownId);
    let back = refused(adopted.download(&x, back.host));
    assert_eq!(back.error, MemoryError::UnknownId);
    assert_eq!(adopted.copy(&x, &mut y), Err(MemoryError::UnknownId));
    assert_eq!(adopted.fill(&mut x, 1), Err(MemoryError::UnknownId));
    let mut host = back.host;
    assert_eq!(adopted.scope(|c| c.download(&x, &mut host)), Ok(Err(MemoryError::UnknownId)));
    // Other streams can still use the blocks.
    rig.s.fill(&mut x, 5).unwrap();
    assert!(read(&rig.s, &x).iter().all(|&byte| byte == 5));
    assert_silent(&rig.sim);
}

/// The control for scopes that do not wait: a queued copy while the host writes its memory.
fn touch(rig: &Rig, bytes: &mut [u8]) {
    rig.sim.host_write(bytes.as_ptr().addr() as u64, bytes.len() as u64);
    bytes.fill(0xee);
}

#[test]
fn the_oracle_reports_a_host_write_under_a_copy() {
    let mut rig = Rig::stepped();
    let mut v = rig.bytes(1);
    let address = v.bytes().cast::<u8>().as_ptr().addr();
    let flight = rig.s.upload(v, &mut rig.x).unwrap();
    rig.sim.host_write(address as u64, MIB as u64);
    assert_eq!(rig.sim.take_violations().len(), 1, "the tests below count on it");
    drop(flight);
}

#[test]
fn a_scope_waits_for_what_borrows_before_it_returns() {
    let mut rig = Rig::stepped();
    let (mut up, mut down) = (rig.bytes(6), rig.bytes(0));
    let queued = rig
        .s
        .scope(|c| {
            c.upload(&up, &mut rig.x)?;
            c.download(&rig.x, &mut down)?;
            assert_eq!(c.stream(), &rig.s);
            Ok::<_, MemoryError>(rig.sim.pending(rig.s.raw()))
        })
        .unwrap()
        .unwrap();
    assert_eq!(queued, 2, "inside, the copies are on their way");
    assert_eq!(rig.sim.pending(rig.s.raw()), 0, "and after, they are done");
    assert!(down.iter().all(|&byte| byte == 6));
    touch(&rig, &mut up);
    touch(&rig, &mut down);
    assert_silent(&rig.sim);
}

#[test]
fn a_scope_waits_on_unwind_too() {
    let mut rig = Rig::stepped();
    let mut up = rig.bytes(6);
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        rig.s.scope(|c| {
            c.upload(&up, &mut rig.x).unwrap();
            assert_eq!(rig.sim.pending(rig.s.raw()), 1);
            panic!("on purpose");
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(rig.sim.pending(rig.s.raw()), 0);
    touch(&rig, &mut up);
    assert!(read(&rig.s, &rig.x).iter().all(|&byte| byte == 6));
    assert_silent(&rig.sim);
}

#[test]
fn a_scope_waits_for_what_was_queued_before_its_work_failed() {
    let mut rig = Rig::stepped();
    let mut up = rig.bytes(6);
    let short = rig.bytes(7);
    let failed = rig.s.scope(|c| {
        c.upload(&up, &mut rig.x)?;
        c.upload(&short[..10], &mut rig.x)
    });
    assert_eq!(failed, Ok(Err(MemoryError::LengthMismatch { from: 10, to: MIB as u64 })));
    assert_eq!(rig.sim.pending(rig.s.raw()), 0);
    touch(&rig, &mut up);
    assert_silent(&rig.sim);
}

#[test]
fn a_scope_whose_wait_is_refused_waits_by_the_next_means() {
    // For both a normal return and a panic.
    for unwinds in [false, true] {
        for means in
            [&[Call::StreamSynchronize][..], &[Call::StreamSynchronize, Call::EventSynchronize]]
        {
            let mut rig = Rig::stepped();
            let mut up = rig.bytes(6);
            means.iter().for_each(|&call| rig.sim.fail(call, 1, 999));
            let result = catch_unwind(AssertUnwindSafe(|| {
                rig.s.scope(|c| {
                    c.upload(&up, &mut rig.x).unwrap();
                    assert!(!unwinds, "on purpose");
                })
            }));
            assert_eq!(result.ok(), (!unwinds).then_some(Ok(())));
            assert_eq!(rig.sim.pending(rig.s.raw()), 0, "{means:?}");
            touch(&rig, &mut up);
            assert_silent(&rig.sim);
        }
    }
}

#[test]
fn a_scope_on_a_device_that_is_lost_says_so() {
    let mut rig = Rig::stepped();
    let up = rig.bytes(6);
    let lost = MemoryError::DeviceLost { device: DeviceId(0) };
    let result = rig.s.scope(|c| {
        let queued = c.upload(&up, &mut rig.x);
        rig.sim.lose_device(DeviceId(0));
        queued
    });
    assert_eq!(result, Err(lost.clone()));
    let result = rig.s.scope(|c| c.upload(&up, &mut rig.x));
    assert!(matches!(&result, Err(error) if *error == lost), "{result:?}");
}

#[test]
fn a_flight_on_a_device_that_is_lost_says_so_and_does_not_hang() {
    let mut rig = Rig::stepped();
    let (one, two) = (rig.bytes(1), rig.bytes(2));
    let (one, two) =
        (rig.s.upload(one, &mut rig.x).unwrap(), rig.s.upload(two, &mut rig.x).unwrap());
    rig.sim.lose_device(DeviceId(0));
    assert!(!one.is_done());
    let lost = MemoryError::DeviceLost { device: DeviceId(0) };
    assert_eq!(within(move || one.wait().map(drop)), Err(lost.clone()));
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(within(move || two.wait_until(soon).map(drop)), Err(lost));
    assert_silent(&rig.sim);
}

#[test]
fn pageable_slices_go_up_and_down_in_a_scope() {
    let mut rig = Rig::stepped();
    let up: Vec<u8> = (0..MIB).map(|i| (i % 253) as u8).collect();
    let mut down = vec![0; MIB];
    rig.s.scope(|c| c.upload(&up, &mut rig.x)).unwrap().unwrap();
    // On another stream, which waits for the first one automatically.
    let u = rig.rt.device(0).unwrap().stream().unwrap();
    u.scope(|c| c.download(&rig.x, &mut down)).unwrap().unwrap();
    assert!(up == down);
    assert_silent(&rig.sim);
}

#[test]
fn a_scope_may_borrow_from_a_scope_around_it() {
    let mut rig = Rig::stepped();
    let u = rig.rt.device(0).unwrap().stream().unwrap();
    let mut y: DeviceBuffer<u8> = rig.rt.device(0).unwrap().buffer(&u, MIB).unwrap();
    let up = rig.bytes(9);
    let (mut one, mut two) = (rig.bytes(0), rig.bytes(0));
    rig.s
        .scope(|outer| {
            outer.upload(&up, &mut rig.x)?;
            u.scope(|inner| {
                inner.upload(&up, &mut y)?;
                inner.download(&y, &mut one)
            })??;
            outer.download(&rig.x, &mut two)
        })
        .unwrap()
        .unwrap();
    assert!(one.iter().chain(two.iter()).all(|&byte| byte == 9));
    assert_silent(&rig.sim);
}

/// Returns a second pool of the first device, with separate streams.
fn second_pool(rig: &Rig) -> DevicePool {
    let driver = rig.rt.device(0).unwrap().driver().clone();
    DevicePool::open(driver, DeviceId(0), PoolConfig::default()).unwrap()
}

#[test]
fn work_on_a_stream_of_one_pool_copies_and_fills_memory_of_another_in_order() {
    let mut rig = Rig::stepped();
    let other = second_pool(&rig);
    let t = other.stream().unwrap();
    let mut y: DeviceBuffer<u8> = other.buffer(&t, MIB).unwrap();
    let (x, s) = (&mut rig.x, &rig.s);

    t.fill(&mut y, 1).unwrap();
    s.copy(&y, x).unwrap(); // the pool of `y` does not lease `s`
    t.copy(&*x, &mut y).unwrap();
    s.fill(&mut y, 2).unwrap();
    t.copy(&y, x).unwrap();
    assert_eq!(read(&t, x), vec![2; MIB]);

    let up = vec![3; MIB];
    s.scope(|c| c.upload(&up, &mut y)).unwrap().unwrap();
    let mut pinned = PinnedVec::with_capacity_in(MIB, rig.rt.pinned_near(0).allocator());
    pinned.resize(MIB, 4);
    let pinned = t.upload(pinned, x).unwrap().wait().unwrap();
    assert_eq!(read(&t, x), &pinned[..]);
    assert_eq!(read(s, &y), up);
    assert_silent(&rig.sim);
}

#[test]
fn a_block_that_a_stream_of_another_pool_still_uses_is_not_given_out_again() {
    let rig = Rig::stepped();
    let other = second_pool(&rig);
    let t = other.stream().unwrap();
    let y: DeviceBuffer<u8> = other.buffer(&t, MIB).unwrap();
    let address = y.block().address();
    let mut x = rig.rt.device(0).unwrap().buffer::<u8>(&rig.s, MIB).unwrap();
    rig.s.copy(&y, &mut x).unwrap();
    drop(y);
    let next: DeviceBuffer<u8> = other.buffer(&t, MIB).unwrap();
    assert_ne!(next.block().address(), address, "`s` still reads it");
    rig.s.synchronize().unwrap();
    drop((next, other.buffer::<u8>(&t, MIB).unwrap()));
    assert_silent(&rig.sim);
}

#[test]
fn a_stager_moves_memory_of_any_pool_of_its_device() {
    let rig = Rig::new(Sim::h200(1));
    let other = second_pool(&rig);
    let t = other.stream().unwrap();
    let mut y: DeviceBuffer<u8> = other.buffer(&t, MIB).unwrap();
    t.fill(&mut y, 7).unwrap();
    let stager = rig.rt.stager(0, StagerConfig::default()).unwrap();
    let up: Vec<u8> = (0..MIB).map(|i| (i % 251) as u8).collect();
    for bytes in [MIB, 4096] {
        let mut part = y.slice_mut(0..bytes).unwrap();
        stager.scope(|c| c.upload(&up[..bytes], &mut part).map(drop)).unwrap().unwrap();
        let (mut down, part) = (vec![0; bytes], y.slice(0..bytes).unwrap());
        stager.scope(|c| c.download(&part, &mut down).map(drop)).unwrap().unwrap();
        assert!(down == up[..bytes], "{bytes} bytes");
    }
    assert_silent(&rig.sim);
}
