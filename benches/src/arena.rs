//! `aquifer bench arena`: arenas, compared with bumpalo, bump-scope and the host's `malloc`.
//!
//! | module | contents |
//! |---|---|
//! | `sides` | the allocators |
//! | `work` | the workloads |
//!
//! - The first chunk of each arena has 4 KiB, and the arena is emptied after each round, so that
//!   after the first rounds all contenders work in one chunk.
//! - All contenders of a workload take turns in one run. bump-scope is one of them with the feature
//!   `peers`.
//! - Pinned memory is allocated as for a program near the device. Without a GPU it is pageable. The
//!   pool is the same.

mod sides;
mod work;

use crate::console::{
    place::{DeviceChoice, Place, Session},
    progress::ProgressLine,
};
use crate::{
    lap::{Contender, Pace, contest},
    report::BenchReport,
    row::Unit,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer_adapters::Arena;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use bumpalo::Bump;
use sides::MallocSide;
#[cfg(feature = "peers")]
use sides::scoped;
use work::{ArenaWork, Return};

const BUMPALO: &str = "bumpalo";
const BUMP_SCOPE: &str = "bump-scope";
const MALLOC: &str = "malloc";

/// Bytes that the pinned pool has ready, more than any row needs.
const READY: usize = 16 << 20;

/// Measures the selected rows. Takes most of a minute.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(
    device: DeviceChoice,
    rows: &RowSelection,
) -> std::result::Result<BenchReport, BenchError> {
    let mut progress = ProgressLine::on_terminal();
    progress.phase("opening the device");
    let place = Place::choose(device).map_err(BenchError::Place)?;
    let pace = Pace::of(rows.quick);
    let Session { driver, device, .. } = place.begin();
    let topology = Topology::read().map_err(|e| BenchError::Device(MemoryError::from(e)))?;
    let host = Host::new(topology, Kernel::new());
    let host = match &place {
        Place::Sim(_) => host,
        Place::Cuda { .. } => host.with_driver(driver.clone(), device),
    };
    let groups = [
        RowGroup { names: work_names, measure: works },
        RowGroup { names: return_names, measure: returns },
    ];
    let mut bench = ArenaBench { pace, host, sheet: Sheet::new(rows.only.as_deref()) };
    measure(&mut bench, |bench| &mut bench.sheet, &groups, &mut progress)?;
    let mut sheet = bench.sheet;
    // Groups rows by peer. The rows of a peer keep the order in which they were measured.
    sheet.rows.sort_by_key(|row| {
        let peer = row.peer.as_ref().map(|peer| peer.name.as_str());
        FOR_WORK.iter().position(|name| Some(*name) == peer)
    });
    sheet.report("arena", &place, rows.quick)
}

/// The state of a benchmark.
struct ArenaBench {
    pace: Pace,
    host: Host,
    sheet: Sheet,
}

impl ArenaBench {
    fn pool(&self) -> Result<PinnedPool> {
        let pool =
            PinnedPool::new(&self.host, &Budget::unlimited("bench"), PinnedConfig::default())?;
        pool.warm(READY)?;
        Ok(pool)
    }

    /// Lets contenders take turns: the arena over process memory, the arena over pinned memory, and
    /// the peers. A peer has no contender if this program was built without it.
    fn compare<'c, const N: usize>(
        &mut self,
        name: &str,
        own: [Contender<'c>; 2],
        peers: [(&'static str, Option<Contender<'c>>); N],
    ) {
        let rows = names(name, &peers.each_ref().map(|(peer, _)| *peer));
        let mut contenders = Vec::from(own);
        let peers = peers.map(|(peer, contender)| {
            let is_built = contender.is_some();
            contenders.extend(contender);
            (peer, is_built)
        });
        let mut ns = contest(self.pace, contenders).into_iter().map(|outcome| outcome.each);
        let (Some(ours), Some(pinned)) = (ns.next(), ns.next()) else { return };
        let others = peers.map(|(peer, is_built)| (peer, if is_built { ns.next() } else { None }));
        for (at, (row, (peer, other))) in
            rows.iter().zip(repeat_first(others.into_iter())).enumerate()
        {
            let own = if at == 1 { pinned } else { ours };
            let peer = other.map(|other| (peer, other));
            if peer.is_none() {
                self.sheet.lack_peers([row]);
            }
            // The rows beside the first peer are also those of the arena by itself.
            if peer.is_some() || at < 2 {
                self.sheet.add(row, Unit::NsPerOperation, own, peer);
            }
        }
    }

    fn wants(&self, name: &str, peers: &[&str]) -> bool {
        names(name, peers).iter().any(|row| self.sheet.wants(row))
    }
}

/// Returns the rows of a workload: over both kinds of memory for the first peer, and over process
/// memory for the others.
fn names(name: &str, peers: &[&str]) -> Vec<String> {
    let others = peers.iter().skip(1).map(|peer| format!("{name}, beside {peer}"));
    [name.to_owned(), format!("{name}, pinned")].into_iter().chain(others).collect()
}

/// Repeats the first element once.
fn repeat_first<T: Copy>(mut all: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
    let first = all.next();
    first.into_iter().chain(first).chain(all)
}

const FOR_WORK: [&str; 3] = [BUMPALO, BUMP_SCOPE, MALLOC];
const FOR_RETURN: [&str; 2] = [BUMP_SCOPE, MALLOC];

fn work_names(_: &ArenaBench) -> Vec<String> {
    ArenaWork::ALL.into_iter().flat_map(|work| names(work.name(), &FOR_WORK)).collect()
}

fn return_names(_: &ArenaBench) -> Vec<String> {
    Return::ALL.into_iter().flat_map(|work| names(work.name(), &FOR_RETURN)).collect()
}

/// The contender of bump-scope for a workload, or `None` if this program was built without it.
macro_rules! on_bump_scope {
    ($work:expr) => {{
        #[cfg(feature = "peers")]
        let contender = Some($work.on(scoped()));
        #[cfg(not(feature = "peers"))]
        let contender = None;
        contender
    }};
}

fn works(bench: &mut ArenaBench) -> Result<()> {
    let pool = bench.pool()?;
    for work in ArenaWork::ALL
        .into_iter()
        .filter(|work| bench.wants(work.name(), &FOR_WORK))
        .collect::<Vec<_>>()
    {
        let own = [work.on(Arena::new()), work.on(Arena::new_in(pool.allocator()))];
        let peers = [
            (BUMPALO, Some(work.on(Bump::new()))),
            (BUMP_SCOPE, on_bump_scope!(work)),
            (MALLOC, Some(work.on(MallocSide::default()))),
        ];
        bench.compare(work.name(), own, peers);
    }
    Ok(())
}

fn returns(bench: &mut ArenaBench) -> Result<()> {
    let pool = bench.pool()?;
    for work in Return::ALL
        .into_iter()
        .filter(|work| bench.wants(work.name(), &FOR_RETURN))
        .collect::<Vec<_>>()
    {
        let own = [work.on(Arena::new()), work.on(Arena::new_in(pool.allocator()))];
        let peers =
            [(BUMP_SCOPE, on_bump_scope!(work)), (MALLOC, Some(work.on(MallocSide::default())))];
        bench.compare(work.name(), own, peers);
    }
    Ok(())
}
