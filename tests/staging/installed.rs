//! Tests of the process's staging allocator: it is installed once, and a library's own vectors
//! reach it through a route.
//!
//! The installed pool does not belong to the runtime, so the tests can tell which one is used.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{self, MIB, assert_silent, runtime, small};
use allocator_api2::alloc::Global as Installed;
use aquifer::{
    Budget, DeviceBuffer, MemoryError, PinnedBuf, PinnedPool, PoolStats, Runtime, StagerConfig,
    Stream, Tag, conformance::Suite, sim::Sim, staging, tagged,
};
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr::NonNull,
    sync::{LazyLock, MutexGuard},
    thread,
};

/// A machine with a pool that is the process's staging allocator.
struct Staged {
    sim: Sim,
    rt: Runtime,
    pool: PinnedPool,
    installed: Result<(), MemoryError>,
    line: u32,
    /// Results obtained before a staging allocator was installed.
    before: Before,
}

struct Before {
    buffer: MemoryError,
    routed: u64,
}

impl Before {
    fn try_all() -> Self {
        assert!(staging::installed().is_none());
        let buffer = PinnedBuf::<u8>::new(MIB).map(drop).unwrap_err();
        staging::route(|| drop(vec![0u8; MIB]));
        Self { buffer, routed: aquifer::global::stats().routed_allocations }
    }
}

fn few_slots() -> StagerConfig {
    let mut config = StagerConfig::default();
    (config.up_workers, config.down_workers, config.slot, config.slots) = (1, 1, MIB, 1);
    config
}

static STAGED: LazyLock<Staged> = LazyLock::new(|| {
    let sim = Sim::h200(1).stepped();
    let rt = runtime(&sim);
    let before = Before::try_all();
    let budget = Budget::new("staging", 64 << 20);
    let pool = PinnedPool::new(rt.host(), &budget, small()).unwrap();
    let (installed, line) = (staging::install(pool.clone()), line!());
    // The very first scope finds a pool that can take no memory.
    let others = budget.charge(budget.limit()).unwrap();
    staging::route(|| drop(vec![0u8; MIB]));
    drop(others);
    Staged { sim, rt, pool, installed, line, before }
});

/// Waits for this test's turn, and returns the statistics of the pool at its start.
fn turn() -> (&'static Staged, PoolStats, MutexGuard<'static, ()>) {
    let turn = crate::alone();
    let staged = &*STAGED;
    // The route takes a region at its first use.
    staging::route(|| drop(vec![0u8; 2 * staging::ROUTE_FROM]));
    (staged, staged.pool().stats().memory, turn)
}

impl Staged {
    fn pool(&self) -> &PinnedPool {
        &self.pool
    }

    fn is_pinned(&self, bytes: &[u8]) -> Option<bool> {
        self.pool().is_pinned(NonNull::from(bytes).cast())
    }

    /// Asserts that the pool is unchanged except for its counters.
    #[track_caller]
    fn assert_as_before(&self, before: PoolStats) {
        let stats = self.pool().stats();
        let now = stats.memory;
        assert_eq!(
            (now.live, now.requested, now.blocks, now.pending),
            (before.live, before.requested, before.blocks, before.pending)
        );
        assert_eq!(stats.refused_frees, 0);
        assert!(self.pool().is_consistent());
        assert_silent(&self.sim);
    }
}

#[test]
fn a_second_installation_is_refused_with_the_line_of_the_first() {
    let (staged, before, _turn) = turn();
    assert_eq!(staged.installed, Ok(()));
    let MemoryError::AlreadySet { what, by } = staging::install(staged.pool().clone()).unwrap_err()
    else {
        panic!("another error");
    };
    assert_eq!(what, "the staging allocator");
    assert_eq!((by.file(), by.line()), (file!(), staged.line));
    assert!(staging::installed().is_some());
    staged.assert_as_before(before);
}

#[test]
fn before_an_installation_a_buffer_names_what_is_missing_and_a_route_is_ignored() {
    let (staged, before, _turn) = turn();
    let MemoryError::NotSet { what, by } = staged.before.buffer else { panic!("another error") };
    assert_eq!((what, by), ("the staging allocator", "staging::install"));
    assert_eq!(staged.before.routed, 0);
    staged.assert_as_before(before);
}

#[test]
fn a_scope_that_found_the_pool_without_memory_does_not_end_routing_for_ever() {
    // Since then `turn` ensured that the pool could take some.
    let (staged, before, _turn) = turn();
    let bytes = staging::route(|| vec![1u8; MIB]);
    assert_eq!(staged.is_pinned(&bytes), Some(true));
    drop(bytes);
    staged.assert_as_before(before);
}

#[test]
fn buffers_and_stagers_that_name_no_pool_take_the_one_that_is_installed() {
    let (staged, before, _turn) = turn();
    let near = staged.rt.pinned_near(0).stats().memory.live;
    let mut buffer = PinnedBuf::<u32>::new(MIB / 4).unwrap();
    assert!(buffer.is_pinned() && buffer.iter().all(|&element| element == 0));
    buffer[1] = 7;
    assert_eq!(staged.pool().stats().memory.requested, before.requested + MIB as u64);

    let stager = staged.rt.stager(0, few_slots()).unwrap();
    stager.warm().unwrap();
    let held = staged.pool().stats().memory.requested - before.requested;
    assert!(held >= 3 * MIB as u64, "a slot for each direction, beside the buffer: {held}");
    assert_eq!(staged.rt.pinned_near(0).stats().memory.live, near, "and none near the device");
    drop((buffer, stager));
    staged.assert_as_before(before);
}

#[test]
fn a_child_of_a_fork_allocates_in_a_scope_what_is_really_there() {
    let (staged, before, _turn) = turn();
    let inherited = staging::route(|| vec![1u8; MIB]);
    #[expect(unsafe_code, reason = "forks")]
    // SAFETY: 1. the child calls the allocator, which the C library prepares for it, and leaves
    // without a destructor.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let mut bytes = staging::route(|| vec![2u8; MIB]);
            staging::route(|| bytes.reserve_exact(2 * MIB));
            bytes.resize(2 * MIB, 2);
            let right = bytes.iter().all(|&byte| byte == 2);
            drop(bytes);
            drop(inherited);
            // SAFETY: 1. ends this process.
            unsafe { nix::libc::_exit(i32::from(!right)) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
        }
    }
    assert_eq!(
        staged.is_pinned(&inherited),
        Some(true),
        "what the child freed is the parent's still"
    );
    assert!(inherited.iter().all(|&byte| byte == 1));
    drop(inherited);
    staged.assert_as_before(before);
}

#[test]
fn a_standard_vector_lives_and_grows_in_the_pool_and_is_freed_from_any_thread() {
    let (staged, before, _turn) = turn();
    let mut bytes = staging::route(|| vec![7u8; MIB]);
    assert_eq!(staged.is_pinned(&bytes), Some(true));
    assert_eq!(staged.pool().stats().memory.requested, before.requested + MIB as u64);
    // Outside of the scope the vector stays in place, and the route no longer decides where it
    // grows to.
    bytes.extend_from_slice(&[8; 1000]);
    assert!(
        bytes[..MIB].iter().all(|&byte| byte == 7) && bytes[MIB..].iter().all(|&byte| byte == 8)
    );
    staging::route(|| {
        bytes.reserve_exact(3 * MIB);
        bytes.shrink_to(2 * MIB);
    });
    assert!(bytes[..MIB].iter().all(|&byte| byte == 7) && bytes.len() == MIB + 1000);
    let sum = thread::spawn(move || bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>())
        .join()
        .unwrap();
    assert_eq!(sum, 7 * MIB as u64 + 8000);
    staged.assert_as_before(before);
}

#[test]
fn growing_inside_a_scope_stays_in_the_pool() {
    let (staged, before, _turn) = turn();
    let bytes = staging::route(|| {
        let mut bytes = Vec::new();
        for i in 0..2 * MIB {
            bytes.push(i as u8);
        }
        bytes
    });
    assert_eq!(staged.is_pinned(&bytes), Some(true));
    assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    let zeroed = staging::route(|| vec![0u8; MIB]);
    assert!(zeroed.iter().all(|&byte| byte == 0), "used memory is cleared");
    drop((bytes, zeroed));
    staged.assert_as_before(before);
}

#[test]
fn what_is_read_through_a_library_is_copied_to_the_device_from_where_it_lies() {
    let (staged, before, _turn) = turn();
    let path = std::env::temp_dir().join(format!("aquifer-{}-weights.bin", std::process::id()));
    std::fs::write(&path, (0..3 * MIB).map(|i| (i % 253) as u8).collect::<Vec<_>>()).unwrap();
    let bytes: Vec<u8> = staging::route(|| std::fs::read(&path)).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(bytes.len(), 3 * MIB);
    assert_eq!(staged.is_pinned(&bytes), Some(true));
    let pool = staged.rt.device(0).unwrap();
    let s: Stream = pool.stream().unwrap();
    let part = &bytes[..MIB];
    let mut x: DeviceBuffer<u8> = pool.buffer(&s, MIB).unwrap();
    s.scope(|c| {
        c.upload(part, &mut x)?;
        assert_eq!(staged.sim.pending(s.raw()), 1, "no staging: the copy is on its way");
        Ok::<_, MemoryError>(())
    })
    .unwrap()
    .unwrap();
    assert!(support::read(&s, &x) == part);
    drop(bytes);
    staged.assert_as_before(before);
}

/// Growing and shrinking moves blocks between the pool and the allocator below.
#[test]
fn the_allocator_contract_is_kept_inside_and_outside_of_scopes_and_routes() {
    let (staged, before, _turn) = turn();
    for seed in 0..2 {
        let (operations, largest) = (300, 3 * staging::ROUTE_FROM);
        let suite = Suite { seed, operations, largest, ..Suite::default() };
        let conforms = || assert_eq!(suite.check(&Installed), Ok(()));
        conforms();
        staging::route(conforms);
        tagged(Tag::named("suite"), || staging::route(conforms));
    }
    staged.assert_as_before(before);
}

#[test]
fn small_things_and_other_threads_are_left_alone() {
    let (staged, before, _turn) = turn();
    staging::route(|| {
        let small = vec![1u8; staging::ROUTE_FROM - 1];
        assert_eq!(staged.is_pinned(&small), None);
        let elsewhere = thread::scope(|scope| scope.spawn(|| vec![1u8; MIB]).join()).unwrap();
        assert_eq!(staged.is_pinned(&elsewhere), None);
        let here = vec![1u8; staging::ROUTE_FROM];
        assert_eq!(staged.is_pinned(&here), Some(true));
    });
    assert_eq!(staged.is_pinned(&vec![1u8; MIB]), None, "the scope is over");
    staged.assert_as_before(before);
}

#[test]
fn a_scope_that_unwinds_is_over_and_scopes_nest() {
    let (staged, before, _turn) = turn();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        staging::route(|| {
            let _bytes = vec![1u8; MIB];
            staging::route(|| assert_eq!(staged.is_pinned(&vec![1u8; MIB]), Some(true)));
            assert_eq!(
                staged.is_pinned(&vec![1u8; MIB]),
                Some(true),
                "the inner scope has not ended the outer"
            );
            // Not by `panic!`, whose backtrace would cache what it has read in the pool.
            resume_unwind(Box::new("on purpose"));
        })
    }));
    assert!(unwound.is_err());
    assert_eq!(staged.is_pinned(&vec![1u8; MIB]), None);
    staged.assert_as_before(before);
}

#[test]
fn a_pool_that_is_full_leaves_the_vector_to_the_allocator_below() {
    let (staged, before, _turn) = turn();
    let limit = staged.pool().budget().limit() as usize;
    let large = staging::route(|| vec![1u8; limit + MIB]);
    assert_eq!(staged.is_pinned(&large), None);
    assert!(large.iter().all(|&byte| byte == 1));
    let next = staging::route(|| vec![2u8; MIB]);
    assert_eq!(staged.is_pinned(&next), Some(true), "and the route goes on");
    drop((large, next));
    staged.assert_as_before(before);
}

#[test]
fn threads_allocate_pass_on_and_free_and_the_pool_is_as_before() {
    let (staged, before, _turn) = turn();
    let live = aquifer::global::stats().live;
    thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel::<(u8, Vec<u8>)>();
        for thread in 0..4u8 {
            let send = send.clone();
            scope.spawn(move || {
                for round in 0..50usize {
                    let bytes = staging::route(|| vec![thread; staging::ROUTE_FROM + round * 1000]);
                    send.send((thread, bytes)).unwrap();
                }
            });
        }
        drop(send);
        scope.spawn(move || {
            for (thread, bytes) in receive {
                assert!(bytes.iter().all(|&byte| byte == thread));
            }
        });
    });
    staged.assert_as_before(before);
    let now = aquifer::global::stats().live;
    assert!(
        now.abs_diff(live) < MIB as u64,
        "{live} bytes were live in the process, and {now} are"
    );
}
