//! Tests of the deadline of a request: it has one, whatever it waits for, and no wait begins after
//! it.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, PATIENCE, Rig, assert_silent};
use aquifer_core::{Budget, Tag};
use aquifer_device::{Adoption, Block, DevicePool, Offer, PoolConfig, Reclaim, Request};
use aquifer_driver::{Call, DeviceId, sim::Sim};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// A reclaimer that has nothing to give, but waits. It records the deadlines that it gets.
#[derive(Default)]
struct Witness {
    /// A pool whose memory moves whenever it is asked for its offer, as if by another thread.
    mover: Mutex<Option<DevicePool>>,
    deadlines: Mutex<Vec<Option<Instant>>>,
}

impl Witness {
    /// Returns the number of calls, and of different deadlines.
    fn seen(&self) -> (usize, usize) {
        let deadlines = self.deadlines.lock().unwrap();
        (deadlines.len(), deadlines.iter().collect::<BTreeSet<_>>().len())
    }
}

impl Reclaim for Witness {
    fn name(&self) -> &'static str {
        "a witness"
    }
    fn offer(&self) -> Offer {
        let mover = self.mover.lock().unwrap();
        mover.iter().for_each(|pool| drop(pool.trim(0)));
        Offer { bytes: MIB, cost: Duration::ZERO }
    }
    fn reclaim(&self, _bytes: u64, deadline: Option<Instant>) {
        self.deadlines.lock().unwrap().push(deadline);
    }
    fn waits(&self) -> bool {
        true
    }
}

#[test]
fn all_rounds_of_a_request_have_one_deadline() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 8, |config| config.wait = PATIENCE);
    let s = rig.stream();
    let live = rig.alloc(&s, 8 * MIB);
    let witness = Arc::new(Witness::default());
    *witness.mover.lock().unwrap() = Some(rig.pool.clone());
    let _registration = rig.budget.on_need(&witness);
    assert!(rig.pool.alloc(&s, Request::bytes(MIB)).is_err());
    let (calls, deadlines) = witness.seen();
    assert!(calls > 2, "memory moves, so the request is tried again: {calls}");
    assert_eq!(deadlines, 1);
    // The next request has its own.
    assert!(rig.pool.alloc(&s, Request::bytes(MIB)).is_err());
    assert_eq!(witness.seen().1, 2);
    *witness.mover.lock().unwrap() = None;
    drop(live);
}

#[test]
fn a_limit_and_the_pool_share_the_deadline_of_a_request() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 8, |config| config.wait = PATIENCE);
    let s = rig.stream();
    let live = rig.take(&s, 8);
    let (tag, more) = (Tag::named("with one deadline"), Request::bytes(2 * MIB));
    let (of_tag, of_tenant) = (rig.pool.limit_tag(tag, MIB), Budget::new("a tenant", MIB));
    let tenant = rig.pool.for_tenant(&of_tenant).unwrap();
    type Refused<'a> = &'a dyn Fn() -> bool;
    let kinds: [(&Budget, &[Refused<'_>]); 2] = [
        (
            &of_tag,
            &[
                &|| rig.pool.alloc(&s, more.tag(tag)).is_err(),
                &|| rig.pool.alloc_stable(&s, more.tag(tag)).is_err(),
                &|| rig.pool.parkable(tag).unwrap().alloc(&s, more).is_err(),
            ],
        ),
        (
            &of_tenant,
            &[&|| tenant.alloc(&s, more).is_err(), &|| tenant.alloc_stable(&s, more).is_err()],
        ),
    ];
    for (limit, requests) in kinds {
        let witness = Arc::new(Witness::default());
        // The limit refuses until its reclaimer is called, then the pool's budget does.
        let raise = Arc::new(Raise(limit.clone(), witness.clone()));
        let _registrations = (limit.on_need(&raise), rig.budget.on_need(&witness));
        for is_refused in requests {
            limit.set_limit(MIB);
            witness.deadlines.lock().unwrap().clear();
            assert!(is_refused());
            let (calls, deadlines) = witness.seen();
            assert!(calls >= 2 && deadlines == 1, "{calls} calls, {deadlines} deadlines");
        }
    }
    drop(live);
}

/// Raises a limit when it is called.
struct Raise(Budget, Arc<Witness>);

impl Reclaim for Raise {
    fn name(&self) -> &'static str {
        "a limit that is raised"
    }
    fn offer(&self) -> Offer {
        Offer { bytes: MIB, cost: Duration::ZERO }
    }
    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        self.1.reclaim(bytes, deadline);
        self.0.set_limit(64 * MIB);
    }
}

/// Leaves a free block of 2 MiB of the default stream of a thread that has ended: only a wait for
/// the device can prove its work.
fn leave_without_proof(rig: &Rig) {
    let of_thread = || {
        let own = rig.pool.streams().thread_default().unwrap();
        rig.alloc(&own, 2 * MIB)
    };
    drop::<Block>(thread::scope(|scope| scope.spawn(of_thread).join().unwrap()));
}

fn syncs(rig: &Rig) -> u64 {
    rig.calls(Call::DeviceSynchronize)
}

#[test]
fn no_wait_for_the_device_begins_after_the_deadline() {
    let rig = Rig::on(Sim::h200(1).stepped(), 32, |config| {
        config.adoption = Adoption::DoneOnly;
        config.wait = Duration::from_millis(20);
    });
    leave_without_proof(&rig);
    let (s, u) = (rig.stream(), rig.stream());
    let mut buffer = rig.bytes(&s, 28 * MIB);
    s.fill(&mut buffer, 1).unwrap();
    drop(buffer);
    // The device runs nothing, so the wait for this work lasts until the deadline.
    assert!(rig.pool.alloc(&u, Request::bytes(30 * MIB)).is_err());
    assert_eq!(syncs(&rig), 0);
    rig.assert_silent();
}

#[test]
fn a_request_without_a_deadline_waits_for_the_device_unless_a_capture_is_announced() {
    let rig = Rig::on(Sim::h200(1), 4, |config| config.wait = Duration::MAX);
    leave_without_proof(&rig);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    assert!(rig.pool.alloc(&u, Request::bytes(4 * MIB)).is_err());
    assert_eq!(syncs(&rig), 0);
    drop(announced);
    assert!(rig.pool.alloc(&u, Request::bytes(4 * MIB)).is_ok());
    assert!(syncs(&rig) > 0);
    rig.assert_silent();
}

#[test]
fn a_pool_in_bypass_mode_waits_for_the_device_for_others_only_before_the_deadline() {
    for (wait, served) in [(Duration::ZERO, false), (PATIENCE, true)] {
        let sim = Sim::h200(1);
        let budget = Budget::new("both", 16 * MIB);
        let open = |bypass: bool| {
            let mut config = PoolConfig::with_budget(budget.clone());
            (config.wait, config.bypass) = (wait, bypass);
            DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
        };
        let (ours, theirs) = (open(false), open(true));
        let s = theirs.stream().unwrap();
        drop(theirs.alloc_stable(&s, Request::bytes(12 * MIB)).unwrap());
        let answer = ours.alloc(&ours.stream().unwrap(), Request::bytes(12 * MIB));
        assert_eq!(answer.is_ok(), served, "{answer:?}");
        assert_eq!(sim.driver().calls().get(Call::MemFree), u64::from(served));
        assert_silent(&sim);
    }
}

#[test]
fn a_request_waits_for_work_in_freed_parkable_memory() {
    for (wait, served) in [(Duration::ZERO, false), (Duration::MAX, true)] {
        let rig = Rig::on(Sim::h200(1).stepped(), 16, |config| {
            config.wait = wait;
            config.handle_bytes = 2 * MIB;
        });
        let (s, u) = (rig.stream(), rig.stream());
        let parkable = rig.pool.parkable(Tag::named("in use")).unwrap();
        let mut buffer = parkable.buffer::<u8>(&s, 12 << 20).unwrap();
        s.fill(&mut buffer, 1).unwrap();
        drop(buffer);
        let answer = rig.pool.alloc(&u, Request::bytes(12 * MIB));
        assert_eq!(answer.is_ok(), served, "{answer:?}");
        drop(answer);
        rig.assert_silent();
    }
}

#[test]
fn freed_blocks_whose_guards_are_reclaimed_wait_no_longer_than_the_reclaimer_may() {
    let sim = Sim::h200(1).stepped();
    let budget = Budget::new("both", 16 * MIB);
    let open = |set: &dyn Fn(&mut PoolConfig)| {
        let mut config = PoolConfig::with_budget(budget.clone());
        set(&mut config);
        DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
    };
    let ours = open(&|config| config.wait = Duration::from_millis(20));
    let theirs = open(&|config| {
        config.debug.canaries = true;
        config.adoption = Adoption::DoneOnly;
        // Without end: the device runs no work unless it is waited for.
        config.wait = Duration::MAX;
    });
    let (s, u) = (theirs.stream().unwrap(), theirs.stream().unwrap());
    let block = theirs.alloc(&s, Request::bytes(12 * MIB)).unwrap();
    let mut other = theirs.buffer::<u8>(&u, 4096).unwrap();
    u.fill(&mut other, 1).unwrap();
    block.record_use(&u, aquifer_driver::Access::Read).unwrap();
    drop(block);
    assert!(ours.alloc(&ours.stream().unwrap(), Request::bytes(12 * MIB)).is_err());
    assert!(sim.pending(u.raw()) > 0, "its work was not waited for");
    sim.run_all();
}
