//! The steps that make a region, each with its fall-back and its way back.

use super::{
    Host, LARGEST, Pinning, Reach, Region, RegionRequest, Verify,
    backing::{Backing, DriverBlock, retry_stranded},
    mapping::{Mapping, Populated},
    report::{Cause, PageTier, PinnedBy, PlacedBy, Placement, RegionError, RegionReport, Shortfall, Step},
    window::GRANULE,
};
use crate::{
    kernel::{Advice, Span},
    topology::NodeId,
    workers::{Job, JobError, RunError},
};
use aquifer_core::{Budget, Charge, SystemError};
use aquifer_driver::Relaxed;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Instant,
};

/// A region on its way.
struct Making<'a> {
    host: &'a Host,
    request: &'a RegionRequest,
    bytes: usize,
    page: usize,
    /// Where the pages should be, and the workers that touch them.
    node: Option<NodeId>,
    crew: Option<NodeId>,
    /// No worker on the node was to be had: the pages were touched from wherever this thread, or an unbound worker, runs.
    by_hand: bool,
    shortfalls: Vec<Shortfall>,
}

/// A way that did not lead to a region. Without the charge there is no other way to go: a worker or the driver holds
/// the memory still, and gives it back with the charge.
struct Failed {
    charge: Option<Charge>,
    step: Step,
    cause: Cause,
}

/// A way that did.
struct Made {
    backing: Backing,
    span: Span,
    pages: PageTier,
    placed_by: PlacedBy,
}

pub(super) fn region(host: &Host, budget: &Budget, request: &RegionRequest) -> Result<Region, RegionError> {
    retry_stranded();
    let mut making = Making::prepare(host, request)?;
    let charge = budget
        .charge(making.bytes as u64)
        .map_err(|refused| RegionError::new(Step::Charge, Cause::Budget(refused)))?;
    let made = match making.ways(charge) {
        Ok(made) => made,
        Err(failed) => return Err(making.error(failed.step, failed.cause)),
    };
    let placement = making.verify(&made);
    if making.is_strict() {
        let (elsewhere, unknown) = (placement.elsewhere(), placement.unknown);
        if elsewhere + unknown > 0 || placement.on_node() == 0 {
            // The backing goes its way back when it is dropped.
            return Err(making.error(Step::Verify, Cause::Misplaced { elsewhere, unknown }));
        }
    }
    let pinned_by = match (&made.pages, made.backing.registrations().len()) {
        (PageTier::DriverChosen, _) => PinnedBy::Driver,
        (_, 0) => PinnedBy::Nobody,
        (_, parts) => PinnedBy::Registration(parts),
    };
    let report = RegionReport {
        bytes: making.bytes as u64,
        pages: made.pages,
        pinned_by,
        placement,
        shortfalls: making.shortfalls,
    };
    Ok(Region { backing: made.backing, span: made.span, report })
}

impl<'a> Making<'a> {
    fn prepare(host: &'a Host, request: &'a RegionRequest) -> Result<Self, RegionError> {
        let page = host.topology.page_size().value.and_then(|n| usize::try_from(n).ok()).unwrap_or(4096);
        if request.bytes == 0 || request.bytes > LARGEST {
            return Err(RegionError::new(Step::Request, Cause::Size { bytes: request.bytes, max: LARGEST }));
        }
        let bytes = request.bytes.next_multiple_of(page);
        let mut making = Self {
            host,
            request,
            bytes,
            page,
            node: None,
            crew: None,
            by_hand: false,
            shortfalls: Vec::new(),
        };
        making.settle_node()?;
        Ok(making)
    }

    /// Decides where the pages go and who touches them.
    fn settle_node(&mut self) -> Result<(), RegionError> {
        let Some(node) = self.request.node else { return Ok(()) };
        let topology = &self.host.topology;
        if topology.numa_setting().value == Some(false) {
            self.fell_short(Step::Request, Cause::NumaOff);
            return Ok(());
        }
        if topology.node(node).is_none() {
            return Err(RegionError::new(Step::Request, Cause::UnknownNode(node)));
        }
        self.node = Some(node);
        self.crew = topology.nearest_with_cpus(node).map(|near| near.id);
        if self.crew != Some(node) {
            self.fell_short(Step::Populate, Cause::NoCpus(node));
        }
        Ok(())
    }

    /// A region that is wanted nowhere in particular is on the right node anyway.
    fn is_strict(&self) -> bool {
        self.request.strict && self.request.node.is_some()
    }

    fn fell_short(&mut self, step: Step, cause: Cause) {
        let shortfall = Shortfall { step, cause };
        if !self.shortfalls.contains(&shortfall) {
            self.shortfalls.push(shortfall);
        }
    }

    fn error(&mut self, step: Step, cause: Cause) -> RegionError {
        RegionError { step, cause, before: std::mem::take(&mut self.shortfalls) }
    }

    /// Notes why a way failed, and answers with the charge if there may be another.
    fn next_way(&mut self, failed: Failed) -> Result<Charge, Failed> {
        match failed.charge {
            Some(charge) if failed.cause != Cause::TimedOut => {
                self.fell_short(failed.step, failed.cause);
                Ok(charge)
            }
            charge => Err(Failed { charge, ..failed }),
        }
    }

    /// From the best way to the last that the policy allows.
    fn ways(&mut self, charge: Charge) -> Result<Made, Failed> {
        let reach = match (self.request.pinning, &self.host.reach) {
            (Pinning::Off, _) => return self.mapped(charge, None),
            (_, Some(reach)) => reach.clone(),
            (Pinning::Preferred, None) => {
                self.fell_short(Step::Register, Cause::NoDriver);
                return self.mapped(charge, None);
            }
            (Pinning::Required, None) => {
                return Err(Failed { charge: Some(charge), step: Step::Register, cause: Cause::NoDriver });
            }
        };
        let charge = if self.request.flags.write_combined {
            charge
        } else {
            match self.mapped(charge, Some(reach.clone())) {
                Ok(made) => return Ok(made),
                Err(failed) => self.next_way(failed)?,
            }
        };
        match (self.driver_memory(charge, &reach), self.request.pinning) {
            (Err(failed), Pinning::Preferred) => {
                let charge = self.next_way(failed)?;
                self.mapped(charge, None)
            }
            (answer, _) => answer,
        }
    }

    /// Memory of ours, registered if there is a driver to register it with.
    fn mapped(&mut self, charge: Charge, reach: Option<Reach>) -> Result<Made, Failed> {
        let mut mapping = match Mapping::reserve(&self.host.kernel, self.bytes, charge) {
            Ok(mapping) => mapping,
            Err((charge, e)) => return Err(failed(Some(charge), Step::Address, e)),
        };
        let mut tier = self.best_tier();
        loop {
            match self.with_tier(mapping, tier, reach.clone()) {
                Ok(made) => return Ok(made),
                // The pool of huge pages promised what it cannot keep, or was emptied by somebody else.
                Err((Some(again), step, cause))
                    if tier == PageTier::HugeTlb && step != Step::Register && cause != Cause::TimedOut =>
                {
                    self.fell_short(step, cause);
                    tier = self.tier_below_pool();
                    mapping = again;
                }
                Err((Some(mut mapping), step, cause)) => {
                    return match mapping.end() {
                        Ok(charge) => Err(Failed { charge, step, cause }),
                        // It strands itself, with the charge.
                        Err(e) => Err(failed(None, Step::Map, e)),
                    };
                }
                Err((None, step, cause)) => return Err(Failed { charge: None, step, cause }),
            }
        }
    }

    fn best_tier(&mut self) -> PageTier {
        if self.request.pages < PageTier::HugeTlb {
            return self.tier_below_pool();
        }
        let needed = (self.bytes / GRANULE) as u64;
        if !self.bytes.is_multiple_of(GRANULE) {
            self.fell_short(Step::Pages, Cause::NotHuge);
            return self.tier_below_pool();
        }
        // Asked now: the pool of a node that runs dry is a fault, and pages may come and go.
        let found = self.host.topology.free_huge_pages(self.node, GRANULE as u64);
        let free = found.ok().and_then(|found| found.value);
        if free.is_some_and(|free| free >= needed) {
            return PageTier::HugeTlb;
        }
        self.fell_short(Step::Pages, Cause::HugePages { needed, free });
        self.tier_below_pool()
    }

    fn tier_below_pool(&mut self) -> PageTier {
        if self.request.pages < PageTier::Transparent {
            return PageTier::Base;
        }
        if !self.host.topology.thp().value.is_some_and(|mode| mode.is_offered()) {
            self.fell_short(Step::Pages, Cause::NotOffered);
            return PageTier::Base;
        }
        PageTier::Transparent
    }

    /// Maps, protects, places, populates and registers. On failure the mapping comes back if nobody is at it.
    fn with_tier(
        &mut self,
        mut mapping: Mapping,
        tier: PageTier,
        reach: Option<Reach>,
    ) -> Result<Made, (Option<Mapping>, Step, Cause)> {
        let mut tier = tier;
        if let Err(e) = mapping.map(tier) {
            return Err((Some(mapping), Step::Map, Cause::System(e)));
        }
        // A child that shared pinned pages would make the kernel copy them, and the device would not follow.
        if let Err(e) = mapping.advise(Advice::DontFork) {
            return Err((Some(mapping), Step::Protect, Cause::System(e)));
        }
        // A core dump of gigabytes is a nuisance and not a fault.
        if let Err(e) = mapping.advise(Advice::DontDump) {
            self.fell_short(Step::Protect, Cause::System(e));
        }
        if tier == PageTier::Transparent
            && let Err(e) = mapping.advise(Advice::HugePage)
        {
            self.fell_short(Step::Pages, Cause::System(e));
            tier = PageTier::Base;
        }
        let placed_by = self.place(&mapping);
        let span = mapping.span();
        let mapping = Arc::new(mapping);
        let mut backing = Backing::mapped(mapping.clone(), reach.clone());
        match self.populate_and_register(&mapping, &mut backing, tier, reach.is_some()) {
            Ok(()) if self.by_hand && placed_by == PlacedBy::FirstTouch => {
                Ok(Made { backing, span, pages: tier, placed_by: PlacedBy::Nobody })
            }
            Ok(()) => Ok(Made { backing, span, pages: tier, placed_by }),
            Err((step, cause)) => {
                // Registrations first; a driver that will not end one keeps mapping and charge.
                drop(mapping);
                Err((backing.into_mapping(), step, cause))
            }
        }
    }

    fn place(&mut self, mapping: &Mapping) -> PlacedBy {
        let Some(node) = self.node else { return PlacedBy::Nobody };
        match self.host.kernel.prefer(mapping.span(), node) {
            Ok(()) => PlacedBy::Policy,
            Err(e) => {
                self.fell_short(Step::Policy, Cause::System(e));
                // Whoever touches a page first, a node without memory holds none.
                let can_hold = self.host.topology.node(node).is_some_and(|node| node.memory_allowed);
                if self.crew == Some(node) && can_hold { PlacedBy::FirstTouch } else { PlacedBy::Nobody }
            }
        }
    }

    /// Lets the workers populate, and registers each chunk as soon as it is populated.
    fn populate_and_register(
        &mut self,
        mapping: &Arc<Mapping>,
        backing: &mut Backing,
        tier: PageTier,
        register: bool,
    ) -> Result<(), (Step, Cause)> {
        let whole = |bytes: usize, of: usize| (bytes / of * of).max(of);
        let piece = whole(self.request.piece.min(self.request.registration), GRANULE);
        let chunk = whole(self.request.registration, piece);
        let pieces = self.bytes.div_ceil(piece);
        let mut populating = self.populating(mapping, tier, piece, pieces);
        let mut offset = 0;
        while offset < self.bytes {
            let len = chunk.min(self.bytes - offset);
            let (first, end) = (offset / piece, (offset + len).div_ceil(piece));
            match populating.done(first, end, self.request.deadline) {
                Ok(false) => {}
                Ok(true) => self.fell_short(Step::Populate, Cause::Touched),
                Err(cause) => {
                    populating.stop(&cause);
                    return Err((Step::Populate, cause));
                }
            }
            if register {
                let part = Span { start: mapping.span().start + offset, len };
                if let Err(e) = backing.register(part, self.request.flags) {
                    let cause = Cause::Driver(e);
                    populating.stop(&cause);
                    return Err((Step::Register, cause));
                }
                // Registering holds locks of the driver's: others get a turn between two chunks.
                std::thread::yield_now();
            }
            offset += len;
        }
        Ok(())
    }

    /// Begins populating: by workers, or by this thread where there are none to be had.
    fn populating(
        &mut self,
        mapping: &Arc<Mapping>,
        tier: PageTier,
        piece: usize,
        pieces: usize,
    ) -> Populating {
        // The first failure ends it for all, and all tell it.
        let failed = OnceLock::new();
        let (held, page, deadline) = (mapping.clone(), self.page, self.request.deadline);
        let one = move |number: usize| {
            if let Some(error) = failed.get() {
                return Err(*error);
            }
            held.populate(number * piece, piece, tier, page).map_err(|error| *failed.get_or_init(|| error))
        };
        let one = Arc::new(one);
        let by_worker = one.clone();
        match self.host.workers.submit(self.crew, pieces, deadline, move |number| by_worker(number)) {
            Ok(job) => {
                self.mind_the_crew();
                Populating::ByWorkers(job)
            }
            Err(error) => {
                self.fell_short(Step::Populate, Cause::Workers(error));
                self.by_hand = true;
                Populating::Here(one)
            }
        }
    }

    /// Workers that could not be bound touch pages from anywhere, and place nothing.
    fn mind_the_crew(&mut self) {
        if let Some(error) = self.crew.and_then(|node| self.host.workers.shortfall(node)) {
            self.fell_short(Step::Populate, Cause::Workers(error));
            self.by_hand = true;
        }
    }

    /// Memory that the driver allocates, on a worker of the node, since it lies where that thread runs.
    fn driver_memory(&mut self, charge: Charge, reach: &Reach) -> Result<Made, Failed> {
        let (bytes, flags) = (self.bytes, self.request.flags);
        // What the worker makes answers for itself from the start: if nobody fetches it, it is freed.
        let kept = Arc::new(Mutex::new(Some(charge)));
        let (for_worker, its_reach) = (kept.clone(), reach.clone());
        let allocate = move || {
            let charge = for_worker.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(charge) = charge else { return Err((Step::DriverAlloc, Cause::TimedOut, None)) };
            let _relaxed = Relaxed::enter(&*its_reach.driver);
            let address = match its_reach.driver.host_alloc(its_reach.device, bytes, flags) {
                Ok(address) => address.as_ptr().expose_provenance(),
                Err(e) => return Err((Step::DriverAlloc, Cause::Driver(e), Some(charge))),
            };
            DriverBlock::new(Span { start: address, len: bytes }, its_reach.clone(), charge)
                .map_err(|charge| (Step::DriverAlloc, Cause::Untellable, charge))
        };
        let allocate = Arc::new(allocate);
        let by_worker = allocate.clone();
        let answer = match self.host.workers.run(self.crew, self.request.deadline, move || by_worker()) {
            Ok(answer) => {
                self.mind_the_crew();
                answer
            }
            Err(RunError::NotTaken(error)) => {
                self.fell_short(Step::DriverAlloc, Cause::Workers(error));
                self.by_hand = true;
                allocate()
            }
            Err(RunError::NotDone(error)) => {
                let cause = match error {
                    JobError::TimedOut { .. } => Cause::TimedOut,
                    error => Cause::Job(RunError::NotDone(error)),
                };
                return Err(Failed { charge: None, step: Step::DriverAlloc, cause });
            }
        };
        match answer {
            Ok(block) => {
                let span = block.span();
                let placed_by = if self.node.is_some() && self.crew == self.node && !self.by_hand {
                    PlacedBy::FirstTouch
                } else {
                    PlacedBy::Nobody
                };
                Ok(Made { backing: Backing::driver(block), span, pages: PageTier::DriverChosen, placed_by })
            }
            Err((step, cause, charge)) => Err(Failed { charge, step, cause }),
        }
    }

    /// Asks the kernel where the pages are.
    fn verify(&mut self, made: &Made) -> Placement {
        let mut placement =
            Placement { wanted: self.node, by: made.placed_by, pages: Vec::new(), unknown: 0 };
        let pages = made.span.len.div_ceil(self.page);
        let step = match self.request.verify {
            _ if self.is_strict() => 1,
            Verify::Every => 1,
            Verify::Sample(wanted) => pages.div_ceil(wanted.get()),
            Verify::Skip => return placement,
        };
        // A huge page from the pool is in one place.
        let one = if made.pages == PageTier::HugeTlb { GRANULE / self.page } else { 1 };
        let step = step.next_multiple_of(one);
        let mut counts = BTreeMap::<NodeId, u64>::new();
        let (start, page) = (made.span.start, self.page);
        let mut addresses = (0..pages).step_by(step.max(1)).map(|n| start + n * page);
        loop {
            let batch: Vec<usize> = addresses.by_ref().take(4096).collect();
            if batch.is_empty() {
                break;
            }
            let nodes = self.host.kernel.nodes_of(&batch).unwrap_or_else(|e| {
                self.fell_short(Step::Verify, Cause::System(e));
                vec![-1; batch.len()]
            });
            for node in nodes {
                match u32::try_from(node) {
                    Ok(node) => *counts.entry(NodeId(node)).or_default() += one as u64,
                    Err(_) => placement.unknown += one as u64,
                }
            }
        }
        placement.pages = counts.into_iter().collect();
        placement
    }
}

fn failed(charge: Option<Charge>, step: Step, error: SystemError) -> Failed {
    Failed { charge, step, cause: Cause::System(error) }
}

type Answer = Result<Populated, SystemError>;

/// Populating on its way.
enum Populating {
    ByWorkers(Job<Answer>),
    Here(Arc<dyn Fn(usize) -> Answer>),
}

impl Populating {
    /// Waits for pieces, or does them; says whether any had to be touched.
    fn done(&mut self, first: usize, end: usize, deadline: Option<Instant>) -> Result<bool, Cause> {
        let mut touched = false;
        if let Self::ByWorkers(job) = self {
            job.wait_for(end, deadline).map_err(|error| match error {
                JobError::TimedOut { .. } => Cause::TimedOut,
                error => Cause::Job(RunError::NotDone(error)),
            })?;
        }
        for number in first..end {
            let answer = match self {
                Self::ByWorkers(job) => job.take(number).unwrap_or(Ok(Populated::ByKernel)),
                Self::Here(_) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Err(Cause::TimedOut);
                }
                Self::Here(one) => one(number),
            };
            touched |= answer.map_err(Cause::System)? == Populated::ByTouch;
        }
        Ok(touched)
    }

    /// Stops, and unless time is up waits until no worker is at the memory any more.
    fn stop(self, why: &Cause) {
        match self {
            Self::ByWorkers(job) if *why != Cause::TimedOut => job.settle(),
            _ => {}
        }
    }
}
