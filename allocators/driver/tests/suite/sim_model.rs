//! Compares the oracle with a plain search over random programs.
//!
//! In the search every action is a node of a graph and every guaranteed order is an edge. Two
//! conflicting accesses race if no path joins them. The oracle keeps no graph and must report the
//! same.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, Machine};
use aquifer_core::random::SplitMix64;
use aquifer_driver::{
    Access, DeviceRange, RawEvent, RawStream,
    sim::{Sim, ViolationKind},
};

/// All actions, in the order in which the host requested them.
#[derive(Default)]
struct Graph {
    /// For each node, whether each earlier node comes before it.
    before: Vec<Vec<bool>>,
}

impl Graph {
    /// Adds a node after the given ones, and after all their predecessors.
    fn add(&mut self, after: &[Option<usize>]) -> usize {
        let mut before = vec![false; self.before.len()];
        for &node in after.iter().flatten() {
            before[node] = true;
            for (earlier, _) in self.before[node].iter().enumerate().filter(|&(_, &is)| is) {
                before[earlier] = true;
            }
        }
        self.before.push(before);
        self.before.len() - 1
    }
}

/// An access that was made.
struct Made {
    node: usize,
    from: u64,
    to: u64,
    access: Access,
}

struct Random(SplitMix64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0.next_u64() % n
    }
}

const STREAMS: usize = 4;
const EVENTS: usize = 3;

/// Runs one program until its first race. Returns the number of its accesses, and whether it raced.
fn program(sim: Sim, seed: u64) -> (usize, bool) {
    let mut random = Random(SplitMix64::new(seed));
    let m = Machine::new(sim);
    let x = m.alloc(64);
    let streams: Vec<RawStream> = (0..STREAMS).map(|_| m.stream()).collect();
    let events: Vec<RawEvent> = (0..EVENTS).map(|_| m.driver.event_create(GPU).unwrap()).collect();

    let mut graph = Graph::default();
    let mut made: Vec<Made> = Vec::new();
    // The last node of the host and of each stream, and the node after which each event was
    // recorded.
    let mut host: Option<usize> = None;
    let mut tails = [None; STREAMS];
    let mut recorded = [None; EVENTS];

    for _ in 0..60 {
        let (s, e) = (random.below(STREAMS as u64) as usize, random.below(EVENTS as u64) as usize);
        match random.below(10) {
            0 => {
                m.driver.event_record(events[e], streams[s]).unwrap();
                let node = graph.add(&[host, tails[s]]);
                (tails[s], recorded[e]) = (Some(node), Some(node));
            }
            1 | 2 => {
                m.driver.stream_wait_event(streams[s], events[e]).unwrap();
                tails[s] = Some(graph.add(&[host, tails[s], recorded[e]]));
            }
            3 if random.below(4) == 0 => {
                m.driver.stream_synchronize(streams[s]).unwrap();
                host = Some(graph.add(&[host, tails[s]]));
            }
            3 => {
                if m.driver.event_query(events[e]).unwrap() {
                    host = Some(graph.add(&[host, recorded[e]]));
                }
            }
            4 if random.below(4) == 0 => {
                m.driver.event_synchronize(events[e]).unwrap();
                host = Some(graph.add(&[host, recorded[e]]));
            }
            4 => {
                m.sim.step(streams[s]);
            }
            _ => {
                // The stream's own part, or any part after a fence that is rarely omitted.
                let own = random.below(3) > 0;
                let from = if own { s as u64 * 16 } else { random.below(64) };
                let to = if own { from + 16 } else { (from + 1 + random.below(32)).min(64) };
                if !own || random.below(4) > 0 {
                    for other in (0..STREAMS).filter(|&other| other != s) {
                        if random.below(100) == 0 {
                            continue;
                        }
                        m.order(streams[other], streams[s]);
                        tails[s] = Some(graph.add(&[host, tails[s], tails[other]]));
                    }
                }
                let access = [Access::Read, Access::Read, Access::Write, Access::ReadWrite]
                    [random.below(4) as usize];
                let range = DeviceRange { address: x.address + from, bytes: to - from, ..x };
                m.sim.access(streams[s], range, access, None).unwrap();
                let node = graph.add(&[host, tails[s]]);
                tails[s] = Some(node);
                let races = |other: &Made| {
                    other.from < to
                        && from < other.to
                        && other.access.conflicts(access)
                        && !graph.before[node][other.node]
                };
                let expected: Vec<Access> =
                    made.iter().filter(|other| races(other)).map(|other| other.access).collect();
                let found = m.sim.violations();
                assert_eq!(
                    found.is_empty(),
                    expected.is_empty(),
                    "seed {seed}, {:?}: {found:?}, {expected:?}",
                    m.sim.config().schedule
                );
                for fault in &found {
                    let partner = match fault.kind {
                        ViolationKind::ReadWrite => expected.contains(&Access::Read),
                        ViolationKind::WriteRead => {
                            !access.writes() && expected.iter().any(|a| a.writes())
                        }
                        ViolationKind::WriteWrite => {
                            access.writes() && expected.iter().any(|a| a.writes())
                        }
                        _ => false,
                    };
                    assert!(partner, "seed {seed}: {fault}, {expected:?}");
                }
                made.push(Made { node, from, to, access });
                if !found.is_empty() {
                    return (made.len(), true);
                }
            }
        }
    }
    (made.len(), false)
}

#[test]
fn the_oracle_finds_the_first_race_of_a_program_and_nothing_before_it() {
    let (mut accesses, mut raced) = (0, 0);
    let programs = 1500;
    for seed in 0..programs {
        let sim = Sim::h200(1).symbolic();
        let sim = match seed % 3 {
            0 => sim,
            1 => sim.stepped(),
            _ => sim.seeded(seed),
        };
        let (made, race) = program(sim, seed);
        accesses += made;
        raced += usize::from(race);
    }
    // The programs must cover both cases and must not all end early.
    assert!(raced > 300 && programs as usize - raced > 100, "{raced} raced");
    assert!(accesses > 6 * programs as usize, "{accesses} accesses");
}
