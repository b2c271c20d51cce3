//! Creation of regions: each step with its fallback and its rollback.
//!
//! | module | contains |
//! |---|---|
//! | `pages` | the choice of pages |
//! | `populate` | populating, with concurrent registration of populated memory |
//! | `verify` | the query of page locations |

mod pages;
mod populate;
mod verify;

use super::{
    Host, Pinning, Reach, Region, RegionRequest,
    backing::{Backing, DriverBlock, end_retired},
    mapping::{Mapping, retry_stranded},
    report::{Cause, LARGEST, PageTier, PinnedBy, RegionError, RegionReport},
};
use crate::{
    kernel::{Advice, Span},
    topology::NodeId,
    workers::WorkerError,
};
use aquifer_core::{Budget, Charge, SystemError};
use aquifer_driver::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

/// A region that is being created.
struct RegionBuilder<'a> {
    host: &'a Host,
    request: &'a RegionRequest,
    bytes: usize,
    page: usize,
    /// The node of the pages, and the node of the workers that touch them.
    node: Option<NodeId>,
    worker_node: Option<NodeId>,
    shortfalls: Vec<Cause>,
}

/// A failed attempt. Without the charge there is no further attempt: a worker or the driver still
/// holds the memory, and releases it together with the charge.
struct AttemptFailure {
    charge: Option<Charge>,
    cause: Cause,
}

/// A successful attempt.
struct BuiltRegion {
    backing: Backing,
    span: Span,
    pages: PageTier,
}

impl Region {
    /// Creates a region. Blocks while its pages are populated and registered.
    ///
    /// # Errors
    /// [`RegionError`] with the failed step and all attempts. Nothing is left behind, except memory
    /// that the error reports as stranded.
    pub fn new(host: &Host, budget: &Budget, request: &RegionRequest) -> Result<Self, RegionError> {
        retry_stranded();
        let mut builder = RegionBuilder::prepare(host, request)?;
        let charge = charge(budget, builder.bytes)?;
        let made = match builder.try_all(charge) {
            Ok(made) => made,
            Err(failed) => return Err(builder.error(failed.cause)),
        };
        let placement = builder.verify(&made);
        let (elsewhere, unknown) = (placement.elsewhere(), placement.unknown);
        if builder.is_strict() && elsewhere + unknown > 0 {
            drop(made);
            return Err(builder.error(Cause::Misplaced { elsewhere, unknown }));
        }
        let pinned_by = match (&made.pages, made.backing.registrations().len()) {
            (PageTier::DriverChosen, _) => PinnedBy::Driver,
            (_, 0) => PinnedBy::Nobody,
            (_, parts) => PinnedBy::Registration(parts),
        };
        let report = RegionReport {
            bytes: builder.bytes as u64,
            pages: made.pages,
            pinned_by,
            placement,
            shortfalls: builder.shortfalls,
        };
        Ok(Self { backing: made.backing, span: made.span, report })
    }
}

/// Charges the budget. If that fails, ends retired regions and tries again.
fn charge(budget: &Budget, bytes: usize) -> Result<Charge, RegionError> {
    let first = match budget.charge(bytes as u64) {
        Err(_) if end_retired() > 0 => budget.charge(bytes as u64),
        answer => answer,
    };
    first.map_err(|refused| RegionError::new(Cause::Budget(refused)))
}

impl<'a> RegionBuilder<'a> {
    fn prepare(host: &'a Host, request: &'a RegionRequest) -> Result<Self, RegionError> {
        let page = host.topology.page_size();
        if request.bytes == 0 || request.bytes > LARGEST {
            return Err(RegionError::new(Cause::Size { bytes: request.bytes, max: LARGEST }));
        }
        let bytes = request.bytes.next_multiple_of(page);
        let mut builder = Self {
            host,
            request,
            bytes,
            page,
            node: None,
            worker_node: None,
            shortfalls: Vec::new(),
        };
        builder.choose_nodes()?;
        Ok(builder)
    }

    /// Chooses the node of the pages and the node of the workers.
    fn choose_nodes(&mut self) -> Result<(), RegionError> {
        let Some(node) = self.request.node else { return Ok(()) };
        let topology = &self.host.topology;
        if topology.is_numa_off() {
            self.fell_short(Cause::NumaOff);
            return Ok(());
        }
        if topology.node(node).is_none() {
            return Err(RegionError::new(Cause::UnknownNode(node)));
        }
        self.node = Some(node);
        self.worker_node = topology.nearest_with_cpus(node).map(|near| near.id);
        if self.worker_node != Some(node) {
            self.fell_short(Cause::NoCpus(node));
        }
        Ok(())
    }

    /// Returns whether placement is strict. Without a requested node, every node is right.
    fn is_strict(&self) -> bool {
        self.request.strict && self.request.node.is_some()
    }

    fn fell_short(&mut self, cause: Cause) {
        if !self.shortfalls.contains(&cause) {
            self.shortfalls.push(cause);
        }
    }

    fn error(&mut self, cause: Cause) -> RegionError {
        RegionError { cause, before: std::mem::take(&mut self.shortfalls) }
    }

    /// Records why an attempt failed. Returns the charge if another attempt is possible.
    fn next_attempt(&mut self, failed: AttemptFailure) -> Result<Charge, AttemptFailure> {
        match failed.charge {
            Some(charge) => {
                self.fell_short(failed.cause);
                Ok(charge)
            }
            None => Err(failed),
        }
    }

    /// Tries all kinds of memory that the policy allows, the best first.
    fn try_all(&mut self, charge: Charge) -> Result<BuiltRegion, AttemptFailure> {
        let reach = match (self.request.pinning, &self.host.reach) {
            (Pinning::Off, _) => return self.mapped(charge, None),
            (_, Some(reach)) => reach.clone(),
            (Pinning::Preferred, None) => {
                self.fell_short(Cause::NoDriver);
                return self.mapped(charge, None);
            }
            (Pinning::Required, None) => {
                return Err(AttemptFailure { charge: Some(charge), cause: Cause::NoDriver });
            }
        };
        let mut charge = charge;
        if self.request.write_combined {
            match self.driver_memory(charge, &reach, true) {
                Ok(made) => return Ok(made),
                Err(failed) => charge = self.next_attempt(failed)?,
            }
            self.fell_short(Cause::Cached);
        }
        let pageable = self.request.pinning == Pinning::Preferred;
        match self.mapped(charge, Some(reach.clone())) {
            Ok(made) => return Ok(made),
            Err(failed) => charge = self.next_attempt(failed)?,
        }
        match self.driver_memory(charge, &reach, false) {
            Ok(made) => return Ok(made),
            Err(failed) if pageable => charge = self.next_attempt(failed)?,
            Err(failed) => return Err(failed),
        }
        self.mapped(charge, None)
    }

    /// Maps memory, and registers it if a driver is given.
    fn mapped(
        &mut self,
        charge: Charge,
        reach: Option<Reach>,
    ) -> Result<BuiltRegion, AttemptFailure> {
        let mut tier = self.best_tier(self.request.pages);
        let mut mapping = match Mapping::reserve(&self.host.kernel, self.bytes, charge) {
            Ok(mapping) => mapping,
            Err((charge, e)) => return Err(failed(Some(charge), e)),
        };
        loop {
            match self.with_tier(mapping, tier, reach.clone()) {
                Ok(made) => return Ok(made),
                // The pool of huge pages had fewer pages than reported, or another process has used
                // them.
                Err((Some(again), cause)) if Self::may_lower_tier(tier, &cause) => {
                    self.fell_short(cause);
                    tier = self.best_tier(tier.below());
                    mapping = again;
                }
                Err((Some(mut mapping), cause)) => {
                    return match mapping.release() {
                        Ok(charge) => Err(AttemptFailure { charge, cause }),
                        // The mapping strands itself, with the charge.
                        Err(e) => Err(failed(None, e)),
                    };
                }
                Err((None, cause)) => return Err(AttemptFailure { charge: None, cause }),
            }
        }
    }

    /// Maps, protects, places, populates and registers. On failure it returns the mapping, unless a
    /// worker still uses it.
    fn with_tier(
        &mut self,
        mut mapping: Mapping,
        tier: PageTier,
        reach: Option<Reach>,
    ) -> Result<BuiltRegion, (Option<Mapping>, Cause)> {
        let mut tier = tier;
        if let Err(e) = mapping.map(tier, self.request.share_on_fork) {
            return Err((Some(mapping), Cause::System(e)));
        }
        // A fork would copy all pinned pages for the child.
        if !self.request.share_on_fork
            && let Err(e) = mapping.advise(Advice::DontFork)
        {
            return Err((Some(mapping), Cause::System(e)));
        }
        // A large core dump is no reason to fail.
        if let Err(e) = mapping.advise(Advice::DontDump) {
            self.fell_short(Cause::System(e));
        }
        if tier == PageTier::Transparent
            && let Err(e) = mapping.advise(Advice::HugePage)
        {
            self.fell_short(Cause::System(e));
            tier = PageTier::Base;
        }
        if let Some(node) = self.node
            && let Err(e) = self.host.kernel.prefer(mapping.span(), node)
        {
            // The workers on the node touch the pages first.
            self.fell_short(Cause::System(e));
        }
        let span = mapping.span();
        let mapping = Arc::new(mapping);
        let mut backing = Backing::mapped(mapping.clone(), reach.clone());
        match self.populate_and_register(&mapping, &mut backing, tier, reach.is_some()) {
            Ok(()) => Ok(BuiltRegion { backing, span, pages: tier }),
            Err(cause) => {
                // Registrations end first. If the driver refuses, mapping and charge are kept.
                drop(mapping);
                Err((backing.into_mapping(), cause))
            }
        }
    }

    /// Allocates memory from the driver on a worker of the node, since the driver places it on the
    /// node of the calling thread.
    fn driver_memory(
        &mut self,
        charge: Charge,
        reach: &Reach,
        write_combined: bool,
    ) -> Result<BuiltRegion, AttemptFailure> {
        let bytes = self.bytes;
        // The worker's result owns its memory, so it is freed even if the result is never fetched.
        let shared_charge = Arc::new(Mutex::new(Some(charge)));
        let (for_worker, worker_reach) = (shared_charge.clone(), reach.clone());
        let allocate = move || {
            let charge = for_worker.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(charge) = charge else {
                return Err((Cause::Workers(WorkerError::Lost), None));
            };
            let _relaxed = Relaxed::enter(&*worker_reach.driver);
            let address = match worker_reach
                .call(|driver, device| driver.host_alloc(device, bytes, write_combined))
            {
                Ok(address) => address.as_ptr().expose_provenance(),
                Err(e) => return Err((Cause::Driver(e), Some(charge))),
            };
            let span = Span { start: address, len: bytes };
            Ok(DriverBlock::new(span, worker_reach.clone(), charge))
        };
        let allocate = Arc::new(allocate);
        let by_worker = allocate.clone();
        let answer = match self.host.workers.run(self.worker_node, move || by_worker()) {
            Ok(answer) => {
                self.check_worker_binding();
                answer
            }
            Err(error @ WorkerError::Lost) => {
                return Err(AttemptFailure { charge: None, cause: Cause::Workers(error) });
            }
            Err(error) => {
                self.fell_short(Cause::Workers(error));
                allocate()
            }
        };
        match answer {
            Ok(block) => {
                let span = block.span();
                Ok(BuiltRegion {
                    backing: Backing::driver(block),
                    span,
                    pages: PageTier::DriverChosen,
                })
            }
            Err((cause, charge)) => Err(AttemptFailure { charge, cause }),
        }
    }
}

fn failed(charge: Option<Charge>, error: SystemError) -> AttemptFailure {
    AttemptFailure { charge, cause: Cause::System(error) }
}
