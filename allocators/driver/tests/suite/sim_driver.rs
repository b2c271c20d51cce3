//! Tests that the simulated driver behaves as the real one: capacity, pools, captures, failures,
//! and held resources.
#![allow(unsafe_code, reason = "plays the caller of unsafe calls")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, Machine, PATIENCE, everywhere};
use aquifer_driver::{
    BlockNote, Call, CaptureMode, DeviceId, DeviceRange, ExportTypes, Ownership, Pattern,
    PoolUsage, RawStream, Relaxed,
    sim::{DeviceConfig, Sim, SimConfig, SimKernel, ViolationKind},
};
use std::{
    ptr::NonNull,
    sync::{Arc, Barrier},
};

const SECOND: DeviceId = DeviceId(1);

fn symbolic() -> Machine {
    Machine::new(Sim::h200(1).symbolic())
}

fn code<T: std::fmt::Debug>(answer: Result<T, aquifer_driver::DriverError>) -> u32 {
    answer.unwrap_err().code
}

#[test]
fn capacity_is_exact_and_comes_back_with_the_last_of_handle_and_mapping() {
    everywhere(|m| {
        let m = Machine::new(Sim::new({
            let mut config = m.sim.config().clone();
            config.capacity = Some(4 * GRANULE);
            config
        }));
        let free = || m.driver.memory_info(GPU).unwrap().free;
        let (x, handle) = m.granule();
        let y = m.driver.mem_alloc(GPU, GRANULE + 1).unwrap();
        assert_eq!(free(), GRANULE);
        assert_eq!(code(m.driver.handle_create(GPU, 2 * GRANULE, ExportTypes::NONE)), 2);
        let z = m.driver.mem_alloc(GPU, 1).unwrap();
        assert_eq!(free(), GRANULE - 512);
        assert_eq!(code(m.driver.handle_create(GPU, GRANULE, ExportTypes::NONE)), 2);
        // SAFETY: nothing uses any of it.
        unsafe {
            m.driver.mem_free(GPU, z).unwrap();
            m.driver.handle_release(handle).unwrap();
            assert_eq!(free(), GRANULE, "it is mapped still");
            m.driver.unmap(GPU, x.address, GRANULE).unwrap();
            assert_eq!(free(), 2 * GRANULE);
            m.driver.mem_free(GPU, y).unwrap();
            assert_eq!(free(), 4 * GRANULE);
        }
    });
}

#[test]
fn an_h200_has_its_memory_and_more_is_refused() {
    let m = symbolic();
    let total = m.driver.memory_info(GPU).unwrap().total;
    assert!(total > 140 << 30);
    assert_eq!(code(m.driver.mem_alloc(GPU, total + 1)), 2);
    m.driver.mem_alloc(GPU, total / GRANULE * GRANULE).unwrap();
    assert_eq!(code(m.driver.mem_alloc(GPU, GRANULE)), 2);
}

#[test]
fn a_device_without_virtual_memory_says_so() {
    let mut config = SimConfig::h200(0);
    config.devices = vec![DeviceConfig::without_virtual_memory(), DeviceConfig::integrated()];
    let m = Machine::new(Sim::new(config));
    let info = m.driver.device_info(GPU).unwrap();
    assert_eq!((info.virtual_memory, info.granularity), (false, 0));
    assert_eq!(code(m.driver.address_reserve(GPU, GRANULE, 0)), 801);
    assert_eq!(code(m.driver.handle_create(GPU, GRANULE, ExportTypes::NONE)), 801);
    m.driver.mem_alloc(GPU, 1).unwrap();
    assert!(m.driver.device_info(SECOND).unwrap().integrated);
}

#[test]
fn a_machine_without_devices_answers() {
    let m = Machine::new(Sim::h200(0));
    assert_eq!(m.driver.device_count(), Ok(0));
    assert_eq!(code(m.driver.device_info(GPU)), 101);
}

#[test]
fn devices_reach_each_other_where_they_are_peers_and_were_given_access() {
    for peers in [true, false] {
        let mut config = SimConfig::h200(2);
        (config.peers, config.capacity) = (peers, Some(64 << 20));
        let m = Machine::new(Sim::new(config));
        let a = m.driver.stream_create(SECOND, 0).unwrap();
        let (x, _) = m.granule();
        m.sim.launch(a, SimKernel::new("reach").writes(x, None)).unwrap();
        assert_eq!(
            m.sim.take_violations()[0].kind,
            ViolationKind::NoAccess { device: GPU },
            "not given yet"
        );
        let given = m.driver.set_access(x.address, GRANULE, &[GPU, SECOND]);
        assert_eq!(given.map_err(|error| error.code), if peers { Ok(()) } else { Err(217) });
        m.sim.launch(a, SimKernel::new("reach").writes(x, None)).unwrap();
        assert_eq!(m.sim.take_violations().is_empty(), peers);
        // A copy between devices works in either direction: the driver stages it where needed.
        let far = m.driver.mem_alloc(SECOND, GRANULE).unwrap();
        m.driver.device_synchronize(SECOND).unwrap();
        // SAFETY: 1. Both are mapped. 2. One stream.
        unsafe {
            m.driver.fill(a, far, 3, GRANULE).unwrap();
            m.driver.copy_on_device(a, x.address, far, GRANULE).unwrap();
        }
        m.driver.stream_synchronize(a).unwrap();
        assert_eq!(m.sim.read_back(DeviceRange { bytes: 1, ..x }), Some(vec![3]));
        m.silent();
    }
}

#[test]
fn an_event_belongs_to_its_device() {
    let m = Machine::new(Sim::h200(2).symbolic());
    let (a, event) = (m.stream(), m.driver.event_create(SECOND).unwrap());
    assert_eq!(code(m.driver.event_record(event, a)), 400);
    // Any stream may wait for it, however.
    let b = m.driver.stream_create(SECOND, 0).unwrap();
    m.driver.event_record(event, b).unwrap();
    m.driver.stream_wait_event(a, event).unwrap();
}

#[test]
fn a_pool_keeps_counts_and_trims_what_is_done() {
    everywhere(|m| {
        let (d, a, b) = (&m.driver, m.stream(), m.stream());
        let pool = d.pool_create(GPU).unwrap();
        let x = d.pool_alloc(pool, a, 1000).unwrap();
        let usage = |reserved, used, high| PoolUsage { reserved, used, reserved_high: high };
        assert_eq!(d.pool_usage(pool), Ok(usage(GRANULE, 1024, GRANULE)));
        let y = d.pool_alloc(pool, a, 3 * GRANULE).unwrap();
        assert_eq!(d.pool_usage(pool), Ok(usage(4 * GRANULE, 3 * GRANULE + 1024, 4 * GRANULE)));
        m.write(a, DeviceRange { device: GPU, address: y, bytes: GRANULE });
        // SAFETY: allocated above; all work is on `a`.
        unsafe { d.pool_free(a, y) }.unwrap();
        assert_eq!(
            d.pool_usage(pool),
            Ok(usage(4 * GRANULE, 1024, 4 * GRANULE)),
            "what is freed is kept"
        );
        let again = d.pool_alloc(pool, b, 3 * GRANULE).unwrap();
        assert_eq!(again, y, "and used again");
        // SAFETY: as above.
        unsafe { d.pool_free(b, again) }.unwrap();
        d.device_synchronize(GPU).unwrap();
        d.pool_trim(pool, 0).unwrap();
        assert_eq!(d.pool_usage(pool), Ok(usage(GRANULE, 1024, 4 * GRANULE)));
        // SAFETY: the handle is not used any more; the block lives on.
        unsafe {
            d.pool_destroy(pool).unwrap();
            assert_eq!(code(d.pool_usage(pool)), 400);
            m.write(a, DeviceRange { device: GPU, address: x, bytes: 1000 });
            d.pool_free(a, x).unwrap();
        }
        d.stream_synchronize(a).unwrap();
        let held = m.sim.outstanding();
        assert_eq!((held.pools, held.pool_blocks, held.allocations), (0, 0, 0));
        let memory = d.memory_info(GPU).unwrap();
        assert_eq!(memory.free, memory.total);
        m.silent();
    });
}

#[test]
fn a_pool_does_not_trim_what_queued_work_uses() {
    let m = Machine::new(Sim::h200(1).symbolic().stepped());
    let (a, pool) = (m.stream(), m.driver.pool_create(GPU).unwrap());
    let address = m.driver.pool_alloc(pool, a, GRANULE).unwrap();
    m.write(a, DeviceRange { device: GPU, address, bytes: GRANULE });
    // SAFETY: allocated above; all work is on `a`.
    unsafe { m.driver.pool_free(a, address) }.unwrap();
    m.driver.pool_trim(pool, 0).unwrap();
    assert_eq!(m.driver.pool_usage(pool).unwrap().reserved, GRANULE);
    m.sim.run_all();
    m.driver.pool_trim(pool, 0).unwrap();
    assert_eq!(m.driver.pool_usage(pool).unwrap().reserved, 0);
}

#[test]
fn what_is_held_is_counted_and_nothing_is_when_all_is_back() {
    everywhere(|m| {
        let d = &m.driver;
        let (stream, event, pool) =
            (m.stream(), d.event_create(GPU).unwrap(), d.pool_create(GPU).unwrap());
        let (x, handle) = m.granule();
        let (y, z) = (m.alloc(1), d.pool_alloc(pool, stream, 1).unwrap());
        let host = m.pinned(1);
        let own = NonNull::from(Box::leak(Box::new(0_u8)));
        // SAFETY: `own` is never freed; the rest is freed below and not used.
        unsafe {
            d.host_register(GPU, own, 1).unwrap();
            let held = m.sim.outstanding();
            assert_eq!(
                held.to_string(),
                "1 streams, 1 events, 1 handles, 1 mappings, 1 reservations, 1 pools, 1 pool blocks, 1 allocations, \
                 1 host allocations, 1 registrations"
            );
            d.pool_free(stream, z).unwrap();
            d.stream_synchronize(stream).unwrap();
            d.pool_destroy(pool).unwrap();
            d.mem_free(GPU, y.address).unwrap();
            d.unmap(GPU, x.address, GRANULE).unwrap();
            d.handle_release(handle).unwrap();
            d.address_free(GPU, x.address, GRANULE).unwrap();
            d.host_free(GPU, host).unwrap();
            d.host_unregister(GPU, own).unwrap();
            d.event_destroy(event).unwrap();
            d.stream_destroy(stream).unwrap();
        }
        assert!(m.sim.outstanding().is_empty(), "{}", m.sim.outstanding());
        m.silent();
    });
}

#[test]
fn a_call_fails_when_told_and_has_changed_nothing() {
    everywhere(|m| {
        let before = m.sim.outstanding();
        m.sim.fail(Call::HandleCreate, 2, 2);
        m.sim.fail_every(Call::MemAlloc, 2, 2);
        let handle = m.handle(GRANULE);
        assert_eq!(code(m.driver.handle_create(GPU, GRANULE, ExportTypes::NONE)), 2);
        let other = m.handle(GRANULE);
        let answers: Vec<_> = (0..4).map(|_| m.driver.mem_alloc(GPU, 1)).collect();
        assert_eq!(
            answers.iter().map(Result::is_ok).collect::<Vec<_>>(),
            [true, false, true, false]
        );
        assert_eq!(m.driver.calls().get(Call::MemAlloc), 4, "calls that fail are counted");
        m.sim.clear_failures();
        for address in answers.into_iter().flatten().chain([m.alloc(1).address]) {
            // SAFETY: allocated, and never used.
            unsafe { m.driver.mem_free(GPU, address) }.unwrap();
        }
        for handle in [handle, other] {
            // SAFETY: created above, not used again.
            unsafe { m.driver.handle_release(handle) }.unwrap();
        }
        assert_eq!(m.sim.outstanding(), before);
    });
}

#[test]
fn a_lost_device_answers_with_its_code_and_runs_nothing_more() {
    let m = Machine::new(Sim::h200(2).stepped());
    let (a, x) = (m.stream(), m.alloc(1));
    let event = m.fence(a);
    m.sim
        .launch(a, SimKernel::new("never").writes(x, None).run(|_| panic!("runs on a lost device")))
        .unwrap();
    m.sim.lose_device(GPU);
    let error = m.driver.stream_synchronize(a).unwrap_err();
    assert_eq!(error.code, 700);
    assert!(error.is_device_lost());
    assert_eq!(code(m.driver.mem_alloc(GPU, 1)), 700);
    assert_eq!(code(m.driver.event_query(event)), 700);
    assert_eq!(code(m.sim.launch(a, SimKernel::new("never"))), 700);
    m.driver.mem_alloc(SECOND, 1).unwrap();
    assert_eq!(m.driver.device_count(), Ok(2));
    let held = m.sim.outstanding();
    assert_eq!(
        (held.streams, held.events, held.allocations),
        (0, 0, 1),
        "what the lost device held is gone with it"
    );
}

#[test]
fn nothing_races_with_what_a_lost_device_had_queued() {
    // Memory that is written on one stream, freed, and given to another one that has not waited.
    let handed_over = |lost: bool| {
        let m = Machine::new(Sim::h200(1).stepped());
        let (a, b, range) = (m.stream(), m.stream(), m.alloc(64));
        let note = |owner| m.driver.observer().unwrap().block(BlockNote { range, owner });
        note(Ownership::Live { stream: a, generation: 1 });
        m.sim.launch(a, SimKernel::new("writes").writes(range, Some(1))).unwrap();
        note(Ownership::Free);
        if lost {
            m.sim.lose_device(GPU);
        }
        note(Ownership::Live { stream: b, generation: 2 });
        m.sim.take_violations().len()
    };
    assert_eq!((handed_over(false), handed_over(true)), (1, 0));
}

#[test]
fn a_call_during_which_its_device_is_lost_queues_nothing() {
    // Work runs within calls here, so a device can be lost while a call lets work run.
    let m = Machine::new(Sim::h200(1).seeded(1));
    let (a, b, range) = (m.stream(), m.stream(), m.alloc(64));
    let (has_begun, may_end) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let within = (has_begun.clone(), may_end.clone());
    let kernel = SimKernel::new("waits").run(move |_| {
        within.0.wait();
        within.1.wait();
    });
    m.sim.launch(a, kernel).unwrap();
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            // SAFETY: 1. the bytes lie in the allocation. 2. nothing else accesses them.
            let fill = || unsafe { m.driver.fill_with(b, range.address, Pattern::Byte(1), 64) };
            std::iter::repeat_with(fill).find_map(Result::err).unwrap()
        });
        has_begun.wait();
        m.sim.lose_device(GPU);
        may_end.wait();
        assert!(caller.join().unwrap().is_device_lost());
    });
    let note = |owner| m.driver.observer().unwrap().block(BlockNote { range, owner });
    note(Ownership::Live { stream: a, generation: 1 });
    assert_eq!(m.sim.take_violations(), [], "a use was recorded after the loss");
}

#[test]
fn a_stalled_call_holds_its_thread_and_nothing_else() {
    let m = symbolic();
    let a = m.stream();
    let stall = m.sim.stall(Call::StreamSynchronize);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| m.driver.stream_synchronize(a));
        assert!(stall.wait_for(1, PATIENCE));
        m.write(a, m.alloc(64));
        assert_eq!(m.driver.stream_query(a), Ok(true), "other calls go on");
        assert!(!waiter.is_finished());
        drop(stall);
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn an_unsafe_call_breaks_a_global_capture_from_any_thread() {
    type Attempt = fn(&Machine, RawStream) -> Result<(), aquifer_driver::DriverError>;
    let attempts: [Attempt; 4] = [
        |m, other| m.driver.event_query(m.fence(other)).map(drop),
        |m, _| m.driver.mem_alloc(GPU, 1).map(drop),
        |m, other| {
            m.driver.pool_create(GPU).and_then(|pool| m.driver.pool_alloc(pool, other, 1)).map(drop)
        },
        |m, _| {
            let own = NonNull::from(Box::leak(Box::new(0_u8)));
            // SAFETY: 1. It is never freed.
            unsafe { m.driver.host_register(GPU, own, 1) }
        },
    ];
    for attempt in attempts {
        for (mode, elsewhere, relaxed, breaks) in [
            (CaptureMode::Global, true, false, true),
            (CaptureMode::Global, false, false, true),
            (CaptureMode::Global, true, true, false),
            (CaptureMode::Global, false, true, false),
            (CaptureMode::ThreadLocal, true, false, false),
            (CaptureMode::ThreadLocal, false, false, true),
            (CaptureMode::Relaxed, false, false, false),
        ] {
            let m = symbolic();
            let (a, other) = (m.stream(), m.stream());
            m.driver.capture_begin(a, mode).unwrap();
            let make = || {
                let _relaxed = relaxed.then(|| Relaxed::enter(&*m.driver));
                attempt(&m, other)
            };
            let answer = if elsewhere {
                std::thread::scope(|scope| scope.spawn(make).join().unwrap())
            } else {
                make()
            };
            assert_eq!(answer.map_err(|error| error.code), if breaks { Err(900) } else { Ok(()) });
            assert_eq!(
                m.end_capture(a).map_err(|error| error.code),
                if breaks { Err(901) } else { Ok(0) }
            );
        }
    }
}

#[test]
fn mapping_and_fencing_leave_a_capture_alone() {
    let m = symbolic();
    let (a, b, c) = (m.stream(), m.stream(), m.stream());
    m.driver.capture_begin(a, CaptureMode::Global).unwrap();
    let (x, handle) = m.granule();
    m.order(b, c);
    m.write(a, x);
    m.unmap(x.address);
    // SAFETY: 1. It is not used any more.
    unsafe { m.driver.handle_release(handle) }.unwrap();
    assert_eq!(m.end_capture(a), Ok(1));
    m.silent();
}

#[test]
fn captured_work_does_not_run_and_an_event_in_it_advances_nothing() {
    let m = Machine::new(Sim::h200(1).capacity(64 << 20));
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(1));
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    m.sim.launch(a, SimKernel::new("captured").writes(x, None).run(|_| panic!("runs"))).unwrap();
    let event = m.fence(a);
    m.driver.stream_wait_event(b, event).unwrap();
    m.sim.launch(b, SimKernel::new("forked").writes(x, None).run(|_| panic!("runs"))).unwrap();
    m.order(b, a);
    assert_eq!(m.end_capture(a), Ok(2), "two kernels");
    assert_eq!(code(m.driver.event_query(event)), 1);
    assert_eq!(m.driver.stream_query(b), Ok(true), "its capture is over with the other");
}

#[test]
fn waiting_for_a_capturing_stream_breaks_its_capture() {
    let m = symbolic();
    let a = m.stream();
    m.driver.capture_begin(a, CaptureMode::Relaxed).unwrap();
    assert_eq!(code(m.driver.stream_query(a)), 900);
    assert_eq!(code(m.end_capture(a)), 901);
    // The driver does not return its number then, but it returns that of another stream.
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    m.driver.stream_id(m.stream()).unwrap();
    assert_eq!(code(m.driver.stream_id(a)), 900);
    assert_eq!(code(m.end_capture(a)), 901);
    let blocking = m.sim.blocking_stream(GPU).unwrap();
    m.driver.capture_begin(blocking, CaptureMode::Relaxed).unwrap();
    let (legacy, x) = (m.sim.legacy_stream(GPU), m.alloc(1));
    assert_eq!(code(m.sim.access(legacy, x, aquifer_driver::Access::Write, None)), 906);
    assert_eq!(code(m.end_capture(blocking)), 901);
}

#[test]
fn each_thread_has_its_own_default_stream() {
    let m = symbolic();
    // SAFETY: 1. The per-thread default stream always exists.
    let own = unsafe { RawStream::from_raw(GPU, 2) };
    let here = m.driver.stream_id(own).unwrap();
    let there = std::thread::scope(|scope| {
        scope.spawn(|| m.driver.stream_id(own).unwrap()).join().unwrap()
    });
    assert_ne!(here, there);
    assert_eq!(m.driver.stream_id(own), Ok(here));
    assert!(m.sim.outstanding().is_empty());
}

#[test]
fn reserved_ranges_are_aligned_as_asked_and_apart() {
    everywhere(|m| {
        let mut ranges: Vec<_> = [0, GRANULE, 1 << 30, 1 << 25]
            .into_iter()
            .map(|align| {
                let address = m.driver.address_reserve(GPU, 3 * GRANULE, align).unwrap();
                assert!(address.is_multiple_of(align.max(GRANULE)));
                address
            })
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0] + 3 * GRANULE <= pair[1]));
    });
}
