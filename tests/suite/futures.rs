//! Tests of futures for copies, points, allocations and frames, on an executor of the tests.
//!
//! - A poll never blocks, and a task is woken by another thread.
//! - A future that is dropped or forgotten before it is ready loses nothing and races with nothing.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{
    MIB, PATIENCE, Rig, assert_silent, read, within,
    woken::{Woken, block_on},
};
use aquifer::{
    Budget, DeviceArena, DeviceBuffer, DeviceId, DevicePool, Frames, MemoryError, PoolConfig,
    Request, sim::Sim, vec::Vec as PinnedVec,
};
use std::{
    mem,
    task::Poll,
    thread,
    time::{Duration, Instant},
};

/// Runs `work` on another thread after a short delay.
fn soon(work: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::spawn(|| {
        thread::sleep(Duration::from_millis(5));
        work();
    })
}

#[test]
fn a_copy_is_awaited_while_its_device_works_and_gives_its_vector_back() {
    let mut rig = Rig::stepped();
    let mut landing = rig.s.upload(rig.bytes(7), &mut rig.x).unwrap().into_future();
    let woken = Woken::here();
    assert!(woken.poll(&mut landing).is_pending());
    let sim = rig.sim.clone();
    let stepper = soon(move || sim.run_all());
    let v = block_on(landing).unwrap();
    assert_eq!((v.len(), v[0], v[MIB - 1]), (MIB, 7, 7));
    stepper.join().unwrap();
    assert!(read(&rig.s, &rig.x).iter().all(|&byte| byte == 7));
    assert_silent(&rig.sim);
}

#[test]
fn a_task_that_moved_is_woken_where_it_is_and_no_more_where_it_was() {
    let mut rig = Rig::stepped();
    rig.s.fill(&mut rig.x, 1).unwrap();
    let mut point = rig.s.point().into_future();
    let (before, after) = (Woken::here(), Woken::here());
    assert!(before.poll(&mut point).is_pending());
    assert!(after.poll(&mut point).is_pending());
    rig.sim.run_all();
    let begun = Instant::now();
    while after.times() == 0 {
        assert!(begun.elapsed() < PATIENCE);
        thread::yield_now();
    }
    assert_eq!((before.times(), after.times()), (0, 1));
    assert_eq!(after.poll(&mut point), Poll::Ready(Ok(())));
}

#[test]
fn many_tasks_on_many_threads_are_all_woken() {
    let rig = Rig::stepped();
    let pool = rig.rt.device(0).unwrap();
    let tasks: Vec<_> = (0..16)
        .map(|i| {
            let stream = pool.stream().unwrap();
            let mut x: DeviceBuffer<u8> = pool.buffer(&stream, 4096).unwrap();
            stream.fill(&mut x, i).unwrap();
            let point = stream.point();
            thread::spawn(move || (block_on(point), stream, x))
        })
        .collect();
    let sim = rig.sim.clone();
    soon(move || sim.run_all()).join().unwrap();
    for (i, task) in (0..).zip(tasks) {
        let (reached, stream, x) = within(move || task.join().unwrap());
        assert_eq!((reached, read(&stream, &x)), (Ok(()), vec![i; 4096]));
    }
    assert_silent(&rig.sim);
}

#[test]
fn a_copy_dropped_before_it_is_ready_keeps_its_memory_until_the_device_is_done() {
    let mut rig = Rig::stepped();
    let bytes = rig.bytes(3);
    let address = bytes.as_ptr();
    let mut landing = rig.s.upload(bytes, &mut rig.x).unwrap().into_future();
    let woken = Woken::here();
    assert!(woken.poll(&mut landing).is_pending());
    drop(landing);
    assert_ne!(rig.bytes(0).as_ptr(), address, "the device still reads it");
    rig.sim.run_all();
    rig.s.synchronize().unwrap();
    assert!(read(&rig.s, &rig.x).iter().all(|&byte| byte == 3));
    thread::sleep(Duration::from_millis(5));
    assert_eq!(woken.times(), 0, "a dropped future wakes no task");
    assert_silent(&rig.sim);
}

#[test]
fn a_copy_forgotten_before_it_is_ready_is_leaked_and_races_with_nothing() {
    let mut rig = Rig::stepped();
    let bytes = rig.bytes(3);
    let address = bytes.as_ptr();
    let mut landing = rig.s.upload(bytes, &mut rig.x).unwrap().into_future();
    assert!(Woken::here().poll(&mut landing).is_pending());
    #[expect(clippy::mem_forget, reason = "the property under test")]
    mem::forget(landing);
    for value in 0..4 {
        assert_ne!(rig.bytes(value).as_ptr(), address);
    }
    rig.sim.run_all();
    assert!(read(&rig.s, &rig.x).iter().all(|&byte| byte == 3));
    assert_silent(&rig.sim);
}

#[test]
fn a_lost_device_wakes_its_tasks_with_an_error() {
    let mut rig = Rig::stepped();
    let landing = rig.s.upload(rig.bytes(3), &mut rig.x).unwrap();
    let point = rig.s.point();
    let sim = rig.sim.clone();
    let loser = soon(move || sim.lose_device(DeviceId(0)));
    let lost = MemoryError::DeviceLost { device: DeviceId(0) };
    assert_eq!(block_on(landing).map(drop), Err(lost.clone()));
    assert_eq!(block_on(point), Err(lost));
    loser.join().unwrap();
}

/// A pool of 64 MiB.
fn small_pool(sim: &Sim) -> DevicePool {
    let config = PoolConfig::with_budget(Budget::new("the device", 64 * MIB as u64));
    DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
}

fn mib(n: u64) -> Request {
    Request::bytes(n << 20)
}

#[test]
fn an_allocation_waits_for_a_block_that_another_thread_drops() {
    let sim = Sim::h200(1);
    let pool = small_pool(&sim);
    let s = pool.stream().unwrap();
    let held = pool.alloc(&s, mib(48)).unwrap();
    let begun = Instant::now();
    let dropper = soon(move || drop(held));
    let block = block_on(pool.alloc_async(&s, mib(32)).until(None)).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(5));
    assert_eq!(block.bytes(), 32 << 20);
    dropper.join().unwrap();
}

#[test]
fn a_poll_of_an_allocation_does_not_wait_for_queued_work_but_its_task_is_woken_after_it() {
    let sim = Sim::h200(1).stepped();
    let pool = small_pool(&sim);
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let x: DeviceBuffer<u8> = pool.buffer(&s, 48 * MIB).unwrap();
    let mut y: DeviceBuffer<u8> = pool.buffer(&u, 8 * MIB).unwrap();
    u.copy(x.slice(0..8 * MIB).unwrap(), &mut y).unwrap();
    drop(x);
    let mut waiting = pool.alloc_async(&u, mib(40));
    // Memory in use may be taken with a wait on the device, but the host must not wait.
    let first = Woken::here().poll(&mut waiting);
    assert!(sim.pending(u.raw()) > 0, "the poll ran something");
    let stepper = soon({
        let sim = sim.clone();
        move || sim.run_all()
    });
    let block = match first {
        Poll::Ready(block) => block,
        Poll::Pending => block_on(waiting),
    };
    assert_eq!(block.unwrap().bytes(), 40 << 20);
    stepper.join().unwrap();
    assert_silent(&sim);
}

#[test]
fn an_allocation_that_can_never_be_granted_or_is_late_is_refused() {
    let sim = Sim::h200(1);
    let pool = small_pool(&sim);
    let s = pool.stream().unwrap();
    let begun = Instant::now();
    assert!(matches!(
        block_on(pool.alloc_async(&s, mib(65)).until(None)),
        Err(MemoryError::OutOfMemory(_))
    ));
    assert_eq!(block_on(pool.alloc_async(&s, mib(0))).unwrap().bytes(), 0);
    let _held = pool.alloc(&s, mib(48)).unwrap();
    let until = begun + Duration::from_millis(30);
    let late = block_on(pool.alloc_async(&s, mib(32)).until(until));
    assert!(matches!(late, Err(MemoryError::OutOfMemory(_))));
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert_eq!(pool.budget().used(), pool.stats().physical);
}

#[test]
fn a_tenants_allocation_waits_for_the_tenants_own_limit() {
    let sim = Sim::h200(1);
    let pool = small_pool(&sim);
    let s = pool.stream().unwrap();
    let tenant = pool.for_tenant(&Budget::new("tenant a", 8 << 20)).unwrap();
    let held = tenant.alloc(&s, mib(6)).unwrap();
    let mut waiting = tenant.alloc_async(&s, mib(4));
    assert!(Woken::here().poll(&mut waiting).is_pending());
    assert_eq!(tenant.live(), 6 << 20, "a future that waits holds nothing");
    let dropper = soon(move || drop(held));
    assert_eq!(block_on(waiting).unwrap().bytes(), 4 << 20);
    dropper.join().unwrap();
}

#[test]
fn a_frame_is_awaited_until_the_step_that_had_it_is_done() {
    let rig = Rig::stepped();
    let pool = rig.rt.device(0).unwrap();
    let mut x: DeviceBuffer<u8> = pool.buffer(&rig.s, 100).unwrap();
    let mut frames = Frames::new_in(2, rig.rt.pinned_near(0).allocator());
    for step in 0..2u8 {
        let frame = block_on(frames.next_async()).unwrap();
        let mut batch = PinnedVec::new_in(frame.arena());
        batch.resize(100, step);
        drop(rig.s.upload(batch, &mut x).unwrap());
    }
    // A frame future dropped before it is ready takes nothing from the ring.
    assert!(Woken::here().poll(&mut frames.next_async()).is_pending());
    let sim = rig.sim.clone();
    let stepper = soon(move || sim.run_all());
    let _frame = block_on(frames.next_async()).unwrap();
    stepper.join().unwrap();
    assert_eq!(read(&rig.s, &x), [1; 100]);
    assert_silent(&rig.sim);
}

#[test]
fn a_frame_of_device_memory_is_awaited_too() {
    let rig = Rig::stepped();
    let pool = rig.rt.device(0).unwrap();
    let arena = || DeviceArena::new(pool, &rig.s, MIB as u64).unwrap();
    let mut frames = Frames::of(arena(), [arena()]);
    for step in 0..2 {
        let frame = block_on(frames.next_async()).unwrap();
        rig.s.fill(&mut frame.arena().alloc::<u8>(100).unwrap(), step).unwrap();
    }
    assert!(Woken::here().poll(&mut frames.next_async()).is_pending());
    let sim = rig.sim.clone();
    let stepper = soon(move || sim.run_all());
    assert_eq!(block_on(frames.next_async()).unwrap().arena().used(), 0);
    stepper.join().unwrap();
    assert_silent(&rig.sim);
}
