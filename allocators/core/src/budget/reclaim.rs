//! Reclaim under pressure: the registry of memory holders, and the search that reclaims from them.
//!
//! Pools and programs register with the budget that their memory is charged to. When room is needed
//! below a node, each reclaimer registered there reports how much it can release and at what cost.
//! The search then reclaims from one after another, the cheapest first and those that wait last,
//! until the bytes fit or the deadline has passed.
//!
//! - No lock is held during a reclaim.
//! - A reclaimer is never run by two threads at once. The searching pool's own one is skipped.
//! - A reclaimer's report is not trusted: the gain is the measured drop of the budget's `used`.
//! - The cheapest reclaimer is the one that releases the missing bytes for the least. Of an offer
//!   that is larger than needed, only that part is counted.
//!
//! # Progress
//! 1. *No deadlock.* A reclaimer is marked while it runs, and other threads wait for it up to their
//!    deadline. A thread inside a [`Reclaim::reclaim`] skips marked reclaimers and waits for none,
//!    so there is no cycle of waits.
//! 2. *No livelock.* A reclaimer is called again only if its offer has changed, or if it may wait
//!    now and could not before. One search makes at most [`MAX_CALLS`] calls. So each search ends,
//!    whatever other threads take in the meantime.
//! 3. A charge is granted as a whole or not at all. Two searches for the same bytes cannot end with
//!    one half each: one of them gets all.

use super::{
    hooks::{Offer, Reclaim, Reclaimer, Tried},
    node::{Budget, Node},
    refusal::{OutOfBudget, Raise},
};
use crate::{
    ids::MemoryLocation,
    sync::atomic::{
        AtomicBool,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
};
use std::{
    cell::Cell,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

/// The most calls of one search.
const MAX_CALLS: u32 = 1024;

/// The pauses between polls of a reclaimer that another thread is running.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

thread_local! {
    /// Whether this thread is inside a reclaimer.
    static IN_RECLAIMER: Cell<bool> = const { Cell::new(false) };
}

/// The result of a search for room: what was tried and what is still missing.
///
/// See the example of [`Reclaim`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Room {
    /// Bytes that still do not fit, or 0 if there is room.
    pub missing: u64,
    /// The reclaimers called, in order, and the drop of `used` at each.
    pub tried: Vec<Tried>,
}

/// A registered reclaimer, removed when this is dropped. Another thread may still be running it at
/// that time.
///
/// See the example of [`Budget::on_need`](super::Budget::on_need).
#[must_use = "a registration that is dropped at once removes what it has registered"]
pub struct HookRegistration {
    pub(super) budget: Budget,
    pub(super) number: u64,
}

impl std::fmt::Debug for HookRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("budget", &self.budget.name()).finish_non_exhaustive()
    }
}

impl HookRegistration {
    /// Returns whether this is the reclaimer with this number at `node`.
    pub(super) fn is(&self, node: &Node, number: u64) -> bool {
        self.number == number && std::ptr::eq(self.budget.node, node)
    }
}

impl Drop for HookRegistration {
    fn drop(&mut self) {
        self.budget.node.reclaimers.remove(self.number);
    }
}

impl Budget {
    /// Registers a reclaimer of memory charged here or below. It stays registered until the
    /// registration or the last other reference to it is dropped.
    ///
    /// ```
    /// use aquifer::{Budget, budget::{Charge, Offer, Reclaim}};
    /// use std::{sync::{Arc, Mutex}, time::{Duration, Instant}};
    /// struct Cache(Mutex<Vec<Charge>>);
    /// impl Reclaim for Cache {
    ///     fn name(&self) -> &'static str { "a cache" }
    ///     fn offer(&self) -> Offer { Offer { bytes: 60, cost: Duration::ZERO } }
    ///     fn reclaim(&self, _: u64, _: Option<Instant>) { self.0.lock().unwrap().clear() }
    /// }
    /// let budget = Budget::new("device 0", 100);
    /// let cache = Arc::new(Cache(Mutex::new(vec![budget.charge(60)?])));
    /// let _registration = budget.on_need(&cache);
    /// assert!(budget.charge(80).is_err());
    /// assert_eq!(budget.make_room(80, None, None).missing, 0);
    /// assert!(budget.charge(80).is_ok());
    /// # Ok::<(), aquifer::OutOfBudget>(())
    /// ```
    pub fn on_need<R: Reclaim + 'static>(&self, holder: &Arc<R>) -> HookRegistration {
        let holder: Weak<R> = Arc::downgrade(holder);
        let number =
            self.node.reclaimers.add(Arc::new(Reclaimer { holder, busy: AtomicBool::new(false) }));
        HookRegistration { budget: self.clone(), number }
    }

    /// Reclaims until a charge of `bytes` would fit, no reclaimer is left, or `deadline` has
    /// passed. If a node refuses, the reclaimers of that node and below it are called. `except` is
    /// skipped.
    ///
    /// Charges nothing: waiters are served first. Blocks while the reclaimers run.
    pub fn make_room(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&HookRegistration>,
    ) -> Room {
        self.search(deadline, except, &|_| true, || self.node.missing(bytes))
    }

    /// Reclaims `bytes` from the reclaimers here and below, although no budget refuses. `missing`
    /// of the result is how much less `used` has dropped here. `except` is skipped.
    ///
    /// For needs that no budget sees: a refused driver call, a co-located process, a machine under
    /// memory pressure. Blocks while the reclaimers run.
    pub fn reclaim(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&HookRegistration>,
    ) -> Room {
        self.reclaim_of(bytes, deadline, except, &|_| true)
    }

    /// Like [`Budget::reclaim`], restricted to reclaimers whose [place](Reclaim::place) satisfies
    /// `eligible` or is `None`.
    pub fn reclaim_of(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&HookRegistration>,
        eligible: &dyn Fn(MemoryLocation) -> bool,
    ) -> Room {
        self.node.recall();
        let before = self.used();
        self.search(deadline, except, eligible, || {
            let missing = bytes.saturating_sub(before.saturating_sub(self.used()));
            (missing > 0).then_some((self.node, missing))
        })
    }

    /// Lowers the limit and reclaims the excess. `missing` of the result is the excess that
    /// remains. Charges are refused from the start.
    pub fn shrink(&self, limit: u64, deadline: Option<Instant>) -> Room {
        self.set_limit(limit);
        let mut room = self.make_room(0, deadline, None);
        room.missing = self.used().saturating_sub(limit);
        room
    }

    /// Creates a search that calls one reclaimer at a time, so that a pool can check in between
    /// whether it has what it needs. `except` is skipped.
    #[must_use]
    #[doc(hidden)]
    pub fn asking<'a>(&'a self, except: Option<&'a HookRegistration>) -> Asking<'a> {
        Asking { budget: self, except, calls: Vec::new(), calls_left: MAX_CALLS }
    }

    /// Returns the error with which [`Budget::charge`] would refuse `bytes` now, or `None` if it
    /// would succeed. Never blocks.
    #[must_use]
    pub fn refusal(&self, bytes: u64) -> Option<OutOfBudget> {
        let admit = || {
            let _guard = self.node.tree.lock.lock();
            self.node
                .admit(bytes, self.node.priority.load(Relaxed))
                .err()
                .map(|(_, refusal)| refusal)
        };
        let mut refused = admit();
        // Any charge may use the spare bytes of leases.
        if refused.is_some() && self.node.recall_all() > 0 {
            refused = admit();
        }
        refused.or_else(|| self.node.refusal_of_source(bytes))
    }

    /// Returns how many bytes charged here have to be released before a charge of `bytes` fits here
    /// and in every ancestor, or 0 if it fits now. This includes use beyond a lowered limit. Never
    /// blocks.
    ///
    /// ```
    /// use aquifer::Budget;
    /// let budget = Budget::new("device 0", 64);
    /// let _held = budget.charge(40)?;
    /// assert_eq!((budget.shortfall(24), budget.shortfall(26)), (0, 2));
    /// budget.set_limit(24);
    /// assert_eq!((budget.remaining(), budget.shortfall(2)), (0, 18));
    /// # Ok::<(), aquifer::OutOfBudget>(())
    /// ```
    #[must_use]
    pub fn shortfall(&self, bytes: u64) -> u64 {
        let shortfall = || {
            let _guard = self.node.tree.lock.lock();
            self.node.shortfall(bytes, self.node.priority.load(Relaxed))
        };
        let missing = shortfall();
        // Any charge may use the spare bytes of leases.
        let missing = if missing > 0 && self.node.recall_all() > 0 { shortfall() } else { missing };
        let source = self.node.tree.source();
        missing.max(source.map_or(0, |source| source.shortfall(bytes)))
    }

    /// Returns the limits, of this budget and its ancestors, that are too low for a charge of
    /// `bytes` if `spared` bytes charged here are released first. The result is empty if the charge
    /// fits. With all of them raised it fits, unless waiters are ahead of it. Never blocks.
    ///
    /// See the example of [`Raise`].
    #[must_use]
    pub fn raises(&self, bytes: u64, spared: u64) -> Vec<Raise> {
        // Any charge may use the spare bytes of leases.
        self.node.recall_all();
        // Not under the tree's lock, since this allocates. Each figure is read on its own.
        self.node.raises(bytes, spared)
    }

    /// Returns the sum of what the reclaimers here and below offer without waiting. `except` is
    /// skipped.
    #[must_use]
    #[doc(hidden)]
    pub fn offered(&self, except: Option<&HookRegistration>) -> u64 {
        let mut sum = 0_u64;
        self.node.visit_subtree(&mut |at| {
            let all = at.reclaimers.snapshot();
            for (number, reclaimer) in all.iter().flat_map(|all| all.iter()) {
                let excepted = except.is_some_and(|except| except.is(at, *number));
                let Some(holder) = reclaimer.holder.upgrade().filter(|_| !excepted) else {
                    continue;
                };
                let offer = || if holder.waits() { 0 } else { holder.offer().bytes };
                sum = sum.saturating_add(at.reclaimers.call(offer).unwrap_or(0));
            }
        });
        sum
    }

    /// Returns the root of the tree, which may be this budget.
    #[must_use]
    pub fn root(&self) -> Budget {
        self.node.ancestors.last().map_or_else(|| self.clone(), |root| root.new_handle())
    }

    /// Returns how often a reclaimer of this budget has panicked.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.node.reclaimers.panics()
    }

    /// Reclaims until `missing` returns `None`.
    fn search(
        &self,
        deadline: Option<Instant>,
        except: Option<&HookRegistration>,
        eligible: &dyn Fn(MemoryLocation) -> bool,
        missing: impl Fn() -> Option<(&'static Node, u64)>,
    ) -> Room {
        let mut room = Room::default();
        let mut asking = self.asking(except);
        while let Some((node, missing)) = missing() {
            room.missing = missing;
            if has_passed(deadline) {
                return room;
            }
            let Some(tried) = asking.reclaim_next(node, missing, deadline, eligible) else {
                return room;
            };
            match room.tried.iter_mut().find(|earlier| earlier.step == tried.step) {
                Some(earlier) => earlier.gave += tried.gave,
                None => room.tried.push(tried),
            }
        }
        room.missing = 0;
        room
    }
}

/// A search that reclaims from one reclaimer at a time, the cheapest first. The caller checks for
/// success in between.
///
/// ```
/// use aquifer::{Budget, budget::{Charge, Offer, Reclaim}};
/// use std::{sync::{Arc, Mutex}, time::{Duration, Instant}};
/// struct Cache(Mutex<Vec<Charge>>);
/// impl Reclaim for Cache {
///     fn name(&self) -> &'static str { "a cache" }
///     fn offer(&self) -> Offer { Offer { bytes: 60, cost: Duration::ZERO } }
///     fn reclaim(&self, _: u64, _: Option<Instant>) { self.0.lock().unwrap().clear() }
/// }
/// let budget = Budget::new("device 0", 100);
/// let cache = Arc::new(Cache(Mutex::new(vec![budget.charge(60)?])));
/// let _registration = budget.on_need(&cache);
/// let mut asking = budget.asking(None);
/// let charge = loop {
///     match budget.charge(80) {
///         Err(refused) if asking.for_charge(80, None).is_none() => break Err(refused),
///         Err(_) => {}
///         granted => break granted,
///     }
/// };
/// assert_eq!(charge?.bytes(), 80);
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
pub struct Asking<'a> {
    budget: &'a Budget,
    except: Option<&'a HookRegistration>,
    calls: Vec<CallRecord>,
    /// The number of calls that are left.
    calls_left: u32,
}

/// A reclaimer that this search has called.
struct CallRecord {
    reclaimer: Arc<Reclaimer>,
    /// Its offer has decreased, so another call may release more.
    offer_shrank: bool,
    /// Its offer after the call.
    offer_after: u64,
    /// It was called after the deadline, when it could not wait.
    past_deadline: bool,
}

/// The result of one pass over the reclaimers.
#[derive(Default)]
struct Candidates {
    /// The cheapest candidate.
    best: Option<Candidate>,
    /// A reclaimer that another thread is running.
    busy: Option<(&'static Node, Arc<Reclaimer>, Arc<dyn Reclaim>)>,
}

struct Candidate {
    /// Whether it waits, then its cost.
    rank: (bool, u128),
    offer: Offer,
    at: &'static Node,
    reclaimer: Arc<Reclaimer>,
    holder: Arc<dyn Reclaim>,
}

impl Asking<'_> {
    /// Calls the next reclaimer for what a charge of `bytes` lacks. If a node refuses the charge,
    /// the candidates are the reclaimers of that node and below it. Otherwise they are those of
    /// this budget and below it, and the request is for all of `bytes`.
    ///
    /// Returns `None` if no candidate is left, or if the charge could not be granted even with
    /// everything released. After `deadline`, reclaimers that wait are skipped.
    pub fn for_charge(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        let unsatisfiable = {
            let _guard = self.budget.node.tree.lock.lock();
            self.budget.node.unsatisfiable(bytes).is_some()
        };
        if unsatisfiable {
            return None;
        }
        let (node, missing) = self.budget.node.missing(bytes).unwrap_or((self.budget.node, bytes));
        self.reclaim_next(node, missing, deadline, &|_| true)
    }

    /// Tells the source of the root's capacity that a driver has refused `bytes`.
    pub fn refused_by_driver(&self, bytes: u64) {
        if let Some(source) = self.budget.node.tree.source() {
            source.refused_by_driver(bytes);
        }
    }

    /// Calls the next reclaimer for `bytes` of memory, whatever the budgets say. The candidates are
    /// those of the whole tree whose place satisfies `eligible` or is `None`. Returns `None` if no
    /// candidate is left. The deadline works as in [`Asking::for_charge`].
    pub fn for_memory(
        &mut self,
        bytes: u64,
        deadline: Option<Instant>,
        eligible: &dyn Fn(MemoryLocation) -> bool,
    ) -> Option<Tried> {
        let node = self.budget.node;
        self.reclaim_next(node.ancestors.last().copied().unwrap_or(node), bytes, deadline, eligible)
    }

    fn reclaim_next(
        &mut self,
        node: &'static Node,
        missing: u64,
        deadline: Option<Instant>,
        eligible: &dyn Fn(MemoryLocation) -> bool,
    ) -> Option<Tried> {
        loop {
            self.calls_left = self.calls_left.checked_sub(1)?;
            let before = node.used.load(Relaxed);
            let past_deadline = has_passed(deadline);
            let Candidates { best, busy } =
                self.find_candidates(node, missing, past_deadline, eligible);
            let (at, holder) = match (best, busy) {
                (Some(best), _) => {
                    let Candidate { offer, at, reclaimer, holder, .. } = best;
                    if reclaimer.busy.swap(true, AcqRel) {
                        // Another thread was faster. It is waited for only if there is no other
                        // candidate.
                        continue;
                    }
                    let was_inside = IN_RECLAIMER.replace(true);
                    at.reclaimers.call(|| holder.reclaim(missing, deadline));
                    IN_RECLAIMER.set(was_inside);
                    let offer_after =
                        at.reclaimers.call(|| holder.offer()).unwrap_or_default().bytes;
                    reclaimer.busy.store(false, Release);
                    let call = CallRecord {
                        reclaimer,
                        offer_shrank: offer_after < offer.bytes,
                        offer_after,
                        past_deadline,
                    };
                    match self
                        .calls
                        .iter_mut()
                        .find(|other| Arc::ptr_eq(&other.reclaimer, &call.reclaimer))
                    {
                        Some(other) => *other = call,
                        None => self.calls.push(call),
                    }
                    (at, holder)
                }
                (None, Some((at, reclaimer, holder))) if !IN_RECLAIMER.get() => {
                    if !reclaimer.wait(deadline) {
                        return None;
                    }
                    (at, holder)
                }
                _ => return None,
            };
            let gave = before.saturating_sub(node.used.load(Relaxed));
            // `name` is foreign code too, and may panic.
            let step = at.reclaimers.call(|| holder.name()).unwrap_or("a reclaimer that panicked");
            return Some(Tried { step, gave });
        }
    }

    /// Finds the cheapest candidate at this node or below.
    fn find_candidates(
        &self,
        node: &'static Node,
        missing: u64,
        past_deadline: bool,
        eligible: &dyn Fn(MemoryLocation) -> bool,
    ) -> Candidates {
        let mut candidates = Candidates::default();
        node.visit_subtree(&mut |at| {
            let all = at.reclaimers.snapshot();
            for (number, reclaimer) in all.iter().flat_map(|all| all.iter()) {
                let excepted = self.except.is_some_and(|except| except.is(at, *number));
                let Some(holder) = reclaimer.holder.upgrade().filter(|_| !excepted) else {
                    continue;
                };
                let query = || {
                    let waits = holder.waits();
                    (holder.place().is_none_or(eligible) && !(waits && past_deadline))
                        .then(|| (waits, holder.offer()))
                };
                let Some((waits, offer)) = at.reclaimers.call(query).flatten() else { continue };
                let earlier =
                    self.calls.iter().find(|call| Arc::ptr_eq(&call.reclaimer, reclaimer));
                let worth_calling = earlier.is_none_or(|call| {
                    call.offer_shrank
                        || call.offer_after != offer.bytes
                        || (call.past_deadline && !past_deadline)
                });
                if reclaimer.busy.load(Acquire) {
                    if earlier.is_none() {
                        candidates.busy.get_or_insert_with(|| (at, Arc::clone(reclaimer), holder));
                    }
                    continue;
                }
                let rank = (waits, offer.cost_of(missing));
                if worth_calling
                    && offer.bytes > 0
                    && candidates.best.as_ref().is_none_or(|best| rank < best.rank)
                {
                    let reclaimer = Arc::clone(reclaimer);
                    candidates.best = Some(Candidate { rank, offer, at, reclaimer, holder });
                }
            }
        });
        candidates
    }
}

impl std::fmt::Debug for Asking<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asking").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl Reclaimer {
    /// Waits until no thread is running it. Returns `false` if the deadline passes first.
    fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut pause = SHORTEST_PAUSE;
        while self.busy.load(Acquire) {
            if has_passed(deadline) {
                return false;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        true
    }
}

fn has_passed(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

impl Node {
    /// Returns the first node that refuses a charge of `bytes`, and how many bytes are missing
    /// there.
    fn missing(&'static self, bytes: u64) -> Option<(&'static Node, u64)> {
        self.recall_all();
        let refused = {
            let _guard = self.tree.lock.lock();
            self.admit(bytes, self.priority.load(Relaxed)).err()
        };
        match refused {
            Some((node, refused)) => Some((node, refused.missing())),
            None => {
                let missing = self.tree.source()?.shortfall(bytes);
                (missing > 0).then(|| (self.root(), missing))
            }
        }
    }
}
