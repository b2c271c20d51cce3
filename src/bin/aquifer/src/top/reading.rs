//! One reading of all processes, and what happened in a second, by two of them.

use super::shared::SharedMemories;
use aquifer_benches::console::foreign::printable;
use aquifer_status::{PoolKind, PoolStatus, ProcessStatus, StatusError, StatusFolder};
use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

/// All processes at one moment, or nearly so: each file is read when it is its turn.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) at: Instant,
    /// Nanoseconds since 1970.
    pub(super) taken_ns: u64,
    /// The processes, in the order in which they began to publish.
    pub(super) processes: Vec<ProcessStatus>,
    /// Files that cannot be read, each in one harmless line.
    pub(super) errors: Vec<String>,
    /// The memories that processes share.
    pub(super) shared: SharedMemories,
}

impl Reading {
    /// Reads all files of the folder.
    ///
    /// # Errors
    /// [`StatusError`] if the folder cannot be listed.
    pub(super) fn take(folder: &StatusFolder) -> Result<Self, StatusError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let taken_ns = since.map_or(0, |since| since.as_nanos() as u64);
        let (mut processes, mut errors) = (Vec::new(), Vec::new());
        for process in folder.processes()? {
            match process {
                Ok(process) => processes.push(process),
                Err(error) => errors.push(printable(&error.to_string())),
            }
        }
        processes.sort_by(|a, b| {
            (a.started_ns, a.process, &a.path).cmp(&(b.started_ns, b.process, &b.path))
        });
        errors.sort();
        let shared = SharedMemories::read();
        Ok(Self { at: Instant::now(), taken_ns, processes, errors, shared })
    }
}

/// Events in a second.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct Rates {
    /// How often pools took memory from the driver or the kernel.
    pub(super) growths: f64,
    /// Physical handles moved.
    pub(super) moves: f64,
    /// Waits of streams and of the host.
    pub(super) waits: f64,
}

impl Rates {
    pub(super) fn add(self, other: Self) -> Self {
        Self {
            growths: self.growths + other.growths,
            moves: self.moves + other.moves,
            waits: self.waits + other.waits,
        }
    }
}

/// Which pool this is, in any reading: its description, and its number among equal ones.
type PoolKey<'r> =
    (&'r Path, u64, PoolKind, &'r str, Option<u32>, Option<u32>, Option<&'r str>, u32);

/// The counters of all pools of an earlier reading.
#[derive(Default)]
pub(super) struct EarlierCounts<'r> {
    seconds: f64,
    pools: HashMap<PoolKey<'r>, [u64; 3]>,
}

/// Finds each pool of a reading in an earlier one.
pub(super) struct PoolKeys<'r> {
    path: &'r Path,
    seen: HashMap<PoolKey<'r>, u32>,
}

impl<'r> PoolKeys<'r> {
    pub(super) fn new(path: &'r Path) -> Self {
        Self { path, seen: HashMap::new() }
    }

    fn next(&mut self, pool: &'r PoolStatus) -> PoolKey<'r> {
        let (kind, address) = (pool.kind, pool.address.as_deref());
        let mut key =
            (self.path, pool.opened_ns, kind, &*pool.name, pool.device, pool.node, address, 0);
        let count = self.seen.entry(key).or_insert(0);
        key.7 = *count;
        *count += 1;
        key
    }
}

impl<'r> EarlierCounts<'r> {
    /// Returns the counters of this reading, for one that comes `later`.
    pub(super) fn of(reading: Option<&'r Reading>, later: &Reading) -> Self {
        let Some(reading) = reading else { return Self::default() };
        let passed = later.at.saturating_duration_since(reading.at);
        let mut pools = HashMap::new();
        for process in &reading.processes {
            let mut keys = PoolKeys::new(&process.path);
            for pool in &process.pools {
                pools.insert(keys.next(pool), counts(pool));
            }
        }
        Self { seconds: passed.max(Duration::from_millis(1)).as_secs_f64(), pools }
    }

    /// Returns the rates of a pool, or `None` without an earlier reading of it.
    pub(super) fn rates(&self, keys: &mut PoolKeys<'r>, pool: &'r PoolStatus) -> Option<Rates> {
        let before = self.pools.get(&keys.next(pool))?;
        let now = counts(pool);
        let mut rates = [0.0; 3];
        for ((rate, now), before) in rates.iter_mut().zip(now).zip(before) {
            // A counter that falls is not the counter that it was.
            *rate = now.checked_sub(*before)? as f64 / self.seconds;
        }
        let [growths, moves, waits] = rates;
        Some(Rates { growths, moves, waits })
    }
}

fn counts(pool: &PoolStatus) -> [u64; 3] {
    let stats = &pool.stats;
    [stats.growths, stats.moves, stats.stream_waits.saturating_add(stats.host_waits)]
}
