//! Helpers that the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a support function that fails is a failed test")]

pub(crate) mod on_device;

use aquifer_core::{Budget, Gate, Result};
use aquifer_host::{
    kernel::{Faults, Kernel, Span},
    pool,
    region::{Host, retry_stranded},
    topology::{NodeId, Topology},
};
use std::{
    path::Path,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Longer than any operation takes on a busy machine, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Less than a huge page, so that sizes in it are not rounded up.
pub(crate) const MIB: usize = 1 << 20;

/// Returns the machine that runs the tests, whatever the environment states.
pub(crate) fn topology() -> Topology {
    Topology::read_under(Path::new("/")).unwrap()
}

pub(crate) fn fixture(name: &str) -> Topology {
    Topology::read_under(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
        .unwrap()
}

/// Returns a node of this machine with usable CPUs and memory, or `None` on a kernel without NUMA.
pub(crate) fn some_node(topology: &Topology) -> Option<NodeId> {
    topology
        .nodes()
        .iter()
        .find(|n| n.memory_allowed && !n.allowed_cpus.is_empty())
        .map(|node| node.id)
}

pub(crate) fn host() -> Host {
    Host::new(topology(), Kernel::new())
}

/// Returns a machine whose system calls fail by plan.
pub(crate) fn faulty_host() -> (Host, Arc<Faults>) {
    let faults = Arc::new(Faults::new());
    (Host::new(topology(), Kernel::with_faults(faults.clone())), faults)
}

/// Returns how many pages of a span are present, and on which nodes.
pub(crate) fn present(span: Span) -> usize {
    let pages: Vec<usize> = (span.start..span.end()).step_by(4096).collect();
    Kernel::new().nodes_of(&pages).unwrap().iter().filter(|&&node| node >= 0).count()
}

/// Sweeps until nothing is charged.
#[track_caller]
pub(crate) fn sweep_out(budget: &Budget) {
    given_back(budget, pool::sweep);
}

/// Retries what the driver or the kernel kept until nothing is charged.
#[track_caller]
pub(crate) fn retry_out(budget: &Budget) {
    given_back(budget, || _ = retry_stranded());
}

/// Remaining memory belongs to the process: the thread of another test may be processing it.
#[track_caller]
fn given_back(budget: &Budget, give_back: impl Fn()) {
    let deadline = Instant::now() + PATIENCE;
    while budget.used() > 0 && Instant::now() < deadline {
        give_back();
        thread::yield_now();
    }
    assert_eq!(budget.used(), 0);
}

/// A gate that a test opens.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    open: Mutex<bool>,
    changed: Condvar,
    /// How often it was polled.
    pub(crate) asked: AtomicUsize,
}

impl Latch {
    pub(crate) fn shut() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub(crate) fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Gate for Latch {
    fn is_open(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        *self.open.lock().unwrap()
    }

    fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        let mut open = self.open.lock().unwrap();
        while !*open {
            let Some(deadline) = deadline else {
                open = self.changed.wait(open).unwrap();
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            open = self.changed.wait_timeout(open, left).unwrap().0;
        }
        Ok(*open)
    }
}
