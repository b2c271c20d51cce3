//! Programs over a tree of budgets, checked against a model: charges, reservations, guarantees and
//! limits that change, leases, and waits that are polled, expire and are cancelled.
//!
//! The model stores for each node what is charged to it directly. It derives everything else: used
//! and held bytes, whether a charge fits and which node refuses it, and which waiter is served. All
//! figures are compared after every operation.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

mod model;
#[path = "../../../tests/support/woken.rs"]
mod woken;

use crate::program::{Bytes, Process, Program};
use aquifer_core::{
    Budget, Charge, OutOfBudget, Reservation,
    budget::{BudgetLease, Leased, StrandedCount, Waiting},
};
use model::{Model, Wait};
use std::{
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};
use woken::Woken;

/// Maximum number of nodes in one program, including dropped ones.
const MAX_NODES: usize = 24;
/// No program runs long enough to reach the first deadline.
const HOUR: Duration = Duration::from_secs(3600);

/// An object that holds bytes of a node.
enum Held {
    Charge(Charge),
    Reservation(Reservation),
    Stranded(#[expect(dead_code, reason = "held, and given back")] (StrandedCount, Charge)),
    Leased(#[expect(dead_code, reason = "held, and given back")] Leased),
}

struct Waiter {
    waiting: Waiting,
    woken: Arc<Woken>,
    number: u64,
}

pub(crate) struct World {
    model: Model,
    begun: Instant,
    /// By the node's number in the model.
    budgets: Vec<Option<Budget>>,
    held: Vec<(usize, u64, Held)>,
    leases: Vec<(usize, BudgetLease)>,
    waiters: Vec<Waiter>,
    /// Leases take bytes ahead of charges, so peaks are compared only without them.
    with_leases: bool,
}

impl Program for World {
    const PROCESS: Process = Process::Any;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let limit = 60 + u64::from(bytes.u8());
        Some(Self {
            model: Model::new(limit),
            begun: Instant::now(),
            budgets: vec![Some(Budget::new("0", limit))],
            held: Vec::new(),
            leases: Vec::new(),
            waiters: Vec::new(),
            with_leases: bytes.flag(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(23) {
            0 | 1 => self.charge(bytes),
            2..=5 => self.release(bytes),
            6 => self.split_or_merge(bytes),
            7 => self.limit(bytes),
            8 => self.guarantee(bytes),
            9 | 10 => self.child(bytes),
            11 => self.forget(bytes),
            12..=14 => self.wait(bytes),
            15 => self.poll(bytes),
            16 => self.give_up(bytes),
            17 => {
                let hours = u32::from(bytes.choice(6));
                let handle = self.pick(bytes).1;
                handle.expire_waits(self.begun + HOUR * hours);
                self.model.look(hours);
            }
            18 => self.strand_or_retry(bytes),
            19 => {
                let (at, budget) = self.pick(bytes);
                let priority = i32::from(bytes.choice(3)) - 1;
                budget.set_priority(priority);
                self.model.nodes[at].priority = priority;
            }
            _ if self.with_leases => self.lease(bytes),
            _ => {
                let (at, budget) = self.pick(bytes);
                budget.reset_peak();
                self.model.nodes[at].peak = self.model.used(at);
            }
        }
        self.reap();
    }

    fn check(&mut self) {
        let model = &self.model;
        for waiter in &self.waiters {
            let woken = waiter.woken.times();
            let answered = model.wait(waiter.number).answer.is_some();
            assert_eq!(woken, u32::from(answered), "wakes of {:?}", model.wait(waiter.number));
        }
        for (at, budget) in
            self.budgets.iter().enumerate().filter_map(|(at, b)| Some((at, b.as_ref()?)))
        {
            let (figures, node) = (budget.figures(), &model.nodes[at]);
            assert_eq!(figures.used, model.used(at), "used at {at}");
            assert!(figures.peak >= figures.used);
            assert_eq!((figures.limit, figures.guarantee), (node.limit, node.guarantee), "at {at}");
            let stranded = self.held.iter().filter(|held| matches!(held.2, Held::Stranded(..)));
            let stranded: u64 = stranded.filter(|h| model.is_below(h.0, at)).map(|h| h.1).sum();
            assert_eq!(figures.stranded, stranded, "stranded at {at}");
            assert_eq!(budget.waiting(), model.waiting(at), "waiting at {at}");
            assert_eq!(budget.estimate(None), budget.remaining(), "the estimate at {at}");
            if !self.with_leases {
                assert_eq!(figures.held, model.held(at), "held at {at}");
                assert_eq!(figures.peak, node.peak, "the peak at {at}");
                let most = budget.remaining();
                assert!(most == 0 || model.fits(at, most).is_ok(), "{most} remain at {at}");
                assert!(model.fits(at, most + 1).is_err(), "more than {most} remain at {at}");
            }
            let children =
                model.nodes.iter().filter(|node| node.live && node.parent == Some(at)).count();
            assert_eq!(budget.children().count(), children, "children of {at}");
        }
        if model.waiting(0) > 0 {
            assert_eq!(
                self.budgets[0].as_ref().map_or(0, Budget::spare),
                0,
                "spare while somebody waits"
            );
        }
    }

    fn finish(self) {
        let Self { budgets, held, leases, waiters, .. } = self;
        drop(waiters);
        drop((held, leases));
        let mut budgets = budgets.into_iter();
        let root = budgets.next().flatten().expect("the root is kept");
        drop(budgets);
        let figures = root.figures();
        assert_eq!((figures.used, figures.held, figures.stranded, root.waiting()), (0, 0, 0, 0));
        assert_eq!(root.children().count(), 0, "a node was lost");
    }
}

impl World {
    /// Returns a node that has a handle, and the handle.
    fn pick(&self, bytes: &mut Bytes<'_>) -> (usize, Budget) {
        let known: Vec<_> =
            self.budgets.iter().enumerate().filter_map(|(at, b)| Some((at, b.as_ref()?))).collect();
        let (at, budget) = known[usize::from(bytes.u8()) % known.len()];
        (at, budget.clone())
    }

    /// Compares the result of a `try` call with the model's, and keeps what was granted.
    fn keep(&mut self, at: usize, bytes: u64, answer: Result<Held, OutOfBudget>) {
        match (answer, self.model.charge(at, bytes)) {
            (Ok(held), Ok(())) => self.held.push((at, bytes, held)),
            (Err(refusal), Err(node)) => {
                let model = &self.model;
                assert_eq!(refusal.budget, model.nodes[node].name, "who refused");
                assert_eq!((refusal.requested, refusal.limit), (bytes, model.nodes[node].limit));
                assert!(
                    refusal.remaining < bytes || refusal.current + bytes > refusal.limit,
                    "{refusal}"
                );
                assert!(self.with_leases || refusal.current == model.used(node), "{refusal}");
            }
            (answer, expected) => {
                let got = answer.map(|_| ());
                panic!("a charge of {bytes} at {at}: {got:?} where {expected:?} was due");
            }
        }
    }

    fn charge(&mut self, bytes: &mut Bytes<'_>) {
        let (at, budget) = self.pick(bytes);
        let asked = u64::from(bytes.u8() / 2);
        let answer = if bytes.choice(4) == 0 {
            budget.reserve(asked).map(Held::Reservation)
        } else {
            budget.charge(asked).map(Held::Charge)
        };
        self.keep(at, asked, answer);
    }

    fn release(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = bytes.index(self.held.len()) else { return };
        if let Held::Stranded(..) = self.held[which].2 {
            return;
        }
        let (at, asked, held) = self.held.swap_remove(which);
        drop(held);
        self.model.release(at, asked);
    }

    fn split_or_merge(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = bytes.index(self.held.len()) else { return };
        let cut = u64::from(bytes.u8() / 4);
        let (at, asked, held) = &mut self.held[which];
        let (at, before) = (*at, *asked);
        let part = match held {
            Held::Charge(charge) => charge.split(cut),
            Held::Reservation(reserved) => {
                let answer = reserved.draw(cut);
                assert_eq!(
                    answer.as_ref().err().map(|refused| refused.remaining),
                    (cut > before).then_some(before)
                );
                answer.ok()
            }
            Held::Stranded(..) | Held::Leased(_) => return,
        };
        assert_eq!(part.is_some(), cut <= before);
        let Some(part) = part else { return };
        *asked -= cut;
        // Into another charge that accepts it, or kept as its own charge.
        let other = usize::from(bytes.u8()) % self.held.len();
        if let (into, total, Held::Charge(charge)) = &mut self.held[other] {
            match charge.merge(part) {
                Ok(()) => {
                    assert_eq!(*into, at, "merged across budgets");
                    *total += cut;
                }
                Err(part) => {
                    assert_ne!(*into, at, "two of one budget did not merge");
                    self.held.push((at, cut, Held::Charge(part)));
                }
            }
        } else {
            self.held.push((at, cut, Held::Charge(part)));
        }
    }

    fn limit(&mut self, bytes: &mut Bytes<'_>) {
        let (at, budget) = self.pick(bytes);
        let limit = u64::from(bytes.u8());
        let excess = budget.set_limit(limit);
        self.model.set_limit(at, limit);
        // Waiters may have been served in between, with no more than fits.
        assert_eq!(excess, self.model.used(at).saturating_sub(limit), "the excess");
    }

    fn guarantee(&mut self, bytes: &mut Bytes<'_>) {
        let (at, budget) = self.pick(bytes);
        let guarantee = u64::from(bytes.u8() / 4);
        let answer = budget.set_guarantee(guarantee);
        let expected = self.model.set_guarantee(at, guarantee);
        match (answer, expected) {
            (Ok(()), Ok(())) => {}
            (Err(refusal), Err(node)) => assert_eq!(refusal.budget, self.model.nodes[node].name),
            (answer, expected) => {
                panic!("a guarantee of {guarantee} at {at}: {answer:?} where {expected:?} was due");
            }
        }
    }

    fn child(&mut self, bytes: &mut Bytes<'_>) {
        let (at, budget) = self.pick(bytes);
        if self.budgets.len() < MAX_NODES {
            let limit = u64::from(bytes.u8());
            let name = model::NAMES[self.budgets.len()];
            self.budgets.push(Some(budget.child(name, limit)));
            self.model.child(at, limit);
        }
    }

    /// Drops a handle. Its bytes, waits and children keep the node alive.
    fn forget(&mut self, bytes: &mut Bytes<'_>) {
        let at = self.pick(bytes).0;
        if at > 0 {
            self.budgets[at] = None;
        }
    }

    /// Clears the guarantees of nodes that are no longer referenced.
    fn reap(&mut self) {
        loop {
            let gone = (1..self.model.nodes.len()).rev().find(|&at| {
                self.model.nodes[at].live
                    && self.budgets[at].is_none()
                    && !self.held.iter().any(|held| held.0 == at)
                    && !self.leases.iter().any(|lease| lease.0 == at)
                    && !self.waiters.iter().any(|w| self.model.wait(w.number).node == at)
                    && !self.model.nodes.iter().any(|node| node.live && node.parent == Some(at))
            });
            match gone {
                Some(at) => self.model.leave(at),
                None => return,
            }
        }
    }

    fn wait(&mut self, bytes: &mut Bytes<'_>) {
        let (at, budget) = self.pick(bytes);
        let asked = u64::from(bytes.u8() / 2);
        let hours = u32::from(bytes.choice(7));
        let waiting = budget.charge_async(asked);
        // Zero is already in the past. The last one has no deadline.
        let waiting = if hours < 6 { waiting.until(self.begun + HOUR * hours) } else { waiting };
        let mut waiter = Waiter { waiting, woken: Woken::here(), number: 0 };
        if hours == 0 {
            let answer = poll(&mut waiter).expect("a wait whose deadline has passed ends at once");
            self.keep(at, asked, answer.map(Held::Charge));
            return;
        }
        let mut wait = Wait::new(at, asked, (hours < 6).then_some(hours));
        let answer = poll(&mut waiter);
        let at_once = self.model.charge(at, asked).is_ok();
        wait.answer = at_once.then_some(true);
        waiter.number = self.model.enter(wait);
        if !at_once {
            self.model.look(0);
        }
        self.take(waiter, answer);
    }

    fn poll(&mut self, bytes: &mut Bytes<'_>) {
        let Some(mut waiter) = bytes.take(&mut self.waiters) else { return };
        let answer = poll(&mut waiter);
        self.take(waiter, answer);
    }

    /// Checks that a wait has the model's result.
    fn take(&mut self, waiter: Waiter, answer: Option<Result<Charge, OutOfBudget>>) {
        let wait = self.model.wait(waiter.number).clone();
        match (answer, wait.answer) {
            (None, None) => self.waiters.push(waiter),
            (Some(Ok(charge)), Some(true)) => {
                assert_eq!(charge.bytes(), wait.bytes);
                self.held.push((wait.node, wait.bytes, Held::Charge(charge)));
            }
            (Some(Err(refusal)), Some(false)) => assert_eq!(refusal.requested, wait.bytes),
            (answer, expected) => {
                let got = answer.map(|answer| answer.map(|_| ()));
                panic!("a wait {wait:?}: {got:?} where {expected:?} was due");
            }
        }
    }

    fn give_up(&mut self, bytes: &mut Bytes<'_>) {
        let Some(waiter) = bytes.take(&mut self.waiters) else { return };
        let number = waiter.number;
        drop(waiter);
        self.model.give_up(number);
    }

    fn strand_or_retry(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = bytes.index(self.held.len()) else { return };
        let (at, asked, held) = self.held.swap_remove(which);
        let held = match held {
            Held::Charge(charge) => {
                let count = charge.budget().count_stranded(charge.bytes());
                Held::Stranded((count, charge))
            }
            Held::Stranded(..) if !bytes.flag() => {
                drop(held);
                return self.model.release(at, asked);
            }
            other => other,
        };
        self.held.push((at, asked, held));
    }

    fn lease(&mut self, bytes: &mut Bytes<'_>) {
        let which = usize::from(bytes.u8());
        match bytes.choice(8) {
            0 | 1 => {
                let (at, budget) = self.pick(bytes);
                self.leases.push((at, budget.lease(u64::from(bytes.choice(30)))));
            }
            2 if !self.leases.is_empty() => {
                let (at, lease) = self.leases.swap_remove(which % self.leases.len());
                assert_eq!(lease.budget().name(), self.model.nodes[at].name);
                drop(lease);
            }
            3 if !self.leases.is_empty() => self.leases[which % self.leases.len()].1.trim(),
            _ if !self.leases.is_empty() => {
                let (at, lease) = &self.leases[which % self.leases.len()];
                let (at, asked) = (*at, u64::from(bytes.u8() / 4));
                let answer = lease.charge(asked).map(Held::Leased);
                // A charge of zero bytes always succeeds.
                if asked == 0 {
                    assert!(answer.is_ok());
                } else {
                    self.keep(at, asked, answer);
                }
            }
            _ => {}
        }
    }
}

fn poll(waiter: &mut Waiter) -> Option<Result<Charge, OutOfBudget>> {
    match waiter.woken.poll(&mut waiter.waiting) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}
