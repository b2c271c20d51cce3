//! Several threads publish one pool while others read it through its file.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_core::PoolStats;
use aquifer_status::{PoolFigures, PoolKind, PoolSlot, SlotDescription, StatusFolder, start};
use std::{
    env, fs,
    os::unix::fs::DirBuilderExt,
    process,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

const WRITERS: usize = 2;
const READERS: usize = 2;
const READINGS: usize = 4000;

/// Returns the figures of one publication. Each of them is its number.
fn figures(number: u64) -> PoolFigures {
    let mut stats = PoolStats::default();
    for figure in [
        &mut stats.live,
        &mut stats.requested,
        &mut stats.cached,
        &mut stats.pending,
        &mut stats.physical,
        &mut stats.graphs,
        &mut stats.peak_requested,
        &mut stats.peak_live,
        &mut stats.peak_physical,
        &mut stats.blocks,
        &mut stats.allocations,
        &mut stats.frees,
        &mut stats.failures,
        &mut stats.growths,
        &mut stats.reaped,
        &mut stats.moves,
        &mut stats.adoptions,
        &mut stats.fences,
        &mut stats.stream_waits,
        &mut stats.host_waits,
    ] {
        *figure = number;
    }
    PoolFigures { stats, limit: Some(number), largest_free: Some(number) }
}

/// Returns the published figures of the only pool of the only process, or `None` if the file had no
/// consistent copy of them.
fn reading(folder: &StatusFolder) -> Option<PoolFigures> {
    let mut processes = folder.processes().unwrap();
    let process = processes.next().unwrap().unwrap();
    assert!(processes.next().is_none() && process.pools.len() + process.faults.len() == 1);
    let pool = process.pools.first()?;
    Some(PoolFigures { stats: pool.stats, limit: pool.limit, largest_free: pool.largest_free })
}

/// One test, since a process publishes once and its environment is its own.
#[test]
fn figures_of_one_publication_stay_together_never_go_back_and_end_with_the_last() {
    let path = env::temp_dir().join(format!("aquifer-publication-{}", process::id()));
    let _absent = fs::remove_dir_all(&path);
    fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
    // SAFETY: 1. The only test of this process, and no other thread reads the environment.
    #[expect(unsafe_code, reason = "sets the folder of this process")]
    unsafe {
        env::set_var("AQUIFER_STATUS", &path);
    }
    start().unwrap();
    let slot = PoolSlot::open(SlotDescription {
        kind: PoolKind::Source,
        name: "published by several threads".to_owned(),
        device: None,
        address: None,
        node: None,
    });
    let (gathered, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let publish = || slot.publish(|| figures(gathered.fetch_add(1, Ordering::Relaxed)));
    publish();
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    publish();
                }
            });
        }
        let read = || {
            let folder = StatusFolder::at(&path).unwrap();
            let mut last = 0;
            for _ in 0..READINGS {
                if let Some(read) = reading(&folder) {
                    let number = read.stats.live;
                    assert_eq!(read, figures(number));
                    assert!(number >= last, "{number} after {last}");
                    last = number;
                }
            }
        };
        let readers: Vec<_> = (0..READERS).map(|_| scope.spawn(read)).collect();
        let ended: Vec<_> = readers.into_iter().map(thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok), "a reader has failed");
    });
    // Without a writer a reader gets what was gathered last.
    let folder = StatusFolder::at(&path).unwrap();
    assert_eq!(reading(&folder), Some(figures(gathered.load(Ordering::Relaxed) - 1)));
    drop(slot);
    aquifer_status::disable();
    fs::remove_dir_all(&path).unwrap();
}
