//! Tests of runtimes that share memory by ledgers. Two runtimes on two simulated machines stand for
//! two processes: the ledgers do not know the difference.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::assert_silent;
use aquifer::{
    Budget, MemoryError, PoolConfig, Request, Runtime, RuntimeBuilder, host::Topology, sim::Sim,
};
use aquifer_status::ledger::Ledger;
use std::{env, fs, path::PathBuf, process, time::Instant};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 100 * MIB;

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(env::temp_dir().join(format!("aquifer-sharing-{name}-{}", process::id())))
    }

    fn builder(&self, sim: &Sim, guarantee: u64) -> RuntimeBuilder {
        Runtime::builder().driver(sim.driver()).shared(guarantee).ledger_folder(&self.0)
    }

    fn claimed(&self) -> u64 {
        Ledger::existing(&self.0, "simulated-0").unwrap().figures().claimed()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_runtime_gets_within_its_guarantee_what_another_has_in_caches() {
    let scratch = Scratch::new("trade");
    let sims = [Sim::h200(1).capacity(CAPACITY), Sim::h200(1).capacity(CAPACITY)];
    let build = |sim: &Sim, guarantee: u64| {
        scratch.builder(sim, guarantee * MIB).device_budget(95 * MIB).build().unwrap()
    };
    let (first, second) = (build(&sims[0], 60), build(&sims[1], 40));
    let (one, two) = (first.device(0).unwrap(), second.device(0).unwrap());
    let (s, t) = (one.stream().unwrap(), two.stream().unwrap());
    for _ in 0..3 {
        // Nine tenths of the device, of which the second borrows most, and all of it is idle then.
        drop(two.alloc(&t, Request::bytes(90 * MIB)).unwrap());
        assert!(two.stats().physical >= 90 * MIB);
        let block = one.alloc(&s, Request::bytes(60 * MIB)).unwrap();
        assert!(scratch.claimed() <= CAPACITY && two.stats().physical <= 40 * MIB);
        assert_eq!(scratch.claimed(), one.budget().used() + two.budget().used());
        // Live memory stays, and what is guaranteed is not asked for.
        let refused = two.alloc(&t, Request::bytes(90 * MIB)).map(drop);
        assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
        drop(two.alloc(&t, Request::bytes(40 * MIB)).unwrap());
        drop(block);
        // Its own caches within the guarantee it gives back by its own choice only.
        assert!(one.stats().physical >= 60 * MIB);
        let _room = one.give_back(CAPACITY, Some(Instant::now()));
        assert_eq!(one.stats().physical, 0);
    }
    drop((s, first));
    drop((t, second));
    assert_eq!(scratch.claimed(), 0);
    sims.iter().for_each(assert_silent);
}

#[test]
fn a_reserved_guarantee_is_not_lent_and_the_terms_are_those_of_the_builder() {
    let scratch = Scratch::new("terms");
    let sims = [Sim::h200(1).capacity(CAPACITY), Sim::h200(1).capacity(CAPACITY)];
    let reserving = scratch.builder(&sims[0], 60 * MIB).reserve_guarantees().shared_priority(3);
    let reserving = reserving.device_budget(80 * MIB).build().unwrap();
    let other = scratch.builder(&sims[1], 0).build().unwrap();
    let pool = other.device(0).unwrap();
    let s = pool.stream().unwrap();
    assert!(pool.alloc(&s, Request::bytes(44 * MIB)).is_err());
    drop(pool.alloc(&s, Request::bytes(40 * MIB)).unwrap());
    let shown = Ledger::existing(&scratch.0, "simulated-0").unwrap().figures();
    let first = &shown.members[0];
    assert_eq!((first.guarantee, first.is_reserved), (60 * MIB, true));
    assert_eq!((first.limit, first.priority), (80 * MIB, 3));
    drop((s, other, reserving));
    sims.iter().for_each(assert_silent);
}

#[test]
fn pinned_memory_is_claimed_from_a_ledger_of_its_own() {
    let scratch = Scratch::new("pinned");
    let sim = Sim::h200(1).capacity(CAPACITY);
    let builder = Runtime::builder().driver(sim.driver()).ledger_folder(&scratch.0);
    let rt = builder.shared_pinned(0).pinned_budget(64 * MIB).build().unwrap();
    let pinned = rt.pinned_near(0);
    let buffer = pinned.buffer::<u8>(8 << 20).unwrap();
    let ledger = Ledger::existing(&scratch.0, "pinned-memory").unwrap();
    assert_eq!(ledger.figures().claimed(), pinned.budget().used());
    assert!(ledger.figures().claimed() >= 8 * MIB && pinned.budget().limit() == 64 * MIB);
    drop((buffer, rt));
    assert_eq!(ledger.figures().claimed(), 0);
    assert_silent(&sim);
}

#[test]
fn a_cap_of_the_administrator_limits_the_share_and_not_the_capacity() {
    let scratch = Scratch::new("cap");
    let sim = Sim::h200(1).capacity(CAPACITY);
    let host = Topology::read_under(&scratch.0.join("no machine")).unwrap();
    let capped = |limit: &str| host.clone().with_mps_limit(limit);
    let build = |guarantee, topology| scratch.builder(&sim, guarantee).topology(topology).build();
    let rt = build(0, capped("0=32M,1=1M")).unwrap();
    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let figures = || Ledger::existing(&scratch.0, "simulated-0").unwrap().figures();
    assert_eq!((figures().capacity, figures().members[0].limit), (CAPACITY, 32 * MIB));
    assert!(pool.alloc(&s, Request::bytes(33 * MIB)).is_err());
    drop(pool.alloc(&s, Request::bytes(32 * MIB)).unwrap());
    // A guarantee above the cap, and a cap that cannot be read, are errors of the builder.
    for topology in [capped("0=32M"), capped("32M")] {
        let refused = build(33 * MIB, topology).map(drop).unwrap_err();
        assert!(matches!(refused, MemoryError::BadSetting { .. }), "{refused}");
        assert!(refused.to_string().contains("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "{refused}");
    }
    drop((s, rt));
    assert_silent(&sim);
}

#[test]
fn a_share_that_cannot_be_had_is_an_error_of_the_builder() {
    let scratch = Scratch::new("refused");
    let sim = Sim::h200(1).capacity(CAPACITY);
    let refused = |builder: RuntimeBuilder| match builder.build() {
        Err(error @ MemoryError::BadSetting { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refused(scratch.builder(&sim, CAPACITY + 1)).contains("guarantee"));
    let config = PoolConfig::with_budget(Budget::new("own", CAPACITY));
    refused(scratch.builder(&sim, 0).pools(config));
    fs::write(scratch.0.join("simulated-0.ledger"), "noise").unwrap();
    assert!(refused(scratch.builder(&sim, 0)).contains("ledger"));
}
