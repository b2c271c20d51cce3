//! Tests of parked memory: it leaves the device and the budget, is kept on the host, and is
//! restored at the same addresses.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "parks what nobody is about to use")]

use crate::support::{MIB, PATIENCE, Rig, assert_silent, plain, read};
use allocator_api2::alloc::{AllocError, Allocator, Global};
use aquifer_core::{DeviceId, MemoryError, Tag};
use aquifer_device::{Adoption, DeviceBuffer, Park, ParkReport, Parkable, Request};
use aquifer_driver::{Access, Call, CaptureMode, Operand, sim::Sim};
use aquifer_stream::{Launch, Stream};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const SLOT: u64 = 4 * MIB;

fn tag() -> Tag {
    Tag::named("sleeper")
}

/// Returns a pool whose parkable memory has slots of 4 MiB.
fn rig(limit_mib: u64) -> Rig {
    Rig::on(Sim::h200(1), limit_mib, |config| {
        config.handle_bytes = SLOT;
        config.wait = Duration::from_millis(100);
    })
}

fn park(rig: &Rig, how: Park) -> Result<ParkReport, MemoryError> {
    // SAFETY: 1. and 2. each test states what it has queued before, and queues nothing meanwhile
    // except work that is refused.
    unsafe { rig.pool.park(tag(), how) }
}

fn saved() -> Park {
    Park::save_in(Global)
}

/// Returns what block `n` holds: bytes of which the granules of a pool all differ.
fn pattern(n: usize, bytes: usize) -> Vec<u8> {
    const GRANULE: usize = 512;
    let one: Vec<u8> = (0..GRANULE).map(|at| (n * 31 + at * 7) as u8).collect();
    let mut all = one.repeat(bytes.div_ceil(GRANULE));
    for (number, granule) in all.chunks_exact_mut(GRANULE).enumerate() {
        granule[..8].copy_from_slice(&number.to_le_bytes());
    }
    all.truncate(bytes);
    all
}

fn filled(stream: &Stream, parkable: &Parkable, n: usize, bytes: usize) -> DeviceBuffer<u8> {
    let mut buffer = parkable.buffer(stream, bytes).unwrap();
    let contents = pattern(n, bytes);
    stream.scope(|c| c.upload(&contents, &mut buffer)).unwrap().unwrap();
    buffer
}

#[track_caller]
fn assert_filled(stream: &Stream, buffer: &DeviceBuffer<u8>, n: usize) {
    let back = read(stream, buffer);
    let expected = pattern(n, back.len());
    let differs = || back.iter().zip(&expected).position(|(byte, expected)| byte != expected);
    assert!(back == expected, "block {n} differs at {:?}", differs());
}

fn address(buffer: &DeviceBuffer<u8>) -> u64 {
    buffer.range().address
}

/// Block sizes of which some share slots and some span several.
const SIZES: [usize; 9] = [1, 512, 700, 1 << 20, 513, 5 << 20, 4096, (4 << 20) - 512, 100_000];

fn several(stream: &Stream, parkable: &Parkable) -> Vec<DeviceBuffer<u8>> {
    SIZES.iter().enumerate().map(|(n, &bytes)| filled(stream, parkable, n, bytes)).collect()
}

/// Fails the test if any memory of the pool remains.
#[track_caller]
fn assert_nothing_left(rig: &Rig) {
    rig.pool.trim(0).unwrap();
    let stats = rig.pool.stats();
    assert_eq!(
        (stats.physical, stats.live, stats.cached, stats.pending, stats.blocks),
        (0, 0, 0, 0, 0)
    );
    assert_eq!((stats.requested, rig.budget.used()), (0, 0));
    rig.assert_silent();
}

#[test]
fn parked_memory_leaves_the_device_and_is_restored_byte_for_byte_in_place() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let all = several(&s, &parkable);
    let addresses: Vec<u64> = all.iter().map(address).collect();
    let before = rig.pool.stats();
    let (live, held) = (before.live, before.physical);
    assert_eq!(live, SIZES.iter().map(|&b| (b as u64).next_multiple_of(512)).sum::<u64>());
    assert_eq!((before.live + before.cached, rig.budget.used()), (held, held));
    for _ in 0..3 {
        let report = park(&rig, saved()).unwrap();
        assert_eq!((report.blocks, report.parked, report.saved), (9, live, live));
        assert_eq!((report.released, report.refused), (held, 0));
        let parked = rig.pool.stats();
        assert_eq!((rig.budget.used(), parked.physical, parked.live, parked.cached), (0, 0, 0, 0));
        assert_eq!((parked.requested, parked.blocks), (0, 9));
        assert_eq!(rig.sim.driver().memory_info(DeviceId(0)).unwrap().free, {
            let info = rig.sim.driver().memory_info(DeviceId(0)).unwrap();
            info.total
        });

        let report = rig.pool.resume(tag(), None).unwrap();
        assert_eq!((report.blocks, report.restored), (9, live));
        let resumed = rig.pool.stats();
        assert_eq!((resumed.live, resumed.requested, resumed.blocks), (live, before.requested, 9));
        assert_eq!(
            (resumed.live + resumed.cached, rig.budget.used()),
            (report.taken, report.taken)
        );
        assert!(report.taken <= held, "slots in which nothing lives do not come back");
        assert_eq!(all.iter().map(address).collect::<Vec<_>>(), addresses);
        all.iter().enumerate().for_each(|(n, buffer)| assert_filled(&s, buffer, n));
    }
    drop((all, parkable));
    assert_nothing_left(&rig);
}

#[test]
fn discarded_memory_takes_no_host_memory_and_its_addresses_can_be_written_again() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let mut buffer = filled(&s, &parkable, 1, 6 << 20);
    let report = park(&rig, Park::discard()).unwrap();
    assert_eq!((report.saved, report.released, rig.budget.used()), (0, 8 * MIB, 0));
    assert_eq!(rig.calls(Call::CopyToHost), 0);
    let report = rig.pool.resume(tag(), None).unwrap();
    assert_eq!((report.restored, report.taken), (0, 8 * MIB));
    s.fill(&mut buffer, 9).unwrap();
    assert!(read(&s, &buffer).iter().all(|&byte| byte == 9));
    rig.assert_silent();
}

#[test]
fn every_use_of_a_parked_block_is_refused_with_its_tag() {
    let rig = rig(64);
    let (s, u) = (rig.stream(), rig.stream());
    let parkable = rig.pool.parkable(tag()).unwrap();
    let mut a = filled(&s, &parkable, 0, 4096);
    let mut b = rig.bytes(&s, 4096);
    let block = parkable.alloc(&s, Request::bytes(100)).unwrap();
    park(&rig, saved()).unwrap();
    let parked = Some(MemoryError::Parked { tag: tag() });
    for on in [&s, &u] {
        assert_eq!(block.prepare(on, Access::Read).err(), parked);
        assert_eq!(block.record_use(on, Access::Read).err(), parked);
        assert_eq!(block.order(on.raw(), None, Access::Read).err(), parked);
        assert_eq!(Launch::on(on).reads(&b).reads(&block).preflight().err(), parked);
        assert_eq!(on.fill(&mut a, 0).err(), parked);
        assert_eq!(on.copy(&a, &mut b).err(), parked);
        assert_eq!(on.copy(&b, &mut a).err(), parked);
        let mut host = vec![0; 4096];
        assert_eq!(on.scope(|c| c.download(&a, &mut host)).unwrap().err(), parked);
        assert_eq!(on.scope(|c| c.upload(&host, &mut a)).unwrap().err(), parked);
        assert_eq!(parkable.alloc(on, Request::bytes(1)).err(), parked);
    }
    assert_eq!(park(&rig, saved()).err(), parked, "twice");
    assert!(parkable.is_parked());
    // A refused launch has recorded no use of its other operands.
    s.fill(&mut b, 1).unwrap();
    rig.pool.resume(tag(), None).unwrap();
    assert!(!parkable.is_parked());
    block.prepare(&u, Access::Write).unwrap().finish().unwrap();
    u.copy(&a, &mut b).unwrap();
    assert_filled(&s, &b, 0);
    rig.assert_silent();
}

#[test]
fn a_dropped_parked_block_frees_its_host_memory_and_is_not_restored() {
    #[derive(Clone, Default)]
    struct Counting(Arc<AtomicUsize>);
    // SAFETY: 1. those of the global allocator, which returns these blocks.
    unsafe impl Allocator for Counting {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            self.0.fetch_add(layout.size(), Ordering::Relaxed);
            Global.allocate(layout)
        }
        unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
            self.0.fetch_sub(layout.size(), Ordering::Relaxed);
            // SAFETY: 1. guaranteed by the caller.
            unsafe { Global.deallocate(start, layout) }
        }
    }
    let rig = rig(512);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    // Of more than one piece of host memory.
    let large = filled(&s, &parkable, 0, 65 << 20);
    let mut small: Vec<_> = (1..4).map(|n| filled(&s, &parkable, n, 1 << 20)).collect();
    let host = Counting::default();
    park(&rig, Park::save_in(host.clone())).unwrap();
    let bytes = || host.0.load(Ordering::Relaxed) as u64;
    assert_eq!(bytes(), 68 * MIB);
    drop(large);
    assert_eq!(bytes(), 3 * MIB);
    drop(small.remove(1));
    let report = rig.pool.resume(tag(), None).unwrap();
    assert_eq!((report.blocks, report.restored, bytes()), (2, 2 * MIB, 0));
    assert_eq!(report.taken, rig.budget.used());
    assert!(report.taken <= 2 * SLOT, "{}", report.taken);
    assert_filled(&s, &small[0], 1);
    assert_filled(&s, &small[1], 3);
    park(&rig, Park::save_in(host.clone())).unwrap();
    small.clear();
    assert_eq!(bytes(), 0);
    assert_eq!(rig.pool.resume(tag(), None).unwrap().taken, 0);
    drop(parkable);
    assert_nothing_left(&rig);
}

#[test]
fn a_park_falls_back_to_smaller_host_blocks_and_fails_without_any() {
    #[derive(Clone)]
    struct UpTo(usize);
    // SAFETY: 1. those of the global allocator, which returns these blocks.
    unsafe impl Allocator for UpTo {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() > self.0 { Err(AllocError) } else { Global.allocate(layout) }
        }
        unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
            // SAFETY: 1. guaranteed by the caller.
            unsafe { Global.deallocate(start, layout) }
        }
    }
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let all = several(&s, &parkable);
    let refused = park(&rig, Park::save_in(UpTo(1000)));
    assert!(matches!(refused, Err(MemoryError::System(_))), "{refused:?}");
    all.iter().enumerate().for_each(|(n, buffer)| assert_filled(&s, buffer, n));
    park(&rig, Park::save_in(UpTo(2 << 20))).unwrap();
    rig.pool.resume(tag(), None).unwrap();
    all.iter().enumerate().for_each(|(n, buffer)| assert_filled(&s, buffer, n));
    rig.assert_silent();
}

#[test]
fn a_panicking_allocator_refuses_the_park_and_the_blocks_stay_resident() {
    struct Panics(AtomicBool);
    // SAFETY: 1. those of the global allocator, where it returns a block.
    unsafe impl Allocator for Panics {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            assert!(!self.0.load(Ordering::Relaxed), "on purpose");
            Global.allocate(layout)
        }
        unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
            // SAFETY: 1. guaranteed by the caller.
            unsafe { Global.deallocate(start, layout) };
            panic!("on purpose");
        }
    }
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let all = several(&s, &parkable);
    let refused = park(&rig, Park::save_in(Panics(AtomicBool::new(true))));
    assert!(matches!(refused, Err(MemoryError::System(_))), "{refused:?}");
    assert!(!parkable.is_parked());
    // An allocator that panics in `deallocate` has still received its memory.
    park(&rig, Park::save_in(Panics(AtomicBool::new(false)))).unwrap();
    rig.pool.resume(tag(), None).unwrap();
    all.iter().enumerate().for_each(|(n, buffer)| assert_filled(&s, buffer, n));
    rig.assert_silent();
}

#[test]
fn a_capture_refuses_the_park_and_stays_whole() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let mut buffer = filled(&s, &parkable, 0, 4096);
    s.fill(&mut buffer, 1).unwrap();
    rig.sim.driver().capture_begin(s.raw(), CaptureMode::Global).unwrap();
    let refused = park(&rig, saved());
    assert!(matches!(refused, Err(MemoryError::Capturing { .. })), "{refused:?}");
    rig.sim.driver().capture_end(s.raw()).unwrap();
    park(&rig, saved()).unwrap();
    rig.pool.resume(tag(), None).unwrap();
    rig.assert_silent();
}

#[test]
fn a_lost_device_ends_parked_memory_and_leaves_nothing() {
    for parked in [false, true] {
        let rig = rig(64);
        let s = rig.stream();
        let parkable = rig.pool.parkable(tag()).unwrap();
        let all = several(&s, &parkable);
        if parked {
            park(&rig, saved()).unwrap();
        }
        rig.sim.lose_device(DeviceId(0));
        let lost = Some(MemoryError::DeviceLost { device: DeviceId(0) });
        if parked {
            assert_eq!(rig.pool.resume(tag(), None).err(), lost);
            assert!(parkable.is_parked());
        } else {
            assert_eq!(park(&rig, saved()).err(), lost);
            assert!(!parkable.is_parked());
        }
        let Rig { sim, pool, budget } = rig;
        drop((all, parkable, s));
        drop(pool);
        assert_eq!(budget.used(), 0, "{parked}");
        assert_silent(&sim);
    }
}

#[test]
fn a_closed_pool_keeps_parked_blocks_parked_and_they_end_in_any_order() {
    for parkable_first in [true, false] {
        let Rig { sim, pool, budget } = rig(64);
        let s = pool.stream().unwrap();
        let parkable = pool.parkable(tag()).unwrap();
        let mut all = several(&s, &parkable);
        // SAFETY: 1. and 2. nothing is about to be queued.
        unsafe { pool.park(tag(), saved()) }.unwrap();
        if parkable_first {
            drop(parkable);
            drop(pool);
        } else {
            drop(pool);
            drop(parkable);
        }
        assert_eq!(budget.used(), 0);
        assert_eq!(s.fill(&mut all[0], 1), Err(MemoryError::Parked { tag: tag() }));
        all.swap_remove(2);
        drop((all, s));
        assert_eq!(
            (budget.used(), sim.outstanding().is_empty()),
            (0, true),
            "{:?}",
            sim.outstanding()
        );
        assert_silent(&sim);
    }
}

#[test]
fn devices_that_cannot_map_say_so() {
    let rig = Rig::on(plain(), 64, |_| ());
    let unsupported =
        |refused: Option<MemoryError>| matches!(refused, Some(MemoryError::Unsupported { .. }));
    assert!(unsupported(rig.pool.parkable(tag()).err()));
    assert!(unsupported(park(&rig, saved()).err()));
}

#[test]
fn nearly_all_of_eight_gibibytes_is_parked_in_few_calls() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 100 << 10, |_| ());
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let mut blocks = Vec::new();
    // Norms and biases, matrices, and a cache.
    for layer in 0..64 {
        for bytes in [16 << 10, 16 << 10, 30 << 20, 20 << 20, (12 << 20) + 4096 * layer] {
            blocks.push(parkable.alloc(&s, Request::bytes(bytes)).unwrap());
        }
    }
    blocks.push(parkable.alloc(&s, Request::bytes(4 << 30)).unwrap());
    let live: u64 = blocks.iter().map(aquifer_device::Block::capacity).sum();
    let held = rig.pool.stats().physical;
    assert!(live * 100 >= held * 95, "{live} of {held}");
    let report = park(&rig, Park::discard()).unwrap();
    assert_eq!((report.released, report.parked, rig.pool.stats().physical), (held, live, 0));
    let driver = rig.sim.driver();
    let calls = driver.calls();
    assert!(calls.get(Call::Unmap) <= 2, "{}", calls.get(Call::Unmap));
    assert_eq!(calls.get(Call::HandleRelease), held / (32 * MIB));
    rig.assert_silent();
}

#[test]
fn parkable_memory_is_reused_and_released_when_empty() {
    let rig = rig(16);
    let (s, u) = (rig.stream(), rig.stream());
    let parkable = rig.pool.parkable(tag()).unwrap();
    let first = filled(&s, &parkable, 0, 3 << 20);
    let there = address(&first);
    drop(first);
    // The stream that freed it reuses it immediately, another stream when the work is done.
    let again = filled(&s, &parkable, 1, 3 << 20);
    assert_eq!((address(&again), rig.budget.used()), (there, 4 * MIB));
    drop(again);
    let third = filled(&u, &parkable, 2, 3 << 20);
    assert_eq!((address(&third), rig.budget.used()), (there, 4 * MIB));
    drop(third);
    // The caches can use all memory of the budget once they are short.
    let stable = rig.stable(&s, 16 * MIB);
    assert_eq!((rig.budget.used(), parkable.stats().physical), (16 * MIB, 0));
    drop((stable, parkable));
    assert_nothing_left(&rig);
}

#[test]
fn a_parkable_request_waits_for_memory_freed_by_other_streams_when_short() {
    for adoption in [Adoption::Wait, Adoption::DoneOnly, Adoption::Never] {
        let rig = Rig::on(Sim::h200(1).seeded(7), 8, |config| {
            config.handle_bytes = SLOT;
            config.adoption = adoption;
        });
        let (s, u) = (rig.stream(), rig.stream());
        let parkable = rig.pool.parkable(tag()).unwrap();
        let mut first: DeviceBuffer<u8> = parkable.buffer(&s, 7 << 20).unwrap();
        (0..50).for_each(|byte| s.fill(&mut first, byte).unwrap());
        drop(first);
        let mut second: DeviceBuffer<u8> = parkable.buffer(&u, 7 << 20).unwrap();
        u.fill(&mut second, 200).unwrap();
        assert!(read(&u, &second).iter().all(|&byte| byte == 200), "{adoption:?}");
        assert_eq!(rig.budget.used(), 8 * MIB);
        rig.assert_silent();
    }
}

#[test]
fn threads_that_resume_a_tag_wait_for_the_one_that_does_it() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let buffer = filled(&s, &parkable, 3, 1 << 20);
    park(&rig, saved()).unwrap();
    let stalled = rig.sim.stall(Call::HandleCreate);
    let later = |wait: Duration| Some(Instant::now() + wait);
    let reports = thread::scope(|scope| {
        let resume = || rig.pool.resume(tag(), later(PATIENCE));
        let first = scope.spawn(resume);
        assert!(stalled.wait_for(1, PATIENCE));
        let others = [(); 3].map(|()| scope.spawn(resume));
        let parked = Err(MemoryError::Parked { tag: tag() });
        assert_eq!(rig.pool.resume(tag(), None).map(drop), parked, "it does not wait");
        let short = Duration::from_millis(20);
        let began = Instant::now();
        assert_eq!(rig.pool.resume(tag(), later(short)).map(drop), parked);
        assert!(began.elapsed() >= short, "the deadline had not passed");
        drop(stalled);
        [first].into_iter().chain(others).map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    let blocks = reports.into_iter().map(|report| report.unwrap().blocks);
    assert_eq!(blocks.sum::<u64>(), 1, "one of them has resumed it");
    assert_filled(&s, &buffer, 3);
    rig.assert_silent();
}

#[test]
fn a_resume_waits_for_a_park_and_takes_over_from_a_resume_that_is_undone() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let buffer = filled(&s, &parkable, 5, 1 << 20);
    let resume = || rig.pool.resume(tag(), Some(Instant::now() + PATIENCE)).unwrap().blocks;
    // SAFETY: 1. and 2. nothing uses the buffer.
    let parking = unsafe { rig.pool.begin_park(tag(), saved()) }.unwrap();
    thread::scope(|scope| {
        let resumed = scope.spawn(resume);
        thread::sleep(Duration::from_millis(5));
        parking.commit();
        assert_eq!(resumed.join().unwrap(), 1);
    });
    park(&rig, saved()).unwrap();
    let resuming = rig.pool.begin_resume(tag(), None).unwrap();
    thread::scope(|scope| {
        let resumed = scope.spawn(resume);
        thread::sleep(Duration::from_millis(5));
        drop(resuming);
        assert_eq!(resumed.join().unwrap(), 1);
    });
    assert_filled(&s, &buffer, 5);
    rig.assert_silent();
}

#[test]
fn a_resume_waits_for_the_budget_until_its_deadline() {
    let rig = rig(16);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tag()).unwrap();
    let buffer = filled(&s, &parkable, 6, 8 << 20);
    park(&rig, saved()).unwrap();
    let other = rig.budget.charge(12 * MIB).unwrap();
    let refused = rig.pool.resume(tag(), Some(Instant::now() + Duration::from_millis(5)));
    assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
    thread::scope(|scope| {
        let resumed = scope.spawn(|| rig.pool.resume(tag(), Some(Instant::now() + PATIENCE)));
        thread::sleep(Duration::from_millis(5));
        drop(other);
        assert_eq!(resumed.join().unwrap().unwrap().blocks, 1);
    });
    assert_filled(&s, &buffer, 6);
    rig.assert_silent();
}
