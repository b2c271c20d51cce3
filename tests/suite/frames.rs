//! Tests of rings of frames: buffers of one step, in pinned and in device memory, while earlier
//! steps are still in progress.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{assert_silent, read, runtime};
use aquifer::{
    Access, Budget, DeviceArena, DeviceBuffer, DeviceId, DevicePool, Frames, Limit, MemoryError,
    Operand, OperandMut, PinnedAllocator, PoolConfig, Stream, adapters::StepMemory, sim::Sim,
    vec::Vec,
};

const MIB: u64 = 1 << 20;

/// Returns the bytes at the operand's address, without a wait.
fn now(sim: &Sim, what: &impl Operand) -> std::vec::Vec<u8> {
    sim.read_back(what.range()).unwrap()
}

#[test]
fn a_pinned_frame_waits_for_the_step_that_had_it_and_for_nothing_since() {
    let sim = Sim::h200(1).stepped();
    let rt = runtime(&sim);
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let mut x: DeviceBuffer<u8> = pool.buffer(&s, 100).unwrap();
    let mut frames = Frames::new_in(3, rt.pinned_near(0).allocator());
    for step in 0..30u8 {
        let frame = frames.next().unwrap();
        if let Some(done) = step.checked_sub(3) {
            assert_eq!(
                now(&sim, &x),
                [done; 100],
                "the host is three steps ahead, no more and no less"
            );
        }
        let mut batch = Vec::new_in(frame.arena());
        batch.resize(100, step);
        drop(s.upload(batch, &mut x).unwrap());
    }
    assert_eq!(read(&s, &x), [29; 100]);
    drop(frames);
    assert_silent(&sim);
}

/// Written as in a program of a user.
#[test]
fn a_ring_over_a_runtimes_pinned_memory_is_one_line() -> Result<(), MemoryError> {
    let sim = Sim::h200(1).seeded(42);
    let rt = runtime(&sim);
    let pool = rt.device(0)?;
    let s = pool.stream()?;
    let mut x: DeviceBuffer<u32> = pool.buffer(&s, 1024)?;
    let mut frames = Frames::new_in(3, rt.pinned_near(0).allocator());
    for step in 0..10 {
        let frame = frames.next()?;
        let mut batch: Vec<u32, &aquifer::Arena<PinnedAllocator>> = Vec::new_in(frame.arena());
        batch.extend((0..1024).map(|i| i + step));
        drop(s.upload(batch, &mut x)?);
    }
    assert_eq!(read_words(&s, &x)[5], 5 + 9);
    assert_silent(&sim);
    Ok(())
}

fn read_words(s: &Stream, x: &DeviceBuffer<u32>) -> std::vec::Vec<u32> {
    let mut back = vec![0; x.len()];
    s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
    back
}

/// Returns a pool on a device that works when it is waited for, with two streams.
fn rig() -> (Sim, DevicePool, Stream, Stream) {
    let sim = Sim::h200(1).stepped();
    let config = PoolConfig::with_budget(Budget::new("the device", 64 * MIB));
    let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    (sim, pool, s, u)
}

fn ring(pool: &DevicePool, s: &Stream) -> Frames<DeviceArena> {
    let arena = || DeviceArena::new(pool, s, MIB).unwrap();
    Frames::of(arena(), [arena(), arena()])
}

#[test]
fn a_device_frame_waits_for_the_step_that_had_it_and_for_nothing_since() {
    let (sim, pool, s, u) = rig();
    let mut x: DeviceBuffer<u8> = pool.buffer(&s, 100).unwrap();
    let mut frames = ring(&pool, &s);
    for step in 0..30u8 {
        let frame = frames.next().unwrap();
        if let Some(done) = step.checked_sub(3) {
            assert_eq!(
                now(&sim, &x),
                [done; 100],
                "the host is three steps ahead, no more and no less"
            );
        }
        let mut part = frame.arena().alloc::<u8>(100).unwrap();
        // Written on the arena's own stream, and read on another.
        s.fill(&mut part, step).unwrap();
        u.copy(&part, &mut x).unwrap();
    }
    assert_eq!(read(&s, &x), [29; 100]);
    drop(frames);
    assert_silent(&sim);
}

#[test]
fn requests_beyond_the_arena_are_refused_and_change_nothing() {
    let (_sim, pool, s, _) = rig();
    let arena = DeviceArena::new(&pool, &s, 10_000).unwrap();
    assert_eq!(arena.alloc::<u8>(100).unwrap().range().bytes, 100);
    let full = MemoryError::TooLarge { requested: 9_489, limit: 9_488 };
    assert_eq!(arena.alloc::<u8>(9_489).unwrap_err(), full);
    let huge = MemoryError::TooLarge { requested: u64::MAX, limit: 9_488 };
    assert_eq!(arena.alloc::<u64>(usize::MAX).unwrap_err(), huge);
    assert_eq!(arena.alloc::<()>(1).unwrap_err(), MemoryError::ZeroSize);
    assert_eq!(arena.alloc::<u64>(0).unwrap().range().bytes, 0);
    let mut part = arena.alloc::<u8>(9_488).unwrap();
    assert!(matches!(part.slice_mut(9_000..9_489), Err(MemoryError::OutOfRange { .. })));
    assert!(matches!(arena.alloc::<u8>(1), Err(MemoryError::TooLarge { limit: 0, .. })));
}

#[test]
fn the_end_of_a_step_is_where_it_was_first_said() {
    let (sim, pool, s, u) = rig();
    let mut arena = DeviceArena::new(&pool, &s, MIB).unwrap();
    let mut x: DeviceBuffer<u8> = pool.buffer(&s, 10).unwrap();
    let mut part = arena.alloc::<u8>(10).unwrap();
    u.fill(&mut part, 1).unwrap();
    s.fill(&mut part, 2).unwrap();
    arena.end_step().unwrap();
    for later in [&s, &u] {
        later.fill(&mut x, 3).unwrap();
    }
    arena.end_step().unwrap();
    arena.reset().unwrap();
    assert_eq!(
        (sim.pending(s.raw()) > 0, sim.pending(u.raw()) > 0),
        (true, true),
        "what came later still waits"
    );
    assert_silent(&sim);
}

#[test]
fn an_arena_dropped_while_its_parts_are_used_returns_nothing_before_they_are_done() {
    let (sim, pool, s, u) = rig();
    let budget = Budget::new("frames", MIB);
    let limit = Limit::new(pool.clone(), budget.clone());
    let arena = DeviceArena::new(&limit, &s, MIB).unwrap();
    u.fill(&mut arena.alloc::<u8>(1000).unwrap(), 9).unwrap();
    drop(arena);
    pool.trim(u64::MAX).unwrap();
    assert_eq!(budget.used(), MIB, "the other stream still writes");
    u.synchronize().unwrap();
    pool.trim(u64::MAX).unwrap();
    assert_eq!(budget.used(), 0);
    assert_silent(&sim);
}

/// As a kernel of another library uses it: ordered once, and in use until the borrow ends.
#[test]
fn a_part_that_is_lent_stays_lent_while_another_is_used() {
    let (sim, pool, s, u) = rig();
    let mut arena = DeviceArena::new(&pool, &s, MIB).unwrap();
    let generation = arena.block().generation();
    let (mut a, mut b) = (arena.alloc::<u8>(1000).unwrap(), arena.alloc::<u8>(1000).unwrap());
    a.order_mut(u.raw(), None, Access::Write).unwrap();
    b.order_mut(s.raw(), None, Access::Write).unwrap();
    sim.access(u.raw(), a.range(), Access::Write, Some(generation)).unwrap();
    arena.reset().unwrap();
    assert_eq!(
        sim.pending(u.raw()),
        0,
        "the work that came after the other part's order is waited for too"
    );
    assert_silent(&sim);
}
