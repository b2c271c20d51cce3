//! Populating, with concurrent registration of populated memory.
//!
//! ```text
//!   workers   ▕ 0  1  2  3 ▏ 4  5  6  7 ▏ 8  9 10 11 ▏        pieces, in order, each by whoever is free
//!   we                     ▕ register 0 ▏ register 1 ▏ register 2     chunks, one at a time
//! ```

use super::RegionBuilder;
use crate::{
    kernel::Span,
    region::{
        backing::Backing,
        mapping::{Mapping, PopulateMethod},
        report::{Cause, PageTier},
        stall_detector::StallDetector,
        window::GRANULE,
    },
    workers::WorkerError,
};
use aquifer_core::panics::contain;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc::{self, Receiver, Sender},
};

/// Maximum bytes of one registration: the driver refuses 512 GiB. One huge page less is accepted.
const LONGEST_REGISTRATION: usize = (512 << 30) - GRANULE;

/// Returns the bytes of the next registration, with `left` bytes remaining. When the last
/// registration starts, all memory is populated, so it delays everything. If a region takes several
/// registrations, the last ones are therefore halved, down to a quarter of a chunk.
fn next_chunk(left: usize, chunk: usize, piece: usize, others: bool) -> usize {
    if left > chunk {
        chunk
    } else if others && left > chunk / 4 && left / 2 >= piece {
        (left / 2).next_multiple_of(piece)
    } else {
        left
    }
}

fn round_down(bytes: usize, multiple: usize) -> usize {
    (bytes / multiple * multiple).max(multiple)
}

impl RegionBuilder<'_> {
    /// Populates with workers, and registers each chunk as soon as it is populated.
    pub(super) fn populate_and_register(
        &mut self,
        mapping: &Arc<Mapping>,
        backing: &mut Backing,
        tier: PageTier,
        register: bool,
    ) -> Result<(), Cause> {
        let page = tier.page().unwrap_or(GRANULE);
        let piece = round_down(self.request.piece.min(self.request.registration), page);
        let chunk = self.chunk(piece);
        let (task, mut population) = self.start_population(mapping, tier, piece);
        let mut offset = 0;
        while offset < self.bytes {
            let len = next_chunk(self.bytes - offset, chunk, piece, offset > 0);
            let populated = population.wait_for((offset + len).div_ceil(piece), &task);
            let done = populated.and_then(|touched| {
                if touched {
                    self.fell_short(Cause::Touched);
                }
                let part = Span { start: mapping.span().start + offset, len };
                if !register {
                    return Ok(());
                }
                backing.register(part).map_err(Cause::Driver)
            });
            if let Err(cause) = done {
                population.stop(task);
                return Err(cause);
            }
            if register {
                // Registering holds locks of the driver. Other threads may run between two chunks.
                std::thread::yield_now();
            }
            offset += len;
        }
        if let Some(bytes) = task.stall.stalled() {
            self.fell_short(Cause::Stalled { bytes });
        }
        population.stop(task);
        Ok(())
    }

    /// Returns the bytes of one registration: the requested size, within the limit of the driver. A
    /// region of at most that size has one registration, since a block of a pool must not cross from
    /// one to the next.
    fn chunk(&self, piece: usize) -> usize {
        let fit = self.request.registration.min(LONGEST_REGISTRATION);
        if self.bytes <= fit {
            return fit;
        }
        round_down(fit, if fit < piece { GRANULE } else { piece })
    }

    /// Begins populating, with workers, or on this thread if none are available.
    fn start_population(
        &mut self,
        mapping: &Arc<Mapping>,
        tier: PageTier,
        piece: usize,
    ) -> (Arc<Populating>, Population) {
        let (sender, results) = mpsc::channel();
        let pieces = self.bytes.div_ceil(piece);
        let task = Arc::new(Populating {
            mapping: mapping.clone(),
            tier,
            page: self.page,
            piece,
            pieces,
            stall: StallDetector::default(),
            next: AtomicUsize::new(0),
            results: sender,
        });
        let weak = Arc::downgrade(&task);
        let work = move || {
            if let Some(task) = weak.upgrade() {
                while task.populate_next() {}
            }
        };
        let by_caller = match self.host.workers.submit(self.worker_node, pieces, work) {
            Ok(()) => {
                self.check_worker_binding();
                false
            }
            Err(error) => {
                self.fell_short(Cause::Workers(error));
                true
            }
        };
        (task, Population { results, arrived: vec![false; pieces], prefix: 0, by_caller })
    }

    /// Records if workers could not be bound to the node: then first touch does not place pages.
    pub(super) fn check_worker_binding(&mut self) {
        if let Some(error) = self.worker_node.and_then(|node| self.host.workers.shortfall(node)) {
            self.fell_short(Cause::Workers(error));
        }
    }
}

/// What workers share while they populate a region. A worker that begins when the thread that made
/// it has gone finds nothing.
struct Populating {
    mapping: Arc<Mapping>,
    tier: PageTier,
    /// The size of an ordinary page.
    page: usize,
    /// Bytes and number of the pieces.
    piece: usize,
    pieces: usize,
    stall: StallDetector,
    /// The next piece that nobody has begun.
    next: AtomicUsize,
    /// Dropped last: when the channel is closed, nobody uses the mapping.
    results: Sender<PieceResult>,
}

/// A piece, and how it was populated.
type PieceResult = (usize, Result<PopulateMethod, Cause>);

impl Populating {
    /// Populates the next piece. Returns false if none is left, or a piece has failed.
    fn populate_next(&self) -> bool {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.pieces {
            return false;
        }
        let (start, len) = (number * self.piece, self.piece);
        let populated =
            contain(|| self.mapping.populate(start, len, self.tier, self.page, &self.stall));
        let populated = match populated {
            Some(populated) => populated.map_err(Cause::System),
            None => Err(Cause::Workers(WorkerError::Lost)),
        };
        if populated.is_err() {
            self.cancel();
        }
        self.results.send((number, populated)).is_ok()
    }

    /// Makes nobody begin another piece.
    fn cancel(&self) {
        self.next.store(self.pieces, Ordering::Relaxed);
    }
}

/// Populating in progress, as the thread sees it that registers.
struct Population {
    results: Receiver<PieceResult>,
    arrived: Vec<bool>,
    /// Number of pieces before the first one that has not arrived.
    prefix: usize,
    /// Without workers, this thread populates.
    by_caller: bool,
}

impl Population {
    /// Waits for the first `end` pieces, or populates them. Returns whether any page had to be
    /// touched.
    fn wait_for(&mut self, end: usize, task: &Populating) -> Result<bool, Cause> {
        let mut touched = false;
        while self.prefix < end {
            if self.by_caller {
                task.populate_next();
            }
            let (number, method) =
                self.results.recv().map_err(|_| Cause::Workers(WorkerError::Lost))?;
            touched |= method? == PopulateMethod::ByTouch;
            debug_assert!(!self.arrived[number], "piece {number} was populated twice");
            self.arrived[number] = true;
            self.prefix +=
                self.arrived[self.prefix..].iter().take_while(|arrived| **arrived).count();
        }
        Ok(touched)
    }

    /// Stops, and waits until no worker uses the memory any more.
    fn stop(self, task: Arc<Populating>) {
        task.cancel();
        drop(task);
        while self.results.recv().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;

    fn chunks(bytes: usize) -> Vec<usize> {
        let (mut offset, mut chunks) = (0, Vec::new());
        while offset < bytes {
            let len = next_chunk(bytes - offset, GIB, 32 * MIB, offset > 0);
            chunks.push(len);
            offset += len;
        }
        assert_eq!(offset, bytes);
        chunks
    }

    #[test]
    fn small_regions_get_one_registration_and_the_last_of_several_is_short() {
        for bytes in [1, 4096, 100 * MIB, GIB] {
            assert_eq!(chunks(bytes), [bytes]);
        }
        assert_eq!(chunks(2 * GIB), [GIB, 512 * MIB, 256 * MIB, 256 * MIB]);
        assert_eq!(chunks(GIB + 4096), [GIB, 4096]);
        for bytes in (1..40).map(|n| GIB + n * 97 * MIB + 4096) {
            let chunks = chunks(bytes);
            assert!(chunks.iter().all(|&len| len <= GIB));
            assert!(
                chunks[..chunks.len() - 1].iter().all(|&len| len % (32 * MIB) == 0),
                "on pieces: {chunks:?}"
            );
            assert!(*chunks.last().unwrap() <= GIB / 4);
        }
    }
}
