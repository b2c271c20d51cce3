//! Tests of what memory addresses stand for, and of when work runs.
#![allow(unsafe_code, reason = "plays the caller of unsafe calls")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, Machine, everywhere};
use aquifer_driver::{
    DeviceRange, Pattern, RawStream, Rows,
    sim::{Mode, Schedule, Sim, SimConfig, SimKernel},
};
use std::{
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

fn bytes() -> Machine {
    Machine::new(Sim::h200(1).capacity(256 << 20))
}

fn stepped() -> Machine {
    Machine::new(Sim::h200(1).capacity(256 << 20).stepped())
}

/// Returns the address of a buffer of the program.
fn buffer(bytes: &mut [u8]) -> NonNull<u8> {
    NonNull::from(bytes).cast()
}

#[test]
fn builders_change_only_the_named_setting() {
    let sim = Sim::h200(2).symbolic().stepped().capacity(1 << 30);
    let config = sim.config();
    assert_eq!(
        (config.devices.len(), config.mode, config.schedule),
        (2, Mode::Symbolic, Schedule::Stepped)
    );
    assert_eq!(config.capacity, Some(1 << 30));
    assert_eq!(Sim::h200(1).seeded(3).config().schedule, Schedule::Seeded(3));
    let info = sim.driver().device_info(GPU).unwrap();
    assert_eq!(
        (info.memory, info.granularity, info.compute_capability),
        (1 << 30, GRANULE, (9, 0))
    );
}

#[test]
fn a_machine_of_a_model_has_at_most_64_devices() {
    for asked in [SimConfig::MOST_DEVICES, SimConfig::MOST_DEVICES + 1, u32::MAX] {
        let sim = Sim::new(SimConfig::h200(asked));
        assert_eq!(sim.driver().device_count(), Ok(64), "{asked} requested");
    }
}

#[test]
fn copies_and_fills_and_kernels_move_bytes() {
    for m in [bytes(), stepped(), Machine::new(Sim::h200(1).seeded(5))] {
        let (a, x, y) = (m.stream(), m.alloc(1000), m.alloc(1000));
        let mut up: Vec<u8> = (0..1000).map(|n| n as u8).collect();
        let mut down = vec![0_u8; 1000];
        let add = SimKernel::new("add").reads(x, None).writes(y, None).run(|memory| {
            let source = memory.read(0).to_vec();
            memory
                .write(1)
                .iter_mut()
                .zip(source)
                .for_each(|(to, from)| *to = to.wrapping_add(from));
            assert!(memory.write(0).is_empty(), "declared as read");
            assert!(memory.read(2).is_empty() && memory.len() == 2, "not declared at all");
        });
        // SAFETY: 1. Everything is 1000 bytes long. 2. All is on one stream, and the host waits.
        unsafe {
            m.driver.copy_to_device(a, x.address, buffer(&mut up), 1000).unwrap();
            m.driver.fill(a, y.address, 7, 1000).unwrap();
            m.sim.launch(a, add).unwrap();
            m.driver.copy_on_device(a, x.address + 1, y.address, 999).unwrap();
            m.driver.copy_to_host(a, buffer(&mut down), x.address, 1000).unwrap();
        }
        m.driver.stream_synchronize(a).unwrap();
        // One byte of x, then the result of `add` for y.
        let expected: Vec<u8> =
            std::iter::once(0).chain((0..999).map(|n: u32| (n as u8).wrapping_add(7))).collect();
        assert_eq!(down, expected);
        assert_eq!(m.sim.read_back(x), Some(expected));
        m.silent();
    }
}

#[test]
fn a_copy_from_pageable_memory_takes_the_bytes_of_the_call() {
    let m = stepped();
    let (a, x) = (m.stream(), m.alloc(8));
    let mut source = [1_u8; 8];
    // SAFETY: 1. Both are 8 bytes long. 2. The driver has read `source` when it returns.
    unsafe { m.driver.copy_to_device(a, x.address, buffer(&mut source), 8) }.unwrap();
    source.fill(2);
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.read_back(x), Some(vec![1; 8]));
}

#[test]
fn a_copy_from_pinned_memory_takes_the_bytes_of_its_turn() {
    let m = stepped();
    let (a, x, host) = (m.stream(), m.alloc(8), m.pinned(8));
    // SAFETY: 1. Both are 8 bytes long. 2. deliberately broken, on one thread.
    unsafe {
        m.driver.copy_to_device(a, x.address, host, 8).unwrap();
        host.as_ptr().write_bytes(3, 8);
    }
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.read_back(x), Some(vec![3; 8]), "a late host write is seen");
    // SAFETY: 1. and 2. It is idle.
    unsafe { m.driver.host_free(GPU, host) }.unwrap();
}

#[test]
fn a_handle_mapped_twice_is_one_memory() {
    let m = bytes();
    let a = m.stream();
    let (x, handle) = m.granule();
    let y = DeviceRange { address: m.reserve(GRANULE), ..x };
    m.map(y.address, handle);
    // SAFETY: 1. Mapped above. 2. One stream.
    unsafe { m.driver.fill(a, x.address, 0x5a, GRANULE) }.unwrap();
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.read_back(y), Some(vec![0x5a; GRANULE as usize]));
    m.unmap(x.address);
    assert_eq!(m.sim.read_back(x), None);
    assert_eq!(m.sim.read_back(DeviceRange { bytes: 1, ..y }), Some(vec![0x5a]));
}

#[test]
fn bytes_move_with_their_handle() {
    let m = bytes();
    let a = m.stream();
    let (x, handle) = m.granule();
    // SAFETY: 1. Mapped above. 2. One stream.
    unsafe { m.driver.fill(a, x.address, 1, GRANULE) }.unwrap();
    m.driver.stream_synchronize(a).unwrap();
    m.unmap(x.address);
    m.map(x.address, m.handle(GRANULE));
    assert_eq!(
        m.sim.read_back(DeviceRange { bytes: 2, ..x }),
        Some(vec![0, 0]),
        "new memory is not the old"
    );
    m.unmap(x.address);
    m.map(x.address, handle);
    assert_eq!(m.sim.read_back(DeviceRange { bytes: 2, ..x }), Some(vec![1, 1]));
}

#[test]
fn a_symbolic_machine_has_addresses_and_no_bytes() {
    let m = Machine::new(Sim::h200(1).symbolic());
    let (a, x) = (m.stream(), m.alloc(100 << 30));
    let ran = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&ran);
    let kernel = SimKernel::new("never").writes(x, None).run(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    m.sim.launch(a, kernel).unwrap();
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!((ran.load(Ordering::Relaxed), m.sim.read_back(x)), (0, None));
    assert_eq!(m.sim.accesses_checked(), 1);
}

#[test]
fn stepped_work_runs_when_told_and_not_before() {
    let m = stepped();
    let (a, x) = (m.stream(), m.alloc(1));
    for byte in 1..=3 {
        // SAFETY: 1. It is one byte. 2. One stream.
        unsafe { m.driver.fill(a, x.address, byte, 1) }.unwrap();
    }
    assert_eq!((m.sim.pending(a), m.driver.stream_query(a)), (3, Ok(false)));
    for byte in 1..=3 {
        assert!(m.sim.step(a));
        assert_eq!(m.sim.read_back(x), Some(vec![byte]));
    }
    assert!(!m.sim.step(a));
    assert_eq!((m.sim.pending(a), m.driver.stream_query(a)), (0, Ok(true)));
}

#[test]
fn a_waiting_host_runs_exactly_what_it_waits_for() {
    let m = stepped();
    let (a, b, c, x) = (m.stream(), m.stream(), m.stream(), m.alloc(1));
    m.write(a, x);
    let event = m.fence(a);
    m.write(a, x);
    m.driver.stream_wait_event(b, event).unwrap();
    m.read(b, DeviceRange { bytes: 0, ..x });
    m.write(c, m.alloc(1));
    assert!(!m.sim.step(b), "the wait is not over");
    m.driver.stream_synchronize(b).unwrap();
    assert_eq!((m.sim.pending(a), m.sim.pending(b), m.sim.pending(c)), (1, 0, 1));
    assert_eq!((m.driver.event_query(event), m.driver.stream_query(a)), (Ok(true), Ok(false)));
    m.driver.device_synchronize(GPU).unwrap();
    assert_eq!((m.sim.pending(a), m.sim.pending(c)), (0, 0));
}

#[test]
fn an_event_answers_by_what_has_run_and_an_unrecorded_one_is_done() {
    let m = stepped();
    let (a, x) = (m.stream(), m.alloc(1));
    let event = m.driver.event_create(GPU).unwrap();
    assert_eq!(m.driver.event_query(event), Ok(true));
    m.driver.event_synchronize(event).unwrap();
    m.write(a, x);
    m.driver.event_record(event, a).unwrap();
    assert_eq!(m.driver.event_query(event), Ok(false));
    m.sim.run_all();
    assert_eq!(m.driver.event_query(event), Ok(true));
}

#[test]
fn work_of_a_destroyed_stream_still_runs() {
    let m = stepped();
    let (a, x) = (m.stream(), m.alloc(1));
    // SAFETY: 1. It is one byte; the stream is not used after its end.
    unsafe {
        m.driver.fill(a, x.address, 9, 1).unwrap();
        m.driver.stream_destroy(a).unwrap();
    }
    assert_eq!(m.driver.stream_query(a).unwrap_err().code, 400);
    let b = m.stream();
    assert_ne!(a.handle(), b.handle(), "its place is taken until its work is done");
    m.driver.device_synchronize(GPU).unwrap();
    assert_eq!(m.sim.read_back(x), Some(vec![9]));
    assert_eq!(m.stream().handle(), a.handle(), "and its number comes back then");
}

/// Runs a program of four independent streams and returns the order of its work.
fn order_of(seed: u64) -> Vec<u64> {
    let m = Machine::new(Sim::h200(1).seeded(seed));
    let ran = Arc::new(Mutex::new(Vec::new()));
    let streams: Vec<RawStream> = (0..4).map(|_| m.stream()).collect();
    for n in 0..40 {
        let ran = Arc::clone(&ran);
        let kernel = SimKernel::new("note").run(move |_| ran.lock().unwrap().push(n));
        m.sim.launch(streams[(n % 4) as usize], kernel).unwrap();
    }
    m.driver.device_synchronize(GPU).unwrap();
    let ran = ran.lock().unwrap().clone();
    for stream in 0..4 {
        let own: Vec<_> = ran.iter().filter(|n| **n % 4 == stream).collect();
        assert!(own.is_sorted() && own.len() == 10, "a stream runs its work in order");
    }
    ran
}

#[test]
fn a_seed_runs_the_same_way_again_and_seeds_differ() {
    let orders: Vec<_> = (0..8).map(order_of).collect();
    assert_eq!(orders, (0..8).map(order_of).collect::<Vec<_>>());
    let mut distinct = orders.clone();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() > 4, "{distinct:?}");
    assert!(
        orders.iter().any(|order| !order.is_sorted()),
        "nothing ever ran out of the order of queueing"
    );
}

#[test]
fn a_missing_wait_corrupts_bytes_under_some_seed_and_is_found_under_all() {
    let mut corrupted = 0;
    for seed in 0..20 {
        let m = Machine::new(Sim::h200(1).seeded(seed));
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        m.sim
            .launch(a, SimKernel::new("fill").writes(x, None).run(|memory| memory.write(0).fill(1)))
            .unwrap();
        let seen = Arc::new(AtomicU64::new(0));
        let sum = Arc::clone(&seen);
        let kernel = SimKernel::new("sum").reads(x, None).run(move |memory| {
            sum.store(memory.read(0).iter().map(|&byte| u64::from(byte)).sum(), Ordering::Relaxed);
        });
        m.sim.launch(b, kernel).unwrap();
        m.driver.device_synchronize(GPU).unwrap();
        corrupted += u64::from(seen.load(Ordering::Relaxed) != 64);
        assert_eq!(m.sim.violations().len(), 1);
    }
    assert!((1..20).contains(&corrupted), "{corrupted} of 20");
}

#[test]
fn kernels_cannot_call_the_driver() {
    let m = bytes();
    let a = m.stream();
    let codes = Arc::new(Mutex::new(Vec::new()));
    let (driver, told) = (m.sim.driver(), Arc::clone(&codes));
    let call = move || told.lock().unwrap().push(driver.mem_alloc(GPU, 1).unwrap_err().code);
    m.sim.launch(a, SimKernel::new("allocate").run(move |_| call())).unwrap();
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(*codes.lock().unwrap(), [800]);
}

#[test]
fn a_kernel_that_panics_has_run_and_breaks_nothing() {
    let m = bytes();
    let (a, x) = (m.stream(), m.alloc(1));
    let kernel = SimKernel::new("panic").run(|_| panic!("on purpose"));
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| m.sim.launch(a, kernel)));
    assert!(caught.is_err());
    m.write(a, x);
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.pending(a), 0);
    m.silent();
}

#[test]
fn threads_share_one_machine() {
    let m = bytes();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let m = &m;
            scope.spawn(move || {
                let (a, x) = (m.stream(), m.alloc(4096));
                for round in 0..50 {
                    let value = thread.wrapping_mul(50).wrapping_add(round);
                    let fill = SimKernel::new("fill")
                        .writes(x, None)
                        .run(move |memory| memory.write(0).fill(value));
                    m.sim.launch(a, fill).unwrap();
                    m.driver.stream_synchronize(a).unwrap();
                    assert_eq!(m.sim.read_back(x), Some(vec![value; 4096]));
                }
            });
        }
    });
    m.silent();
    assert_eq!(m.sim.accesses_checked(), 200);
}

#[test]
fn without_the_oracle_nothing_is_checked_and_nothing_asked() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        m.sim.oracle(false);
        assert!(m.driver.observer().is_none());
        m.write(a, x);
        m.write(b, x);
        assert_eq!(m.sim.accesses_checked(), 0);
        m.sim.oracle(true);
        assert!(m.driver.observer().is_some());
        m.read(a, x);
        m.silent();
        m.write(b, x);
        assert_eq!(m.sim.violations().len(), 1);
    });
}

#[test]
fn without_the_oracle_bytes_are_still_kept_from_faulty_work() {
    let m = bytes();
    m.sim.oracle(false);
    let a = m.stream();
    let nothing = DeviceRange { device: GPU, address: m.reserve(GRANULE), bytes: 8 };
    // SAFETY: 1. deliberately broken: the simulator must refuse.
    unsafe { m.driver.fill(a, nothing.address, 1, 8) }.unwrap();
    m.sim
        .launch(
            a,
            SimKernel::new("wild").writes(nothing, None).run(|memory| memory.write(0).fill(1)),
        )
        .unwrap();
    m.driver.stream_synchronize(a).unwrap();
}

#[test]
fn what_was_queued_before_a_mark_runs_and_nothing_behind_it() {
    let m = Machine::new(Sim::h200(1).symbolic().stepped());
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(1));
    let none = m.sim.mark();
    m.read(a, x);
    let event = m.fence(a);
    m.driver.stream_wait_event(b, event).unwrap();
    m.read(b, x);
    let mark = m.sim.mark();
    let late = m.stream();
    for stream in [a, b, late] {
        m.read(stream, x);
    }
    m.sim.run_to(&none);
    assert_eq!([a, b, late].map(|stream| m.sim.pending(stream)), [2, 3, 1]);
    for _ in 0..2 {
        m.sim.run_to(&mark);
        assert_eq!([a, b, late].map(|stream| m.sim.pending(stream)), [1, 1, 1]);
    }
}

#[test]
fn a_paced_device_falls_behind_and_catches_up_when_asked() {
    let behind = |pace| {
        let m = Machine::new(Sim::h200(1).symbolic().seeded(7).paced(pace));
        let (a, x) = (m.stream(), m.alloc(1));
        let mut sum = 0;
        for _ in 0..2000 {
            m.read(a, x);
            sum += m.sim.pending(a);
        }
        // Repeated polling lets time pass.
        let event = m.fence(a);
        assert!((0..10_000).any(|_| m.driver.event_query(event).unwrap()), "{pace}");
        sum / 2000
    };
    assert_eq!(behind(0), behind(1));
    assert!(behind(1) < 10, "{}", behind(1));
    assert!((40..200).contains(&behind(64)), "{}", behind(64));
}

#[test]
fn fills_write_whole_elements_at_multiples_of_their_size() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(16));
        // SAFETY: 1. all of it lies in the 16 bytes; invalid calls are refused. 2. one stream.
        unsafe {
            m.driver.fill_with(a, x.address, Pattern::Byte(1), 16).unwrap();
            m.driver.fill_with(a, x.address + 2, Pattern::Half(0x0203), 3).unwrap();
            m.driver.fill_with(a, x.address + 8, Pattern::Word(0x0405_0607), 2).unwrap();
            for refused in [
                m.driver.fill_with(a, x.address + 1, Pattern::Half(1), 1),
                m.driver.fill_with(a, x.address + 2, Pattern::Word(1), 1),
            ] {
                assert_eq!(refused.unwrap_err().code, 1);
            }
        }
        m.driver.device_synchronize(GPU).unwrap();
        if let Some(found) = m.sim.read_back(x) {
            assert_eq!(found, [1, 1, 3, 2, 3, 2, 3, 2, 7, 6, 5, 4, 7, 6, 5, 4]);
        }
        m.silent();
    });
}

#[test]
fn rows_are_copied_or_refused_and_rows_of_no_bytes_are_none_however_many() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(32));
        let rows = Rows { width: 2, height: 3, from_pitch: 4, to_pitch: 3 };
        // SAFETY: 1. all rows lie in the 32 bytes; invalid calls are refused. 2. one stream.
        unsafe {
            m.driver.fill_with(a, x.address, Pattern::Word(0x0403_0201), 4).unwrap();
            m.driver.fill_with(a, x.address + 16, Pattern::Byte(9), 16).unwrap();
            let copy = |rows| m.driver.copy_rows(a, x.address + 16, x.address, rows);
            copy(rows).unwrap();
            copy(Rows { width: 0, height: u64::MAX, ..rows }).unwrap();
            copy(Rows { height: 0, ..rows }).unwrap();
            for refused in [
                copy(Rows { from_pitch: 1, ..rows }),
                copy(Rows { to_pitch: 1 << 31, ..rows }),
                copy(Rows { height: u64::MAX, ..rows }),
            ] {
                assert_eq!(refused.unwrap_err().code, 1);
            }
        }
        m.driver.device_synchronize(GPU).unwrap();
        if let Some(found) = m.sim.read_back(x) {
            assert_eq!(found[16..], [1, 2, 9, 1, 2, 9, 1, 2, 9, 9, 9, 9, 9, 9, 9, 9]);
        }
        m.silent();
    });
}
