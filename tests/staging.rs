//! The process's staging allocator: installed once, and reached by a library's own vectors through a route.
//!
//! A binary of its own, since the process has one staging allocator and one global allocator. Its tests take turns, since
//! they count what the process's one pool holds.

mod support;

use aquifer::{DeviceBuffer, MemoryError, PinnedPool, PoolStats, Runtime, Stream, sim::Sim, staging};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr::NonNull,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
};
use support::{MIB, assert_silent, runtime};

#[global_allocator]
static GLOBAL: aquifer::Global = aquifer::Global::new();

/// A machine whose pool is the process's staging allocator.
struct Staged {
    sim: Sim,
    rt: Runtime,
    installed: Result<(), MemoryError>,
    line: u32,
}

static STAGED: LazyLock<Staged> = LazyLock::new(|| {
    let sim = Sim::h200(1).stepped();
    let rt = runtime(&sim);
    let none_yet = staging::installed().is_none();
    let (installed, line) = (staging::install(rt.pinned_near(0).clone()), line!());
    assert!(none_yet);
    Staged { sim, rt, installed, line }
});

static TURN: Mutex<()> = Mutex::new(());

/// This test's turn, and what the pool holds at its beginning.
fn turn() -> (&'static Staged, PoolStats, MutexGuard<'static, ()>) {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let staged = &*STAGED;
    // The route takes a region at its first use.
    staging::route(|| drop(vec![0u8; 2 * staging::ROUTE_FROM]));
    (staged, staged.pool().stats().memory, turn)
}

impl Staged {
    fn pool(&self) -> &PinnedPool {
        self.rt.pinned_near(0)
    }

    fn is_pinned(&self, bytes: &[u8]) -> Option<bool> {
        self.pool().is_pinned(NonNull::from(bytes).cast())
    }

    /// The pool is as it was, but for what it has counted.
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
    let MemoryError::AlreadySet { what, by } = staging::install(staged.pool().clone()).unwrap_err() else {
        panic!("another error");
    };
    assert_eq!(what, "the staging allocator");
    assert_eq!((by.file(), by.line()), (file!(), staged.line));
    assert!(staging::installed().is_some());
    staged.assert_as_before(before);
}

#[test]
fn a_vector_of_the_standard_library_lies_in_the_pool_grows_there_and_goes_home_from_any_thread() {
    let (staged, before, _turn) = turn();
    let mut bytes = staging::route(|| vec![7u8; MIB]);
    assert_eq!(staged.is_pinned(&bytes), Some(true));
    assert_eq!(staged.pool().stats().memory.requested, before.requested + MIB as u64);
    // Outside of the scope it stays where it is, and what it grows into is no longer the route's to choose.
    bytes.extend_from_slice(&[8; 1000]);
    assert!(bytes[..MIB].iter().all(|&byte| byte == 7) && bytes[MIB..].iter().all(|&byte| byte == 8));
    staging::route(|| {
        bytes.reserve_exact(3 * MIB);
        bytes.shrink_to(2 * MIB);
    });
    assert!(bytes[..MIB].iter().all(|&byte| byte == 7) && bytes.len() == MIB + 1000);
    let sum = thread::spawn(move || bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>()).join().unwrap();
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
            // Not by `panic!`, whose backtrace would cache what it has read, in the pool.
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
    assert!(now.abs_diff(live) < MIB as u64, "{live} bytes were live in the process, and {now} are");
}
