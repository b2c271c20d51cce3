//! A simulated cluster: jobs arrive, are placed, wait, end and die, and nodes go down. Time is that
//! of the simulation, except for the time to place, which is measured.
//!
//! All that is not measured is the same for the same settings.

use super::{
    nodes::{Accounting, CAPACITY, DEVICES, Nodes, Shard},
    scheduler::Scheduler,
};
use aquifer::{Group, PlacementRequest, Policy};
use aquifer_core::random::SplitMix64;
use aquifer_ledger::LedgerError;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    mem,
    rc::Rc,
    time::Instant,
};

/// Microseconds of the simulation.
type Time = u64;

const SECOND: Time = 1_000_000;
/// The mean length of a job.
const LENGTH: f64 = 600.0;
/// Of a hundred jobs, those whose process is killed before their end.
const KILLED: u64 = 2;
/// The time until a node that went down is back.
const NODE_IS_DOWN: Time = 300 * SECOND;
/// The pause between two reports of a node, and between two rounds of a queue.
const ROUND: Time = SECOND;

/// A tenant: its part of a hundred jobs, the shards of a job, and their least and most GiB.
struct Tenant {
    part: u64,
    shards: usize,
    gib: (u64, u64),
}

const fn tenant(part: u64, shards: usize, least: u64, most: u64) -> Tenant {
    Tenant { part, shards, gib: (least, most) }
}

/// Each tenant has jobs of one kind, so that unfairness between kinds is one between tenants.
const TENANTS: [Tenant; 5] = [
    tenant(55, 1, 4, 40),
    tenant(25, 1, 40, 76),
    tenant(12, 2, 40, 76),
    tenant(6, 4, 64, 76),
    tenant(2, 8, 70, 78),
];

/// The settings of one run.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) nodes: usize,
    pub(super) schedulers: usize,
    pub(super) policy: Policy,
    /// The number of nodes that a request is placed on first, or none for all.
    pub(super) sample: Option<usize>,
    /// The bytes of jobs that arrive, in a hundredth of what the cluster can hold.
    pub(super) load: u64,
    /// The mean time until a node goes down, in hours.
    pub(super) node_lives: f64,
    /// Seconds before figures count, and seconds for which they do.
    pub(super) seconds: (u64, u64),
    pub(super) seed: u64,
    pub(super) accounting: Accounting,
}

/// The figures of one run.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Figures {
    /// Nanoseconds of the placements that succeeded, in order. These are measured.
    pub(super) times: Vec<u64>,
    pub(super) outcome: ClusterOutcome,
}

/// What does not depend on the machine.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct ClusterOutcome {
    pub(super) placed: u64,
    /// Attempts that found no room.
    pub(super) refused: u64,
    pub(super) messages: u64,
    /// Claimed bytes over the capacity of nodes that are up, of all the time.
    pub(super) utilisation: f64,
    /// Jain's index of the tenants' mean parts of their time in which a job runs, from 0 to 1.
    pub(super) fairness: f64,
    /// The longest that a job has waited, in microseconds, also of those that still wait.
    pub(super) longest_wait: Time,
    /// Jobs that were ended by the death of a node, and placed again.
    pub(super) lost: u64,
    /// Bytes that are claimed after all jobs have ended.
    pub(super) left: u64,
}

#[derive(Clone, Debug)]
struct Job {
    tenant: usize,
    scheduler: usize,
    group: Group,
    /// Bytes of each shard.
    bytes: u64,
    length: Time,
    arrived: Time,
    is_killed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum ClusterEvent {
    Arrival,
    Round,
    /// The job in this place ends, if it is still its start of this number.
    End(usize, u64),
    Down(usize),
    Up(usize),
}

/// A job with what it holds, and the number of its start.
type Running = Option<(Job, Vec<Shard>, u64)>;

pub(super) struct World {
    settings: Settings,
    nodes: Rc<Nodes>,
    schedulers: Vec<Scheduler>,
    queues: Vec<VecDeque<Job>>,
    running: Vec<Running>,
    /// Places of `running` without a job.
    idle: Vec<usize>,
    events: BinaryHeap<Reverse<(Time, u64, ClusterEvent)>>,
    /// Orders events of one time.
    number: u64,
    now: Time,
    random: SplitMix64,
    figures: Figures,
    /// Claimed and possible bytes by seconds.
    area: (f64, f64),
    /// By tenant: the sum of the parts of its time in which a job runs, and the number of jobs.
    parts: [(f64, u64); TENANTS.len()],
    /// Messages before the figures count.
    messages_before: u64,
}

/// Returns a number from 0 to 1, without 0.
fn fraction(random: &mut SplitMix64) -> f64 {
    ((random.next_u64() >> 11) as f64 + 1.0) / (1_u64 << 53) as f64
}

/// Returns an exponentially distributed time with this mean in seconds.
fn exponential(random: &mut SplitMix64, mean: f64) -> Time {
    (-fraction(random).ln() * mean * SECOND as f64) as Time
}

/// Returns Jain's index of fairness: 1 if all are equal, 1/n if one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) =
        shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

/// The bytes of a mean job.
fn mean_bytes() -> f64 {
    let of = |tenant: &Tenant| {
        let mean = (tenant.gib.0 + tenant.gib.1) as f64 / 2.0;
        tenant.part as f64 / 100.0 * tenant.shards as f64 * mean
    };
    TENANTS.iter().map(of).sum::<f64>() * (1_u64 << 30) as f64
}

impl World {
    pub(super) fn new(settings: Settings) -> Result<Self, LedgerError> {
        let nodes = Nodes::new(settings.nodes, settings.accounting)?;
        let schedulers = (0..settings.schedulers)
            .map(|at| Scheduler::new(&nodes, settings.nodes, at, settings.schedulers))
            .collect();
        let mut world = Self {
            queues: vec![VecDeque::new(); settings.schedulers],
            random: SplitMix64::new(settings.seed),
            settings,
            nodes,
            schedulers,
            running: Vec::new(),
            idle: Vec::new(),
            events: BinaryHeap::new(),
            number: 0,
            now: 0,
            figures: Figures::default(),
            area: (0.0, 0.0),
            parts: Default::default(),
            messages_before: 0,
        };
        world.plan(0, ClusterEvent::Arrival);
        world.plan(ROUND, ClusterEvent::Round);
        for node in 0..world.settings.nodes {
            world.plan_death(node);
        }
        Ok(world)
    }

    /// Runs until the end, and ends all jobs.
    pub(super) fn run(mut self) -> Figures {
        let (before, counted) = self.settings.seconds;
        let end = (before + counted) * SECOND;
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            let time = time.min(end);
            self.pass(time);
            if time == end {
                break;
            }
            match event {
                ClusterEvent::Arrival => self.arrive(),
                ClusterEvent::Round => self.round(),
                ClusterEvent::End(at, start) => self.end(at, start),
                ClusterEvent::Down(node) => self.take_down(node),
                ClusterEvent::Up(node) => {
                    self.nodes.start(node);
                    self.plan_death(node);
                }
            }
        }
        self.running.clear();
        let waits = self.queues.iter().flatten().map(|job| end - job.arrived).max();
        let with_jobs = self.parts.iter().filter(|(_, jobs)| *jobs > 0);
        let parts: Vec<f64> = with_jobs.map(|(sum, jobs)| sum / *jobs as f64).collect();
        let outcome = &mut self.figures.outcome;
        outcome.longest_wait = outcome.longest_wait.max(waits.unwrap_or_default());
        outcome.messages = self.nodes.messages() - self.messages_before;
        outcome.utilisation = self.area.0 / self.area.1.max(1.0);
        outcome.fairness = jain(&parts);
        outcome.left = self.nodes.use_of_capacity().0;
        self.figures
    }

    fn plan(&mut self, at: Time, event: ClusterEvent) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    fn plan_death(&mut self, node: usize) {
        let lives = exponential(&mut self.random, self.settings.node_lives * 3600.0);
        self.plan(self.now + lives, ClusterEvent::Down(node));
    }

    fn counts(&self) -> bool {
        self.now >= self.settings.seconds.0 * SECOND
    }

    /// Moves to a time, and adds what was claimed until then.
    fn pass(&mut self, time: Time) {
        let counts = self.settings.seconds.0 * SECOND;
        if time >= counts {
            if self.now < counts {
                self.messages_before = self.nodes.messages();
            }
            let seconds = (time - self.now.max(counts)) as f64;
            let (claimed, most) = self.nodes.use_of_capacity();
            self.area.0 += claimed as f64 * seconds;
            self.area.1 += most as f64 * seconds;
        }
        self.now = time;
    }

    fn arrive(&mut self) {
        let job = self.job();
        let cluster = (self.settings.nodes * DEVICES) as f64 * CAPACITY as f64;
        let pause = mean_bytes() * LENGTH / (cluster * self.settings.load as f64 / 100.0);
        let next = self.now + exponential(&mut self.random, pause);
        self.plan(next, ClusterEvent::Arrival);
        if let Some(job) = self.start(job) {
            self.queues[job.scheduler].push_back(job);
        }
    }

    fn job(&mut self) -> Job {
        let random = &mut self.random;
        let mut kind = random.next_u64() % 100;
        let of_kind = |tenant: &Tenant| {
            let found = kind < tenant.part;
            kind = kind.saturating_sub(tenant.part);
            found
        };
        let tenant = TENANTS.iter().position(of_kind).unwrap_or_default();
        let Tenant { shards, gib: (least, most), .. } = TENANTS[tenant];
        let gib = least + random.next_u64() % (most - least + 1);
        let bytes = gib << 30;
        let each = PlacementRequest::bytes(bytes).key(random.next_u64() % 4096);
        let group = Group::of(shards, each);
        Job {
            tenant,
            scheduler: (random.next_u64() % self.settings.schedulers as u64) as usize,
            group: if shards > 1 { group.on_peers() } else { group },
            bytes,
            length: exponential(random, LENGTH) + SECOND,
            arrived: self.now,
            is_killed: random.next_u64() % 100 < KILLED,
        }
    }

    /// Places a job. Returns it if there is no room.
    fn start(&mut self, job: Job) -> Option<Job> {
        let Settings { policy, sample, .. } = &self.settings;
        let scheduler = &mut self.schedulers[job.scheduler];
        let begun = Instant::now();
        let placed = scheduler.place(policy, &job.group, *sample);
        let took = begun.elapsed();
        let counts = self.counts();
        let Ok(mut shards) = placed else {
            self.figures.outcome.refused += u64::from(counts);
            return Some(job);
        };
        shards.iter_mut().for_each(Shard::run);
        let waited = self.now - job.arrived;
        if counts {
            self.figures.times.push(took.as_nanos() as u64);
            self.figures.outcome.placed += 1;
            let longest = &mut self.figures.outcome.longest_wait;
            *longest = waited.max(*longest);
            let (sum, jobs) = &mut self.parts[job.tenant];
            *sum += job.length as f64 / (job.length + waited) as f64;
            *jobs += 1;
        }
        let length = if job.is_killed { job.length / 2 } else { job.length };
        let at = self.idle.pop().unwrap_or_else(|| {
            self.running.push(None);
            self.running.len() - 1
        });
        let start = self.number;
        self.running[at] = Some((job, shards, start));
        self.plan(self.now + length, ClusterEvent::End(at, start));
        None
    }

    fn end(&mut self, at: usize, start: u64) {
        if self.running[at].take_if(|(_, _, number)| *number == start).is_some() {
            self.idle.push(at);
        }
    }

    /// Nodes report what has changed, and each scheduler tries its queue in order.
    fn round(&mut self) {
        self.plan(self.now + ROUND, ClusterEvent::Round);
        for node in self.nodes.take_changed() {
            self.nodes.count(self.schedulers.len() as u64);
            self.schedulers.iter().for_each(|scheduler| scheduler.hear_of(node));
        }
        for scheduler in 0..self.schedulers.len() {
            // A job that needs as much as one of its kind that was just refused has no room.
            let mut refused = [u64::MAX; TENANTS.len()];
            for job in mem::take(&mut self.queues[scheduler]) {
                let tenant = job.tenant;
                let left = if job.bytes < refused[tenant] { self.start(job) } else { Some(job) };
                if let Some(job) = left {
                    refused[tenant] = refused[tenant].min(job.bytes);
                    self.queues[scheduler].push_back(job);
                }
            }
        }
    }

    /// Ends a node with all jobs that have a shard there. They are placed again.
    fn take_down(&mut self, node: usize) {
        if !self.nodes.stop(node) {
            return;
        }
        self.plan(self.now + NODE_IS_DOWN, ClusterEvent::Up(node));
        for at in 0..self.running.len() {
            let is_there = |(_, shards, _): &mut (Job, Vec<Shard>, u64)| {
                shards.iter().any(|s| s.node() == node)
            };
            let Some((job, shards, _)) = self.running[at].take_if(is_there) else { continue };
            drop(shards);
            self.idle.push(at);
            self.figures.outcome.lost += u64::from(self.counts());
            self.queues[job.scheduler].push_back(Job { arrived: self.now, ..job });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(nodes: usize, policy: Policy) -> Settings {
        let accounting = Accounting::Sums;
        let (schedulers, sample, load, seconds, seed) = (3, None, 95, (300, 600), 7);
        let node_lives = 1.0;
        Settings { nodes, schedulers, policy, sample, load, node_lives, seconds, seed, accounting }
    }

    fn run(settings: Settings) -> Figures {
        World::new(settings).unwrap().run()
    }

    #[test]
    fn equal_seeds_give_equal_outcomes_and_others_do_not() {
        let outcome = |seed| run(Settings { seed, ..settings(12, Policy::MostFree) }).outcome;
        assert_eq!(outcome(1), outcome(1));
        assert_ne!(outcome(1), outcome(2));
    }

    #[test]
    fn sums_give_the_outcome_of_ledgers() {
        for policy in [Policy::MostFree, Policy::BestFit] {
            let mut settings = settings(4, policy);
            settings.seconds = (100, 300);
            let by_sums = run(settings.clone());
            settings.accounting = Accounting::Ledgers;
            assert_eq!(run(settings).outcome, by_sums.outcome);
        }
    }

    #[test]
    fn all_that_is_claimed_is_released_whatever_dies() {
        for (policy, sample) in [
            (Policy::MostFree, None),
            (Policy::BestFit, Some(4)),
            (Policy::RoundRobin, None),
            (Policy::Affinity, Some(2)),
        ] {
            let mut settings = Settings { sample, load: 120, ..settings(40, policy) };
            settings.seconds = (300, 1500);
            let ClusterOutcome { placed, refused, utilisation, fairness, lost, left, .. } =
                run(settings).outcome;
            assert!(placed > 500 && refused > 0 && lost > 0, "{placed} {refused} {lost}");
            assert!(utilisation > 0.6 && utilisation <= 1.0, "{utilisation}");
            assert!(fairness > 0.2 && fairness <= 1.0, "{fairness}");
            assert_eq!(left, 0);
        }
    }

    #[test]
    fn an_idle_cluster_places_at_once_with_two_messages_for_each_shard_and_its_reports() {
        let mut settings = Settings { load: 5, schedulers: 1, ..settings(20, Policy::MostFree) };
        settings.node_lives = 1e6;
        let ClusterOutcome { placed, refused, messages, longest_wait, fairness, .. } =
            run(settings).outcome;
        assert_eq!((refused, longest_wait), (0, 0));
        assert!((fairness - 1.0).abs() < 1e-9);
        assert!(messages > 2 * placed && messages < 8 * placed, "{messages} for {placed}");
    }

    #[test]
    fn the_index_is_one_for_equal_shares_and_a_part_for_one_that_has_all() {
        assert!((jain(&[0.5; 5]) - 1.0).abs() < 1e-9);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-9);
        assert!((jain(&[]) - 1.0).abs() < 1e-9);
    }
}
