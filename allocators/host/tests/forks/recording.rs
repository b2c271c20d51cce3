//! Tests of recording pinned memory, including in a forked child.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "forks, and frees blocks by the allocator trait")]

use crate::support;
use allocator_api2::alloc::Allocator;
use aquifer_core::{
    Action, Budget, Recorder, Tag,
    event::{MemoryLocation, TraceFile},
};
use aquifer_host::{PinnedConfig, PinnedPool};
use nix::libc;
use std::{
    alloc::Layout,
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::Arc,
};

fn file(name: &str) -> PathBuf {
    env::temp_dir().join(format!("aquifer-{name}-{}.csv", process::id()))
}

/// Returns the rows of a trace without their times, addresses and threads.
fn rows(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let row = |row: &str| row.split(',').collect::<Vec<_>>()[1..8].join(",");
    text.lines().skip(1).map(row).collect()
}

fn pool(recorder: &Arc<Recorder>) -> PinnedPool {
    let mut config = PinnedConfig::default();
    config.recorder = Some(recorder.clone());
    config.chunk = 4 * support::MIB;
    PinnedPool::new(&support::host(), &Budget::new("pinned", 64 << 20), config).unwrap()
}

#[test]
fn a_block_resized_in_place_is_recorded_as_another_block() {
    let path = file("resized");
    let recorder = Arc::new(Recorder::new(Arc::new(TraceFile::create(&path).unwrap())));
    let pool = pool(&recorder);
    let (old, new) =
        (Layout::from_size_align(3000, 16).unwrap(), Layout::from_size_align(2900, 16).unwrap());
    let block = pool.allocate(old).unwrap().cast();
    // SAFETY: 1. the block belongs to this allocator and has that layout, and the new one is
    // smaller.
    let block = unsafe { pool.allocator().shrink(block, old, new) }.unwrap().cast();
    assert_eq!(pool.stats().memory.requested, 2900);
    // SAFETY: 1. the block belongs to this allocator and has that layout. It is not used again.
    unsafe { pool.allocator().deallocate(block, new) };
    let told = rows(&path);
    fs::remove_file(path).unwrap();
    let blocks: Vec<_> =
        told.iter().filter(|row| !row.starts_with(['l', 'g', 's'])).cloned().collect();
    let expected = ["a,1,3000", "f,1,3000", "c,1,3000", "a,2,2900", "f,2,2900", "c,2,2900"];
    assert_eq!(blocks, expected.map(|row| format!("{row},0,pinned,host,")));
}

#[test]
fn a_child_of_a_fork_records_nothing_and_waits_for_no_thread_of_its_parent() {
    let path = file("forked");
    let recorder = Arc::new(Recorder::new(Arc::new(TraceFile::create(&path).unwrap())));
    let pool = pool(&recorder);
    let record = |address| {
        let event =
            recorder.event(Action::Allocate, MemoryLocation::Host(None), 0, address, 7, Tag::NONE);
        recorder.record(recorder.ticket(), event);
    };
    let kept = pool.buffer::<u8>(100).unwrap();
    // A thread that has begun to record does not continue in the child.
    let begun = recorder.ticket();
    // SAFETY: 1. the child uses memory and files, which the C library prepares for it, and leaves
    // by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
        unsafe { libc::alarm(120) };
        record(0x1000);
        // The parent's memory does not exist here, nor does its lifetime.
        drop(kept);
        // SAFETY: 1. ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: 1. the child belongs to this process, and the status is a local.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "exit code {}, signal {}", status >> 8, status & 127);
    recorder.record(
        begun,
        recorder.event(Action::Fail, MemoryLocation::Host(None), 0, 0, 9, Tag::NONE),
    );
    drop((kept, pool));
    let told = rows(&path);
    fs::remove_file(path).unwrap();
    let ends =
        ["a,1,100", "x,0,9", "f,1,100", "c,1,100"].map(|row| format!("{row},0,pinned,host,"));
    assert!(ends.iter().all(|row| told.contains(row)), "{told:?}");
    assert!(!told.iter().any(|row| row.contains(",7,0,")), "an event of the child: {told:?}");
}
