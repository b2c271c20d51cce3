//! Tests that a sink may use the pool whose events it receives, and that it is told of limits and
//! of what is in use outside.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, PATIENCE, Rig};
use aquifer_core::{
    Action, Budget, Event, EventSink, Recorder, Tag,
    event::{NullSink, RingSink},
};
use aquifer_device::{Debugging, DevicePool, PoolConfig, Request};
use aquifer_driver::{Call, DeviceId, sim::Sim};
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

const PROGRAM: &str = "the program of a test of sinks";

/// Uses its pool at each event of the program.
#[derive(Debug, Default)]
struct PoolUser {
    pool: Mutex<Option<(DevicePool, Stream)>>,
    seen: AtomicU64,
    used: AtomicU64,
}

impl EventSink for PoolUser {
    fn record(&self, event: &Event) {
        let Some((pool, stream)) = self.pool.lock().unwrap().clone() else { return };
        let before = pool.stats();
        // Its own blocks have no tag, or each of them would be followed by another.
        if event.tag != Tag::named(PROGRAM) {
            return;
        }
        self.seen.fetch_add(1, Ordering::Relaxed);
        let block = pool.alloc(&stream, Request::bytes(4096)).unwrap();
        assert_eq!(pool.stats().blocks, before.blocks + 1);
        drop(block);
        pool.trim(0).unwrap();
        // A panic in a sink goes no further, so success is counted.
        self.used.fetch_add(1, Ordering::Relaxed);
    }
}

/// Allocates and frees blocks of several kinds. Returns how many events the sink received, and at
/// how many it has used the pool.
fn run(set: impl FnOnce(&mut PoolConfig)) -> (u64, u64) {
    let sink = Arc::new(PoolUser::default());
    let rig = Rig::on(Sim::h200(1), 64, |config| {
        set(config);
        config.recorder = Some(Arc::new(Recorder::new(sink.clone())));
    });
    let (s, u) = (rig.stream(), rig.stream());
    *sink.pool.lock().unwrap() = Some((rig.pool.clone(), u.clone()));
    let request = |bytes| Request::bytes(bytes).tag(Tag::named(PROGRAM));
    for bytes in [512, MIB, 5 * MIB] {
        let block = rig.pool.alloc(&s, request(bytes)).unwrap();
        block.record_use(&u, aquifer_driver::Access::Read).unwrap();
        drop(block);
        drop(rig.pool.alloc_stable(&s, request(bytes)));
    }
    rig.pool.trim(0).unwrap();
    // The sink holds the pool, and the pool the sink.
    *sink.pool.lock().unwrap() = None;
    rig.assert_silent();
    drop((s, u, rig));
    (sink.seen.load(Ordering::Relaxed), sink.used.load(Ordering::Relaxed))
}

/// A name and what it sets.
type Mode = (&'static str, fn(&mut PoolConfig));

#[test]
fn a_sink_that_uses_the_pool_whose_events_it_receives_waits_for_nothing() {
    let modes: [Mode; 3] = [
        ("plain", |_| ()),
        ("all checks", |config| config.debug = Debugging::all()),
        ("bypass", |config| config.bypass = true),
    ];
    for (name, set) in modes {
        let (done, over) = mpsc::channel();
        let worker = thread::spawn(move || done.send(run(set)).unwrap());
        let (seen, used) = over.recv_timeout(PATIENCE).expect("it waits for itself, or has failed");
        worker.join().unwrap();
        // Each of the blocks of a cache is allocated and freed at least.
        assert!(seen >= 6 && used == seen, "{name}: the pool served {used} of {seen}");
    }
}

#[test]
fn the_tightest_limit_is_recorded_at_the_opening_and_before_what_a_change_has_caused() {
    let ring = Arc::new(RingSink::new(256));
    let machine = Budget::unlimited("machine");
    let limits = || {
        let events = ring.take().into_iter().filter(|e| e.action != Action::Complete);
        events.map(|e| (e.action, e.bytes)).collect::<Vec<_>>()
    };
    let open = |budget: Budget| {
        let recorder = Arc::new(Recorder::new(ring.clone()));
        Rig::on(Sim::h200(1), 64, |c| {
            c.recorder = Some(recorder);
            c.budget = Some(budget);
            c.wait = Duration::ZERO;
        })
    };
    drop(open(machine.child("unlimited", u64::MAX)));
    assert_eq!(limits(), []);
    let rig = open(machine.child("pool", 32 * MIB));
    assert_eq!(limits(), [(Action::Limit, 32 * MIB)]);
    let s = rig.stream();
    let block = rig.alloc(&s, 1000);
    let first = limits();
    assert!(first.iter().all(|(action, _)| *action != Action::Limit), "{first:?}");

    // That of a budget above counts too, and is recorded before the failure that it causes.
    machine.set_limit(16 * MIB);
    assert!(rig.pool.alloc(&s, Request::bytes(20 * MIB)).is_err());
    let (told, failed) = (limits(), (Action::Fail, 20 * MIB));
    assert_eq!(told.first(), Some(&(Action::Limit, 16 * MIB)), "{told:?}");
    assert_eq!(told.iter().filter(|event| **event == failed).count(), 1, "{told:?}");
    // A limit that is not the lowest one changes nothing.
    machine.set_limit(u64::MAX);
    rig.pool.budget().set_limit(16 * MIB);
    rig.pool.poll().unwrap();
    assert_eq!(limits(), []);
    rig.pool.budget().set_limit(u64::MAX);
    rig.pool.poll().unwrap();
    assert_eq!(limits(), [(Action::Limit, u64::MAX)]);
    drop(block);
}

#[test]
fn an_event_of_moved_handles_has_their_bytes() {
    let ring = Arc::new(RingSink::new(64));
    let recorder = Arc::new(Recorder::new(ring.clone()));
    let rig = Rig::on(Sim::h200(1), 32, |config| config.recorder = Some(recorder));
    let s = rig.stream();
    let blocks: Vec<_> = (0..8).map(|_| rig.alloc(&s, 4 * MIB)).collect();
    // Every second one stays: 16 MiB are free in four places.
    let kept: Vec<_> = blocks.into_iter().step_by(2).collect();
    s.synchronize().unwrap();
    let large = rig.alloc(&s, 16 * MIB);
    let events = ring.take();
    let moved: u64 = events.iter().filter(|e| e.action == Action::Move).map(|e| e.bytes).sum();
    let handle = 2 * MIB;
    assert_eq!(moved, rig.pool.stats().moves * handle);
    assert!(moved > 0);
    drop((kept, large));
}

#[test]
fn what_the_device_has_in_use_outside_is_recorded_before_growth_and_failures_alone() {
    const GPU: DeviceId = DeviceId(0);
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let ring = Arc::new(RingSink::new(256));
    let recorder = Arc::new(Recorder::new(ring.clone()));
    let rig = Rig::on(sim, 64, |c| {
        c.recorder = Some(recorder);
        c.wait = Duration::ZERO;
    });
    let told = || {
        let events = ring.take().into_iter().map(|e| (e.action, e.bytes));
        events.filter(|(action, _)| *action != Action::Complete).collect::<Vec<_>>()
    };
    let queries = || driver.calls().get(Call::MemoryInfo);
    let theirs = driver.mem_alloc(GPU, 10 * MIB).unwrap();
    assert_eq!((told(), queries()), (vec![(Action::Limit, 64 * MIB)], 0));
    let s = rig.stream();
    let block = rig.alloc(&s, 1000);
    let events = told();
    assert_eq!(events[0], (Action::Outside, 10 * MIB), "before {events:?}");
    assert!(matches!(events[1..], [(Action::Grow, _), (Action::Allocate, 1000)]), "{events:?}");
    // Neither served from the cache nor repeated while it is the same.
    let asked = queries();
    for _ in 0..100 {
        drop(rig.alloc(&s, 1000));
    }
    assert_eq!(queries(), asked);
    let large = rig.alloc(&s, 8 * MIB);
    assert!(queries() > asked, "the pool has grown");
    assert!(told().iter().all(|(action, _)| *action != Action::Outside));

    // A change is recorded before the failure that follows from it.
    let more = driver.mem_alloc(GPU, 20 * MIB).unwrap();
    assert_eq!(told(), []);
    assert!(rig.pool.alloc(&s, Request::bytes(100 * MIB)).is_err());
    let (outside, failed) = ((Action::Outside, 30 * MIB), (Action::Fail, 100 * MIB));
    assert_eq!(told(), [outside, failed]);
    for address in [theirs, more] {
        #[expect(unsafe_code, reason = "frees memory of another library")]
        // SAFETY: 1. `mem_alloc` returned it, and it is freed once. 2. no work uses it.
        unsafe { driver.mem_free(GPU, address) }.unwrap();
    }
    // Stable memory grows by a path of its own.
    let stable = rig.stable(&s, 2 * MIB);
    let grown = (Action::Grow, 2 * MIB);
    assert_eq!(told(), [(Action::Outside, 0), grown, (Action::Allocate, 2 * MIB)]);
    drop((block, large, stable));
}

#[test]
fn the_driver_is_not_asked_for_a_sink_that_drops_the_answer() {
    for recorder in [None, Some(Arc::new(Recorder::new(Arc::new(NullSink))))] {
        let sim = Sim::h200(1);
        let driver = sim.driver();
        let rig = Rig::on(sim, 64, |c| {
            c.recorder = recorder;
            c.wait = Duration::ZERO;
        });
        let s = rig.stream();
        let block = rig.alloc(&s, 8 * MIB);
        assert!(rig.pool.alloc(&s, Request::bytes(100 * MIB)).is_err());
        assert_eq!(driver.calls().get(Call::MemoryInfo), 0);
        drop(block);
    }
}
