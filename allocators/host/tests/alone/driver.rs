//! Tests of regions and pools over a simulated GPU: who pins and in which pieces, what happens when
//! pinning fails, and blocks freed under copies in flight.
#![expect(unsafe_code, reason = "queues copies by hand")]

use crate::{
    alone,
    support::{
        self, MIB,
        on_device::{GPU, OnDevice, stream},
    },
};
use allocator_api2::vec::Vec as AllocVec;
use aquifer_core::{Budget, DeferReuse, MemoryError};
use aquifer_driver::{
    Call, CaptureMode, DeviceRange,
    sim::{Sim, ViolationKind},
};
use aquifer_host::{
    PinnedBuf, PinnedConfig, PinnedPool, pool,
    region::{
        Cause, Host, PageTier, PinnedBy, Pinning, Region, RegionRequest, end_retired,
        retry_stranded,
    },
};
use std::{
    alloc::Layout,
    ptr::NonNull,
    thread,
    time::{Duration, Instant},
};

const OUT_OF_MEMORY: u32 = 2;

fn machine() -> (Sim, Host) {
    let sim = Sim::h200(1).stepped();
    let host = support::host().with_driver(sim.driver(), GPU);
    (sim, host)
}

fn budget() -> Budget {
    Budget::new("pinned", 64 * MIB as u64)
}

/// Requests 8 MiB in registrations of 2 MiB.
fn request() -> RegionRequest {
    let mut request = RegionRequest::bytes(8 * MIB);
    request.registration = 2 * MIB;
    request.pages = PageTier::Transparent;
    request
}

fn config() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.patience = Duration::ZERO;
    config
}

/// Returns the driver's calls that have failed.
fn failed_calls(shortfalls: &[Cause]) -> Vec<&'static str> {
    let call = |cause: &Cause| match cause {
        Cause::Driver(error) => Some(error.call),
        _ => None,
    };
    shortfalls.iter().filter_map(call).collect()
}

fn eventually(what: impl Fn() -> bool) {
    let deadline = Instant::now() + support::PATIENCE;
    while !what() {
        assert!(Instant::now() < deadline, "this should have come true by now");
        retry_stranded();
        thread::yield_now();
    }
}

#[test]
fn a_region_is_registered_in_pieces_and_each_is_ended() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = budget();
    let region = Region::new(&host, &budget, &request()).unwrap();
    assert!(region.is_pinned());
    assert_eq!(region.report().pinned_by, PinnedBy::Registration(4));
    assert_eq!(sim.outstanding().registrations, 4);
    let mut next = region.span().start;
    for part in region.registrations() {
        assert_eq!((part.start, part.len), (next, 2 * MIB));
        next = part.end();
    }
    assert_eq!(next, region.span().end());
    let one = Region::new(&host, &budget, &RegionRequest::bytes(3 * MIB)).unwrap();
    assert_eq!(one.report().pinned_by, PinnedBy::Registration(1));
    region.close().unwrap();
    drop(one);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_request_that_is_no_multiple_of_a_workers_piece_gets_one_registration_and_fits() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = Budget::new("pinned", 512 * MIB as u64);
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let allocator = pool.allocator();
    for size in [RegionRequest::PIECE + 1, 2 * RegionRequest::PIECE + 3 * MIB + 5] {
        let mut block = AllocVec::<u8, _>::new_in(&allocator);
        block.try_reserve_exact(size).unwrap();
        assert!(pool.is_pinned(NonNull::new(block.as_mut_ptr()).unwrap()).unwrap());
        assert_eq!((sim.outstanding().registrations, pool.stats().regions), (1, 1), "{size}");
        drop(block);
        pool.trim(0).unwrap();
    }
}

#[test]
fn write_combined_memory_comes_from_the_driver_or_is_cached_and_reported() {
    let _alone = alone();
    let (sim, host) = machine();
    let mut request = request();
    (request.pinning, request.write_combined) = (Pinning::Required, true);
    let region = Region::new(&host, &budget(), &request).unwrap();
    assert_eq!((region.report().pinned_by, sim.outstanding().registrations), (PinnedBy::Driver, 0));
    assert!(region.report().shortfalls.is_empty());
    sim.fail(Call::HostAlloc, 1, OUT_OF_MEMORY);
    let region = Region::new(&host, &budget(), &request).unwrap();
    assert_eq!(region.report().pinned_by, PinnedBy::Registration(4));
    assert!(region.report().shortfalls.contains(&Cause::Cached));
}

#[test]
fn a_failed_registration_is_rolled_back_and_the_driver_allocates_instead() {
    let _alone = alone();
    for nth in 1..=4 {
        let (sim, host) = machine();
        let budget = budget();
        sim.fail(Call::HostRegister, nth, OUT_OF_MEMORY);
        let region = Region::new(&host, &budget, &request()).unwrap();
        let report = region.report();
        assert_eq!((report.pinned_by, report.pages), (PinnedBy::Driver, PageTier::DriverChosen));
        assert_eq!(failed_calls(&report.shortfalls), ["cuMemHostRegister"]);
        assert_eq!((sim.outstanding().registrations, sim.outstanding().host_allocations), (0, 1));
        assert_eq!(budget.used(), 8 * MIB as u64, "charged once, however it was had");
        drop(region);
        assert!(
            sim.outstanding().is_empty(),
            "torn down by the call that fits: {}",
            sim.outstanding()
        );
        assert_eq!((sim.driver().calls().get(Call::HostFree), budget.used()), (1, 0));
    }
}

#[test]
fn without_pinning_a_region_is_reported_as_pageable_or_refused_if_pinning_is_required() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = budget();
    sim.fail_every(Call::HostRegister, 1, OUT_OF_MEMORY);
    sim.fail_every(Call::HostAlloc, 1, OUT_OF_MEMORY);
    let mut request = request();
    let region = Region::new(&host, &budget, &request).unwrap();
    assert!(!region.is_pinned());
    let failed = failed_calls(&region.report().shortfalls);
    assert_eq!(failed, ["cuMemHostRegister", "cuMemHostAlloc"]);
    drop(region);
    request.pinning = Pinning::Required;
    let refused = Region::new(&host, &budget, &request).unwrap_err();
    assert_eq!(failed_calls(&refused.before), ["cuMemHostRegister"]);
    assert!(matches!(MemoryError::from(refused), MemoryError::Driver(e) if e.is_out_of_memory()));
    assert!(sim.outstanding().is_empty() && budget.used() == 0);
    request.pinning = Pinning::Off;
    let made = sim.driver().calls().get(Call::HostRegister);
    drop(Region::new(&host, &budget, &request).unwrap());
    assert_eq!(sim.driver().calls().get(Call::HostRegister), made, "the driver was not even asked");
}

#[test]
fn a_region_whose_unregistration_fails_stays_mapped_and_charged() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = budget();
    let mut region = Region::new(&host, &budget, &request()).unwrap();
    region.bytes_mut().fill(7);
    let span = region.span();
    sim.fail_every(Call::HostUnregister, 1, 999);
    let error = region.close().unwrap_err();
    assert!(matches!(error.cause, Cause::Driver(e) if e.code == 999));
    retry_stranded();
    assert_eq!((budget.used(), support::present(span)), (span.len as u64, 2048));
    sim.clear_failures();
    eventually(|| budget.used() == 0);
    assert!(sim.outstanding().is_empty());
}

#[test]
fn a_quiet_point_retries_and_counts_only_what_has_ended() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = budget();
    Region::new(&host, &budget, &request()).unwrap().retire();
    let bytes = budget.used();
    sim.fail(Call::HostUnregister, 1, 999);
    assert_eq!(end_retired(), 0, "the driver has kept it");
    assert_eq!(budget.used(), bytes);
    assert_eq!(end_retired(), bytes);
    assert!(sim.outstanding().is_empty() && budget.used() == 0);
}

#[test]
fn pinned_memory_of_a_lost_device_is_released_through_another_device() {
    let _alone = alone();
    let sim = Sim::h200(2);
    let host = support::host().with_driver(sim.driver(), GPU);
    let budget = budget();
    let request = request();
    for by_driver in [false, true] {
        if by_driver {
            sim.fail_every(Call::HostRegister, 1, OUT_OF_MEMORY);
        }
        let region = Region::new(&host, &budget, &request).unwrap();
        assert!(region.is_pinned() && budget.used() > 0);
        sim.lose_device(GPU);
        region.close().unwrap();
        assert_eq!(budget.used(), 0);
        // Memory is pinned through this device from now on.
        let region = Region::new(&host, &budget, &request).unwrap();
        assert!(region.is_pinned());
        drop(region);
        assert_eq!(budget.used(), 0);
    }
    assert_eq!((sim.outstanding().registrations, sim.outstanding().host_allocations), (0, 0));
}

#[test]
fn a_driver_that_has_gone_at_exit_is_no_error() {
    let _alone = alone();
    let (sim, host) = machine();
    let budget = budget();
    let region = Region::new(&host, &budget, &request()).unwrap();
    sim.fail_every(Call::HostUnregister, 1, 4);
    region.close().unwrap();
    assert_eq!(budget.used(), 0);
}

#[test]
fn growing_and_trimming_break_no_capture() {
    let _alone = alone();
    let (sim, host) = machine();
    let driver = sim.driver();
    let stream = driver.stream_create(GPU, 0).unwrap();
    let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
    sim.driver().capture_begin(stream, CaptureMode::Global).unwrap();
    drop(pool.buffer::<u8>(MIB).unwrap());
    pool.trim(0).unwrap();
    assert!(sim.driver().capture_end(stream).is_ok(), "the capture was broken");
}

#[test]
fn the_last_free_of_a_closed_pool_waits_for_no_device_while_another_pool_is_open() {
    let _alone = alone();
    let (sim, host) = machine();
    let (budget, other) = (budget(), PinnedPool::new(&host, &budget(), config()).unwrap());
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let mut left = AllocVec::new_in(pool.allocator());
    left.push(7u8);
    drop(pool);
    // No quiet point of another test may come between.
    let stalled = sim.stall(Call::HostUnregister);
    drop(left);
    assert!(budget.used() > 0, "registered, and so charged");
    drop(stalled);
    drop(other);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    assert_eq!(budget.used(), 0, "the last pool to close ends what others have left");
}

#[test]
fn the_last_owner_of_pinned_memory_unregisters_it_and_waits_for_copies_in_flight() {
    let _alone = alone();
    let sim = Sim::h200(1).paced(100);
    let host = support::host().with_driver(sim.driver(), GPU);
    let (_streams, stream) = stream(&sim);
    let budget = budget();
    let mut config = config();
    config.patience = support::PATIENCE;
    let mut target = OnDevice::new(sim.driver(), MIB as u64);
    let mut pool_and_blocks = || {
        let pool = PinnedPool::new(&host, &budget, config.clone()).unwrap();
        let block = PinnedBuf::copy_in(&pool, &vec![9u8; MIB]).unwrap();
        let flight = stream.upload(block, &mut target).unwrap();
        let block = pool.buffer::<u8>(1).unwrap();
        assert_eq!(sim.outstanding().registrations, 1);
        (pool, flight, block)
    };
    let (pool, flight, block) = pool_and_blocks();
    drop((pool, flight, block));
    assert_eq!(sim.outstanding().registrations, 0, "the pool first");
    let (pool, flight, block) = pool_and_blocks();
    drop((flight, block, pool));
    assert_eq!(sim.outstanding().registrations, 0, "the pool last");
    let (pool, flight, block) = pool_and_blocks();
    drop((block, pool, flight));
    assert_eq!(sim.outstanding().registrations, 0, "a flight last");
    assert_eq!((budget.used(), sim.violations()), (0, vec![]));
}

#[test]
fn no_lock_is_held_while_the_driver_registers() {
    let _alone = alone();
    let (sim, host) = machine();
    let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
    pool.warm(4 * MIB).unwrap();
    let stalled = sim.stall(Call::HostRegister);
    thread::scope(|scope| {
        let grower = scope.spawn(|| pool.buffer::<u8>(5 * MIB).map(drop));
        assert!(stalled.wait_for(1, support::PATIENCE));
        // While the registration hangs, other threads allocate, free, and read the pool's
        // statistics.
        for _ in 0..100 {
            drop(pool.buffer::<u8>(MIB).unwrap());
        }
        assert_eq!(pool.stats().regions, 1);
        drop(stalled);
        grower.join().unwrap().unwrap();
    });
    assert_eq!(pool.stats().regions, 2);
}

#[test]
fn a_flight_that_is_dropped_keeps_its_bytes_until_it_has_landed() {
    let _alone = alone();
    let (sim, host) = machine();
    let (_streams, stream) = stream(&sim);
    let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
    let mut target = OnDevice::new(sim.driver(), 3 * MIB as u64);
    let mut from = AllocVec::new_in(pool.allocator());
    from.resize(3 * MIB, 0xab_u8);
    drop(stream.upload(from, &mut target).unwrap());
    assert_eq!(pool.stats().memory.pending, 3 * MIB as u64);
    // A block that does not fit beside it grows the pool instead.
    let mut other = pool.buffer::<u8>(3 * MIB).unwrap();
    other.fill(0xcd);
    assert_eq!(pool.stats().regions, 2);
    stream.synchronize().unwrap();
    assert_eq!(sim.read_back(target.range).unwrap(), vec![0xab; 3 * MIB]);
    pool.trim(0).unwrap();
    assert_eq!(pool.stats().memory.pending, 0);
    assert_eq!(sim.violations(), []);
}

#[test]
fn a_pool_closed_under_a_copy_keeps_the_region_until_the_copy_is_done() {
    let _alone = alone();
    let (sim, host) = machine();
    let (_streams, stream) = stream(&sim);
    let budget = budget();
    let pool = PinnedPool::new(&host, &budget, config()).unwrap();
    let mut target = OnDevice::new(sim.driver(), MIB as u64);
    let from = PinnedBuf::copy_in(&pool, &vec![9u8; MIB]).unwrap();
    drop(stream.upload(from, &mut target).unwrap());
    drop(pool);
    assert_eq!(sim.outstanding().registrations, 1);
    stream.synchronize().unwrap();
    assert_eq!(sim.read_back(target.range).unwrap(), vec![9; MIB]);
    eventually(|| {
        pool::sweep();
        budget.used() == 0
    });
    assert_eq!(sim.violations(), []);
}

#[test]
fn the_oracle_reports_a_block_freed_under_an_unrecorded_copy() {
    let _alone = alone();
    if aquifer_core::sanitizer::IS_BUILT_IN {
        return println!(
            "skipped: the copy reads what is nobody's, and AddressSanitizer ends the process for it"
        );
    }
    let (sim, host) = machine();
    let driver = sim.driver();
    let stream = driver.stream_create(GPU, 0).unwrap();
    let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
    let target = driver.mem_alloc(GPU, 4096).unwrap();
    let mut block = pool.buffer::<u8>(4096).unwrap();
    let address = NonNull::from(&mut block[..]).cast();
    // SAFETY: 1. both sides are allocated. 2. deliberately broken: the block is freed while the
    // copy is queued, and the simulator still sees the pool's bytes.
    unsafe { driver.copy_to_device(stream, target, address, 4096).unwrap() };
    drop(block);
    let found = sim.violations();
    assert_eq!(found.len(), 1);
    assert!(
        matches!(found[0].kind, ViolationKind::FreeInFlight | ViolationKind::ReadWrite),
        "{}",
        found[0]
    );
    sim.run_all();
}

#[test]
fn a_vector_that_grows_under_a_copy_is_safe_if_recorded_and_reported_if_not() {
    let _alone = alone();
    for (size, told) in [(3000, true), (3000, false), (400_000, true), (400_000, false)] {
        let (sim, host) = machine();
        let driver = sim.driver();
        let stream = driver.stream_create(GPU, 0).unwrap();
        let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
        let target = driver.mem_alloc(GPU, size as u64).unwrap();
        let mut vec = AllocVec::new_in(pool.allocator());
        vec.resize(size, 7_u8);
        let block = NonNull::from(&mut vec[0]);
        // With this block above it, the vector cannot grow in place.
        let above = pool.buffer::<u8>(size).unwrap();
        // SAFETY: 1. both sides are allocated. 2. the vector leaves its block while the copy is
        // queued, which is what is tested.
        unsafe { driver.copy_to_device(stream, target, block, size).unwrap() };
        let gate = support::Latch::shut();
        if told {
            pool.allocator().defer(block, gate.clone()).unwrap();
        }
        vec.reserve_exact(8 * size);
        assert_ne!(NonNull::from(&mut vec[0]), block);
        // The next owner of the old block writes to it.
        let mut others: Vec<_> = (0..4).map(|_| pool.buffer::<u8>(size).unwrap()).collect();
        others.iter_mut().for_each(|other| other.fill(9));
        driver.stream_synchronize(stream).unwrap();
        let range = DeviceRange { device: GPU, address: target, bytes: size as u64 };
        let arrived = sim.read_back(range).unwrap();
        let found = sim.violations();
        if told {
            assert_eq!((arrived, found), (vec![7; size], vec![]), "{size}");
        } else {
            assert!(arrived.contains(&9), "{size}: the block was given out again at once");
            assert!(matches!(
                found[0].kind,
                ViolationKind::FreeInFlight | ViolationKind::ReadWrite
            ));
        }
        gate.open();
        drop((vec, above, others));
        assert!(pool.is_consistent());
    }
}

#[test]
fn no_block_crosses_from_one_registration_to_the_next() {
    let _alone = alone();
    let (sim, host) = machine();
    let driver = sim.driver();
    let stream = driver.stream_create(GPU, 0).unwrap();
    let mut config = config();
    config.registration = 2 * MIB;
    let pool = PinnedPool::new(&host, &budget(), config).unwrap();
    pool.warm(8 * MIB).unwrap();
    assert_eq!(sim.outstanding().registrations, 4);
    let target = driver.mem_alloc(GPU, 8 * MIB as u64).unwrap();
    let mut blocks = Vec::new();
    for size in [1_500_000, 700_000, 1 << 20, 2 << 20, 300_000, 5 << 20] {
        let block = pool.allocate(Layout::from_size_align(size, 16).unwrap()).unwrap();
        // SAFETY: 1. both sides live until the device is idle, below. 2. nothing else accesses
        // them.
        let copied = unsafe { driver.copy_to_device(stream, target, block.cast(), size) };
        assert!(copied.is_ok(), "a block of {size} bytes lies in two registrations: {copied:?}");
        blocks.push(block);
    }
    driver.stream_synchronize(stream).unwrap();
    drop(blocks);
    assert_eq!(sim.violations(), []);
}

#[test]
fn an_alignment_beyond_pages_is_kept_in_the_drivers_own_memory_too() {
    let _alone = alone();
    let (sim, host) = machine();
    sim.fail_every(Call::HostRegister, 1, OUT_OF_MEMORY);
    let pool = PinnedPool::new(&host, &budget(), config()).unwrap();
    let allocator = pool.allocator();
    for _ in 0..2 {
        let layout = Layout::from_size_align(4 * MIB, MIB).unwrap();
        let block = pool.allocate(layout).unwrap().cast::<u8>();
        assert!(block.addr().get().is_multiple_of(MIB));
        assert!(allocator.owns(block));
    }
    assert!(pool.stats().regions <= 4 && pool.is_consistent());
}
