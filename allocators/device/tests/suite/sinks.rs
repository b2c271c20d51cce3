//! Tests that a sink may use the pool whose events it receives.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, PATIENCE, Rig};
use aquifer_core::{Event, EventSink, Recorder, Tag};
use aquifer_device::{Debugging, DevicePool, PoolConfig, Request};
use aquifer_driver::sim::Sim;
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
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
