//! What the threads of a contender do.

use super::source::By;
use crate::{
    device::{
        lane::{Lane, crew},
        work::{RandomChoice, WorkPlan},
    },
    lap::{Contender, Lap},
    row::size,
};
use aquifer_core::{Tag, tagged};
use aquifer_global::{RouteId, route};
use std::{
    alloc::GlobalAlloc,
    mem,
    sync::{Mutex, PoisonError},
};

/// The numbers of threads.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// The largest block of the mix, and its limit of live bytes per thread.
const MIX: (u64, u64) = (32 << 10, 4 << 20);
/// Blocks that are handed over at a time.
const HANDED: usize = 64;

/// The job of each thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GlobalJob {
    /// Allocates and frees this many bytes.
    Pairs(u64),
    /// Blocks of random sizes, freed in another order.
    Mix,
    /// Allocates, and frees the blocks of another thread: of this many bytes, or of random sizes
    /// for 0.
    Handed(u64),
}

impl GlobalJob {
    pub(super) fn name(self) -> String {
        match self {
            Self::Pairs(bytes) => size(bytes),
            Self::Mix => "mix".to_owned(),
            Self::Handed(0) => "mix handed".to_owned(),
            Self::Handed(bytes) => format!("{} handed", size(bytes)),
        }
    }

    /// Returns the numbers of threads it runs with.
    pub(super) fn threads(self) -> impl Iterator<Item = usize> {
        let least = if matches!(self, Self::Handed(_)) { 2 } else { 1 };
        THREADS.into_iter().filter(move |&threads| threads >= least)
    }
}

/// The scope that a lap runs in.
#[derive(Clone, Copy)]
pub(super) enum Around {
    Nothing,
    Tag(Tag),
    Scope(RouteId),
    /// A group of `tracking-allocator`.
    #[cfg(feature = "peers")]
    Group,
}

impl Around {
    fn run(self, work: impl FnOnce()) {
        match self {
            Self::Nothing => work(),
            Self::Tag(tag) => tagged(tag, work),
            // No block reaches this limit.
            Self::Scope(to) => route(to, 1 << 40, work),
            #[cfg(feature = "peers")]
            Self::Group => super::tracking::grouped(work),
        }
    }
}

/// The work of the threads, generated before it is timed.
pub(super) struct Plan {
    job: GlobalJob,
    threads: usize,
    /// One work per thread, for the mix.
    works: Vec<WorkPlan>,
    /// Sizes of the blocks that are handed over at a time.
    batch: Vec<u64>,
}

impl Plan {
    pub(super) fn new(job: GlobalJob, threads: usize) -> Self {
        let works = match job {
            GlobalJob::Mix => {
                (0..threads as u64).map(|n| WorkPlan::random_within(MIX.0, n, MIX.1)).collect()
            }
            _ => Vec::new(),
        };
        let mut numbers = RandomChoice::new(1);
        let batch = match job {
            GlobalJob::Handed(0) => (0..HANDED).map(|_| 1 + numbers.below(MIX.0)).collect(),
            GlobalJob::Handed(bytes) => vec![bytes; HANDED],
            _ => Vec::new(),
        };
        Self { job, threads, works, batch }
    }

    /// Returns a contender that uses an allocator in all threads. A piece is a pair, a work, or a
    /// batch.
    pub(super) fn contender<'a, A: GlobalAlloc + Sync>(
        &'a self,
        allocator: &'static A,
        around: Around,
    ) -> Contender<'a> {
        let mut lanes: Vec<_> = (0..self.threads).map(|_| Lane::new(By(allocator))).collect();
        match self.job {
            GlobalJob::Pairs(bytes) => Box::new(move |pairs| {
                crew(&mut lanes, pairs, |_, lane| around.run(|| lane.pairs(bytes, pairs)))
            }),
            GlobalJob::Mix => {
                let pairs = self.works.first().map_or(1, |work| work.operations.len() as u64 / 2);
                Box::new(move |times| {
                    crew(&mut lanes, pairs * times, |number, lane| {
                        around.run(|| lane.play(&self.works[number], times));
                    })
                })
            }
            GlobalJob::Handed(_) => Box::new(move |times| self.hand_on(&mut lanes, times, around)),
        }
    }

    /// Each thread allocates a batch, hands it to the next thread, and frees the batch it received.
    fn hand_on<A: GlobalAlloc + Sync>(
        &self,
        lanes: &mut [Lane<By<A>>],
        times: u64,
        around: Around,
    ) -> Lap {
        let boxes: Vec<_> =
            lanes.iter().map(|_| Mutex::new(Vec::with_capacity(4 * HANDED))).collect();
        let open = |number: usize| boxes[number].lock().unwrap_or_else(PoisonError::into_inner);
        let lap = crew(lanes, times * HANDED as u64, |number, lane| {
            let next = (number + 1) % boxes.len();
            let mut handed = Vec::with_capacity(4 * HANDED);
            let mut fresh = Vec::with_capacity(HANDED);
            around.run(|| {
                for _ in 0..times {
                    fresh.extend(self.batch.iter().filter_map(|&bytes| lane.take(bytes)));
                    open(next).append(&mut fresh);
                    mem::swap(&mut handed, &mut *open(number));
                    handed.drain(..).for_each(|held| lane.give(held));
                }
            });
        });
        // The batches handed over last.
        if let Some(lane) = lanes.first_mut() {
            boxes
                .iter()
                .enumerate()
                .for_each(|(number, _)| open(number).drain(..).for_each(|held| lane.give(held)));
        }
        lap
    }
}
