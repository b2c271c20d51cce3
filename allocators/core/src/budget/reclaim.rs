//! Who can give bytes back, and how they are asked.
//!
//! Pools and programs register with the budget that their memory is charged to. When room is needed
//! below a node, all who are registered there are asked what they have and what it costs; then one
//! after another is asked for it, the cheapest first, until the bytes fit or the deadline has
//! passed. No lock is held meanwhile, nobody is asked twice at once, not the one who asks, and
//! nobody is believed: what counts is what the budget's own count has fallen by.
//!
//! Cheapest is who gives what is missing for the least: of an offer that is larger than that only
//! its part counts.
//!
//! # Why two who ask each other get somewhere
//! 1. *No deadlock.* Whoever is being asked is marked, and is not asked by others meanwhile: they
//!    wait for its answer, up to their deadline. Who waits like that is asked itself by nobody on
//!    that thread: a thread that is inside of somebody's [`Reclaim::reclaim`] passes over marked
//!    ones and waits for none, so there is no circle of those who wait.
//! 2. *No livelock.* One who was asked is asked again only if what it offers has changed, or if it
//!    may wait now and might not before, and one search asks [`MOST`] times at most. So each search
//!    ends, whatever others take meanwhile.
//! 3. A charge is taken whole or not at all, so two who look for the same bytes do not each end up
//!    with a half: one of them gets all.

use super::{
    Budget,
    level::Registration,
    node::Node,
    refusal::{OutOfBudget, Raise},
};
use crate::{
    error::Tried,
    event::Place,
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

/// How often one search asks, at most.
const MOST: u32 = 1024;

/// Between two looks whether one that another thread asks has answered.
const SHORTEST_PAUSE: Duration = Duration::from_micros(1);
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

thread_local! {
    /// This thread is asking somebody.
    static ASKS: Cell<bool> = const { Cell::new(false) };
}

/// What somebody could give back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Offer {
    /// About how many bytes.
    pub bytes: u64,
    /// About how long all of it takes, and what it costs later counted in: memory that has to be
    /// taken anew, work done again.
    pub cost: Duration,
}

impl Offer {
    /// What so many bytes of it cost.
    fn cost_of(&self, bytes: u64) -> u128 {
        let part = u128::from(bytes.min(self.bytes));
        self.cost.as_nanos().saturating_mul(part) / u128::from(self.bytes.max(1))
    }
}

/// Something that holds charged memory and can give some of it back.
pub trait Reclaim: Send + Sync {
    /// What it is called in an error: `cache of stream 3`.
    fn name(&self) -> &'static str;

    /// What it could give back now, or soon where it [waits](Reclaim::waits). Must not block, nor
    /// take a lock that is held over a driver call.
    fn offer(&self) -> Offer;

    /// Gives back about `bytes`, and waits for a device or a thread only if `deadline` has not
    /// passed (`None`: never does). Called with no lock of the budget held; it may charge and
    /// release, and it may panic, which is counted and otherwise passed over. It is called again as
    /// long as it offers less each time.
    fn reclaim(&self, bytes: u64, deadline: Option<Instant>);

    /// Whether it cannot give anything back without waiting. Then it is asked last, and only by who
    /// has time.
    fn waits(&self) -> bool {
        false
    }

    /// Whose memory it gives back: where the driver of a device has none left, those of other
    /// places are not asked. `None`, unless it says otherwise, is asked wherever memory is short.
    fn place(&self) -> Option<Place> {
        None
    }
}

/// One who is registered.
pub(super) struct Reclaimer {
    who: Weak<dyn Reclaim>,
    /// Somebody is asking already: one who asks for room itself, or another thread.
    busy: AtomicBool,
}

/// What was tried to make room, and what is still missing.
///
/// Its example is that of [`Reclaim`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Room {
    /// Bytes that still do not fit; 0 where there is room.
    pub missing: u64,
    /// Who was asked, in order, and how far the count fell meanwhile.
    pub tried: Vec<Tried>,
}

impl Budget {
    /// Registers one whose memory is charged here or below, until the registration is dropped or
    /// nobody else keeps it.
    ///
    /// ```
    /// use aquifer_core::{Budget, Charge, budget::{Offer, Reclaim}};
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
    /// # Ok::<(), aquifer_core::OutOfBudget>(())
    /// ```
    pub fn on_need<R: Reclaim + 'static>(&self, who: &Arc<R>) -> Registration {
        let who: Weak<R> = Arc::downgrade(who);
        let number =
            self.node.reclaimers.add(Arc::new(Reclaimer { who, busy: AtomicBool::new(false) }));
        Registration { budget: self.clone(), number, of_levels: false }
    }

    /// Asks those who are registered for memory until a charge of `bytes` would fit, or nobody is
    /// left to ask, or `deadline` has passed: where a node refuses, those of that node and below
    /// it. `except` is not asked.
    ///
    /// Takes nothing: whoever is in line for the bytes has them first. Takes as long as those who
    /// are asked.
    pub fn make_room(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&Registration>,
    ) -> Room {
        self.ask(deadline, except, &|_| true, || self.node.missing(bytes))
    }

    /// Asks those who are registered here and below to give back `bytes`, though nothing refuses:
    /// `missing` is how much less than that the count here has fallen by, whoever gave. For what no
    /// budget knows of: a driver call that was refused, a neighbour who needs memory, a machine
    /// under pressure. `except` is not asked.
    ///
    /// Takes as long as those who are asked.
    pub fn reclaim(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&Registration>,
    ) -> Room {
        self.reclaim_of(bytes, deadline, except, &|_| true)
    }

    /// As [`Budget::reclaim`], of memory of those [places](Reclaim::place) that `helps` says yes
    /// to, and of those who do not say where theirs is.
    pub fn reclaim_of(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
        except: Option<&Registration>,
        helps: &dyn Fn(Place) -> bool,
    ) -> Room {
        self.node.recall();
        let before = self.used();
        self.ask(deadline, except, helps, || {
            let missing = bytes.saturating_sub(before.saturating_sub(self.used()));
            (missing > 0).then_some((self.node, missing))
        })
    }

    /// Lowers the limit, and asks those who are registered to give back what is above it: `missing`
    /// is what is used beyond the limit still. Charges are refused from the start.
    pub fn shrink(&self, limit: u64, deadline: Option<Instant>) -> Room {
        self.set_limit(limit);
        let mut room = self.make_room(0, deadline, None);
        room.missing = self.used().saturating_sub(limit);
        room
    }

    /// Starts to ask those who are registered, one at a time: for a pool that looks in between
    /// whether it has what it needs. `except` is not asked.
    #[must_use]
    pub fn asking<'a>(&'a self, except: Option<&'a Registration>) -> Asking<'a> {
        Asking { budget: self, except, asked: Vec::new(), left: MOST }
    }

    /// How a charge of `bytes` would be refused now, and by whom: what [`Budget::charge`] would
    /// say. Never blocks.
    #[must_use]
    pub fn refusal(&self, bytes: u64) -> Option<OutOfBudget> {
        let admit = || {
            let _inside = self.node.tree.lock.enter();
            self.node
                .admit(bytes, self.node.priority.load(Relaxed))
                .err()
                .map(|(_, refusal)| refusal)
        };
        let refused = admit()?;
        // What leases have spare is anybody's.
        if self.node.recall_all() > 0 { admit() } else { Some(refused) }
    }

    /// Returns how many bytes have to be given back, of what is charged here, before a charge of
    /// `bytes` fits here and in every budget above; 0 where it fits now. Where a limit was lowered
    /// below what is used, that excess counts too. Never blocks.
    ///
    /// ```
    /// use aquifer_core::Budget;
    /// let budget = Budget::new("device 0", 64);
    /// let _held = budget.charge(40)?;
    /// assert_eq!((budget.shortfall(24), budget.shortfall(26)), (0, 2));
    /// budget.set_limit(24);
    /// assert_eq!((budget.remaining(), budget.shortfall(2)), (0, 18));
    /// # Ok::<(), aquifer_core::OutOfBudget>(())
    /// ```
    #[must_use]
    pub fn shortfall(&self, bytes: u64) -> u64 {
        let look = || {
            let _inside = self.node.tree.lock.enter();
            self.node.shortfall(bytes, self.node.priority.load(Relaxed))
        };
        let missing = look();
        // The spare bytes of leases are free for any charge.
        if missing > 0 && self.node.recall_all() > 0 { look() } else { missing }
    }

    /// Returns the limits, of this budget and of those above, that are too low for a charge of
    /// `bytes` now, where `spared` bytes that are charged here are given back first; none where it
    /// fits. With all of them raised it fits, unless others are in line for the bytes. Never
    /// blocks.
    ///
    /// Its example is that of [`Raise`].
    #[must_use]
    pub fn raises(&self, bytes: u64, spared: u64) -> Vec<Raise> {
        // What leases have spare is free for any charge.
        self.node.recall_all();
        // Without the tree's lock, under which nothing may allocate: figures that others move
        // meanwhile are of a moment each.
        self.node.raises(bytes, spared)
    }

    /// The budget above all others: this one, if there is none above it.
    #[must_use]
    pub fn root(&self) -> Budget {
        self.node.above.last().map_or_else(|| self.clone(), |root| root.know())
    }

    /// Asks for what is missing at a node until nothing is.
    fn ask(
        &self,
        deadline: Option<Instant>,
        except: Option<&Registration>,
        helps: &dyn Fn(Place) -> bool,
        missing: impl Fn() -> Option<(&'static Node, u64)>,
    ) -> Room {
        let mut room = Room::default();
        let mut asking = self.asking(except);
        while let Some((node, missing)) = missing() {
            room.missing = missing;
            if has_passed(deadline) {
                return room;
            }
            let Some(tried) = asking.next_at(node, missing, deadline, helps) else { return room };
            match room.tried.iter_mut().find(|earlier| earlier.step == tried.step) {
                Some(earlier) => earlier.gave += tried.gave,
                None => room.tried.push(tried),
            }
        }
        room.missing = 0;
        room
    }
}

/// Asks those who can give bytes back, one at a time and the cheapest first. Whoever asks looks in
/// between.
///
/// ```
/// use aquifer_core::{Budget, Charge, budget::{Offer, Reclaim}};
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
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
pub struct Asking<'a> {
    budget: &'a Budget,
    except: Option<&'a Registration>,
    asked: Vec<Asked>,
    /// How often it may ask still.
    left: u32,
}

/// One who was asked.
struct Asked {
    who: Arc<Reclaimer>,
    /// It has offered less afterwards: it may have more.
    gave: bool,
    /// What it has offered then.
    offers: u64,
    /// It was asked when it could not wait any more.
    late: bool,
}

/// Whom a search has found.
#[derive(Default)]
struct Found {
    /// The cheapest.
    best: Option<Candidate>,
    /// One that another thread asks.
    busy: Option<(&'static Node, Arc<Reclaimer>, Arc<dyn Reclaim>)>,
}

struct Candidate {
    /// Waits, and what it costs.
    rank: (bool, u128),
    offer: Offer,
    at: &'static Node,
    reclaimer: Arc<Reclaimer>,
    who: Arc<dyn Reclaim>,
}

impl Asking<'_> {
    /// Asks the next for what a charge of `bytes` is missing: where a node refuses it, one of that
    /// node or below it; where none does, one at this budget or below it, for all of `bytes`.
    /// `None` if nobody is left, or if the charge could not be had though all were given back.
    /// After `deadline` nobody is asked who waits: a deadline that has passed asks for what
    /// is to be had without waiting.
    pub fn for_charge(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        let never = {
            let _inside = self.budget.node.tree.lock.enter();
            self.budget.node.never(bytes).is_some()
        };
        if never {
            return None;
        }
        let (node, missing) = self.budget.node.missing(bytes).unwrap_or((self.budget.node, bytes));
        self.next_at(node, missing, deadline, &|_| true)
    }

    /// Asks the next for `bytes` that a driver has refused: one of the whole tree, whose memory is
    /// of a place that `helps`, or who does not say of which. `None` if nobody is left. The
    /// deadline is as with [`Asking::for_charge`].
    pub fn for_memory(
        &mut self,
        bytes: u64,
        deadline: Option<Instant>,
        helps: &dyn Fn(Place) -> bool,
    ) -> Option<Tried> {
        let node = self.budget.node;
        self.next_at(node.above.last().copied().unwrap_or(node), bytes, deadline, helps)
    }

    fn next_at(
        &mut self,
        node: &'static Node,
        missing: u64,
        deadline: Option<Instant>,
        helps: &dyn Fn(Place) -> bool,
    ) -> Option<Tried> {
        self.left = self.left.checked_sub(1)?;
        let before = node.used.load(Relaxed);
        let late = has_passed(deadline);
        let Found { best, busy } = self.find(node, missing, late, helps);
        let (at, who) = match (best, busy) {
            (Some(best), _) => {
                let Candidate { offer, at, reclaimer, who, .. } = best;
                if reclaimer.busy.swap(true, AcqRel) {
                    // Another thread was faster, and is waited for if there is nobody else.
                    return self.next_at(node, missing, deadline, helps);
                }
                let asks = ASKS.replace(true);
                at.reclaimers.call(|| who.reclaim(missing, deadline));
                ASKS.set(asks);
                let offers = at.reclaimers.call(|| who.offer()).unwrap_or_default().bytes;
                reclaimer.busy.store(false, Release);
                let asked = Asked { who: reclaimer, gave: offers < offer.bytes, offers, late };
                match self.asked.iter_mut().find(|other| Arc::ptr_eq(&other.who, &asked.who)) {
                    Some(other) => *other = asked,
                    None => self.asked.push(asked),
                }
                (at, who)
            }
            (None, Some((at, reclaimer, who))) if !ASKS.get() => {
                if !reclaimer.wait(deadline) {
                    return None;
                }
                (at, who)
            }
            _ => return None,
        };
        let gave = before.saturating_sub(node.used.load(Relaxed));
        // A name may be anybody's code too.
        let step = at.reclaimers.call(|| who.name()).unwrap_or("a reclaimer that panicked");
        Some(Tried { step, gave })
    }

    /// The cheapest at this node or below that may be asked.
    fn find(
        &self,
        node: &'static Node,
        missing: u64,
        late: bool,
        helps: &dyn Fn(Place) -> bool,
    ) -> Found {
        let mut found = Found::default();
        node.walk(&mut |at| {
            let all = at.reclaimers.now();
            for (number, reclaimer) in all.iter().flat_map(|all| all.iter()) {
                let excepted = self.except.is_some_and(|except| {
                    !except.of_levels
                        && except.number == *number
                        && std::ptr::eq(except.budget.node, at)
                });
                let Some(who) = reclaimer.who.upgrade().filter(|_| !excepted) else { continue };
                let asks = || {
                    let waits = who.waits();
                    (who.place().is_none_or(helps) && !(waits && late))
                        .then(|| (waits, who.offer()))
                };
                let Some((waits, offer)) = at.reclaimers.call(asks).flatten() else { continue };
                let asked = self.asked.iter().find(|asked| Arc::ptr_eq(&asked.who, reclaimer));
                let again = asked.is_none_or(|asked| {
                    asked.gave || asked.offers != offer.bytes || (asked.late && !late)
                });
                if reclaimer.busy.load(Acquire) {
                    if asked.is_none() {
                        found.busy.get_or_insert_with(|| (at, Arc::clone(reclaimer), who));
                    }
                    continue;
                }
                let rank = (waits, offer.cost_of(missing));
                if again
                    && offer.bytes > 0
                    && found.best.as_ref().is_none_or(|best| rank < best.rank)
                {
                    let reclaimer = Arc::clone(reclaimer);
                    found.best = Some(Candidate { rank, offer, at, reclaimer, who });
                }
            }
        });
        found
    }
}

impl std::fmt::Debug for Asking<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asking").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl Reclaimer {
    /// Waits until nobody asks it any more. Says whether that was before the deadline.
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
    /// The first node that refuses a charge of `bytes`, and how many are missing there.
    fn missing(&'static self, bytes: u64) -> Option<(&'static Node, u64)> {
        self.recall_all();
        let _inside = self.tree.lock.enter();
        let (node, refused) = self.admit(bytes, self.priority.load(Relaxed)).err()?;
        Some((node, refused.missing()))
    }
}
