//! A stager's slots: who hands them to the driver.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]

mod rig;
mod support;

use aquifer_driver::Call;
use aquifer_host::{Source, Stager, kernel::Kernel as System, region::Host};
use rig::{GPU, PATIENCE, Rig, SLOT, config, pattern};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

/// A stager for a machine with more processors than this one may have.
fn on_many_processors(rig: &Rig, workers: usize) -> Stager {
    let host = Host::new(support::fixture("two-socket"), System::new()).with_driver(rig.sim.driver(), GPU);
    let mut config = config();
    config.up_workers = workers;
    let stager = Stager::new(&host, &rig.pool, &rig.streams, config).unwrap();
    assert_eq!(stager.config().up_workers, workers);
    stager
}

fn eventually(what: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while !what() && Instant::now() < deadline {
        thread::yield_now();
    }
    what()
}

/// Counts how often it is read.
struct Counting(Vec<u8>, AtomicUsize);

impl Source for Counting {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.read_at(offset, into)
    }
}

#[test]
fn while_the_driver_keeps_one_worker_the_others_fill_all_their_slots() {
    let rig = Rig::new();
    let stager = on_many_processors(&rig, 4);
    let source = Arc::new(Counting(pattern(40 * SLOT, 3), AtomicUsize::new(0)));
    let ticket = {
        let held = rig.sim.stall(Call::CopyToDevice);
        let ticket = stager.read(source.clone(), 0, rig.operand(40 * SLOT)).unwrap();
        assert!(held.wait_for(1, PATIENCE));
        // Two each, and one of the one that is kept.
        let filled = || source.1.load(Ordering::Relaxed);
        assert!(eventually(|| filled() >= 7), "{} slots filled: who hands in does not wait", filled());
        ticket
    };
    let x = ticket.wait().unwrap();
    assert!(rig.bytes(&x) == source.0);
    drop((x, stager));
    rig.assert_all_given_back();
}
