//! Who can give bytes back, and how they are asked.
//!
//! Pools and programs register with the budget that their memory is charged to. When room is needed below a node, all who
//! are registered there are asked what they have and what it costs; then one after another is asked for it, the cheapest
//! first, until the bytes fit or the deadline has passed. No lock is held meanwhile, nobody is asked twice at once, not the
//! one who asks, and nobody is believed: what counts is what the budget's own count has fallen by.

use super::{Budget, level::Registration, node::Node, refusal::OutOfBudget};
use crate::{
    error::Tried,
    sync::atomic::{
        AtomicBool,
        Ordering::{AcqRel, Relaxed, Release},
    },
};
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// What somebody could give back.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Offer {
    /// About how many bytes.
    pub bytes: u64,
    /// About how long it takes, and what it costs later counted in: memory that has to be taken anew, work done again.
    pub cost: Duration,
}

/// Something that holds charged memory and can give some of it back.
pub trait Reclaim: Send + Sync {
    /// What it is called in an error: `cache of stream 3`.
    fn name(&self) -> &'static str;

    /// What it could give back now. Must not block.
    fn offer(&self) -> Offer;

    /// Gives back about `bytes`, if it can do so by `deadline`. Called with no lock of the budget held; it may charge and
    /// release, and it may panic, which is counted and otherwise passed over.
    fn reclaim(&self, bytes: u64, deadline: Option<Instant>);
}

/// One who is registered.
pub(super) struct Reclaimer {
    who: Weak<dyn Reclaim>,
    /// Somebody is asking already: one who asks for room itself, or another thread.
    busy: AtomicBool,
}

/// What was tried to make room, and what is still missing.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Room {
    /// Bytes that still do not fit; 0 where there is room.
    pub missing: u64,
    /// Who was asked, in order, and how far the count fell meanwhile.
    pub tried: Vec<Tried>,
}

impl Budget {
    /// Registers one whose memory is charged here or below, until the registration is dropped or nobody else keeps it.
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
        let number = self.node.reclaimers.add(Arc::new(Reclaimer { who, busy: AtomicBool::new(false) }));
        Registration { budget: self.clone(), number, of_levels: false }
    }

    /// Asks those who are registered for memory until a charge of `bytes` would fit, or nobody is left to ask, or
    /// `deadline` has passed: where a node refuses, those of that node and below it. `except` is not asked.
    ///
    /// Takes nothing: whoever is in line for the bytes has them first. Takes as long as those who are asked.
    pub fn make_room(&self, bytes: u64, deadline: Option<Instant>, except: Option<&Registration>) -> Room {
        ask(deadline, except, || self.node.missing(bytes))
    }

    /// Asks those who are registered here and below to give back `bytes`, though nothing refuses: `missing` is how much less
    /// than that the count here has fallen by, whoever gave. For what no budget knows of: a driver call that was refused, a
    /// neighbour who needs memory, a machine under pressure. `except` is not asked.
    ///
    /// Takes as long as those who are asked.
    pub fn reclaim(&self, bytes: u64, deadline: Option<Instant>, except: Option<&Registration>) -> Room {
        self.node.recall();
        let before = self.used();
        ask(deadline, except, || {
            let missing = bytes.saturating_sub(before.saturating_sub(self.used()));
            (missing > 0).then_some((self.node, missing))
        })
    }

    /// Lowers the limit, and asks those who are registered to give back what is above it: `missing` is what is used
    /// beyond the limit still. Charges are refused from the start.
    pub fn shrink(&self, limit: u64, deadline: Option<Instant>) -> Room {
        self.set_limit(limit);
        let mut room = self.make_room(0, deadline, None);
        room.missing = self.used().saturating_sub(limit);
        room
    }
}

/// Asks for what is missing at a node until nothing is, the cheapest first, each once.
fn ask(
    deadline: Option<Instant>,
    except: Option<&Registration>,
    missing: impl Fn() -> Option<(&'static Node, u64)>,
) -> Room {
    let mut room = Room::default();
    let mut asked: Vec<Arc<Reclaimer>> = Vec::new();
    loop {
        let Some((node, missing)) = missing() else {
            room.missing = 0;
            return room;
        };
        room.missing = missing;
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return room;
        }
        let Some((at, reclaimer, who)) = node.cheapest(&asked, except) else { return room };
        asked.push(Arc::clone(&reclaimer));
        if reclaimer.busy.swap(true, AcqRel) {
            continue;
        }
        let before = node.used.load(Relaxed);
        at.reclaimers.call(|| who.reclaim(missing, deadline));
        let gave = before.saturating_sub(node.used.load(Relaxed));
        reclaimer.busy.store(false, Release);
        // A name may be anybody's code too.
        let step = at.reclaimers.call(|| who.name()).unwrap_or("a reclaimer that panicked");
        room.tried.push(Tried { step, gave });
    }
}

impl Node {
    /// The first node that refuses a charge of `bytes`, and how many are missing there.
    fn missing(&'static self, bytes: u64) -> Option<(&'static Node, u64)> {
        self.recall_all();
        let _inside = self.tree.lock.enter();
        let (node, OutOfBudget { requested, current, remaining, limit, .. }) =
            self.admit(bytes, self.priority.load(Relaxed)).err()?;
        let above = current.saturating_add(requested).saturating_sub(limit);
        Some((node, requested.saturating_sub(remaining).max(above)))
    }

    /// The cheapest offer at this node or below, with where it is registered.
    #[expect(clippy::type_complexity, reason = "three things that belong together for one line")]
    fn cheapest(
        &'static self,
        asked: &[Arc<Reclaimer>],
        except: Option<&Registration>,
    ) -> Option<(&'static Node, Arc<Reclaimer>, Arc<dyn Reclaim>)> {
        let mut best: Option<(Duration, &'static Node, Arc<Reclaimer>, Arc<dyn Reclaim>)> = None;
        self.walk(&mut |node| {
            let all = node.reclaimers.now();
            for (number, reclaimer) in all.iter().flat_map(|all| all.iter()) {
                let excepted = except.is_some_and(|except| {
                    !except.of_levels && except.number == *number && std::ptr::eq(except.budget.node, node)
                });
                if excepted || asked.iter().any(|other| Arc::ptr_eq(other, reclaimer)) {
                    continue;
                }
                let Some(who) = reclaimer.who.upgrade() else { continue };
                let offer = node.reclaimers.call(|| who.offer()).unwrap_or_default();
                if offer.bytes > 0 && best.as_ref().is_none_or(|(cost, ..)| offer.cost < *cost) {
                    best = Some((offer.cost, node, Arc::clone(reclaimer), who));
                }
            }
        });
        best.map(|(_, node, reclaimer, who)| (node, reclaimer, who))
    }
}
