//! Tests that violations of the oracle are reported with source lines of the program and never with
//! lines of this library.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_core::{Budget, Opaque, Recorder, Tag, event::RingSink};
use aquifer_device::{Block, Debugging, DeviceBuffer, DevicePool, PoolConfig, Request};
use aquifer_driver::{
    Access, DeviceId, DeviceRange, Operand, RawStream,
    sim::{Sim, Violation},
};
use aquifer_stream::Stream;
use std::sync::{Arc, Mutex};

/// Writes a range on a stream that is unknown to the library and not ordered with anything.
fn stray(rig: &Rig, on: RawStream, range: DeviceRange) {
    rig.sim.access(on, range, Access::Write, None).unwrap();
}

/// Asserts that all violations are between lines of this file, and returns the lines of the later
/// accesses.
#[track_caller]
fn later(found: &[Violation]) -> Vec<u32> {
    assert!(!found.is_empty(), "nothing was found");
    for violation in found {
        for party in violation.earlier.iter().chain([&violation.later]) {
            assert_eq!(party.site.file(), file!(), "{violation}");
        }
    }
    found.iter().map(|violation| violation.later.site.line()).collect()
}

/// A call that returns its own line.
type Call = fn(&Stream, &mut DeviceBuffer<u8>, &mut DeviceBuffer<u8>) -> u32;

#[test]
fn copies_and_fills_are_named_by_their_callers_lines() {
    let calls: [(&str, Call); 7] = [
        ("fill", |s, x, _| (s.fill(x, 1).unwrap(), line!()).1),
        ("fill_bytes", |s, x, _| (s.fill_bytes(x, 1).unwrap(), line!()).1),
        ("copy", |s, x, y| (s.copy(x, y).unwrap(), line!()).1),
        ("copy_to_peer", |s, x, y| (s.copy_to_peer(x, y, s).unwrap(), line!()).1),
        ("upload", |s, x, _| {
            let from = vec![1; 4096];
            let queue = s.scope(|c| (c.upload(&from, x), line!())).unwrap();
            queue.0.map(|()| queue.1).unwrap()
        }),
        ("download", |s, x, _| {
            let mut to = vec![0; 4096];
            let queue = s.scope(|c| (c.download(x, &mut to), line!())).unwrap();
            queue.0.map(|()| queue.1).unwrap()
        }),
        ("a fill inside a scope", |s, x, _| {
            s.scope(|_| {
                s.fill(x, 1).unwrap();
                line!() - 1
            })
            .unwrap()
        }),
    ];
    for (name, call) in calls {
        let rig = Rig::new(64);
        let (s, raw) = (rig.stream(), rig.sim.driver().stream_create(DeviceId(0), 0).unwrap());
        let (mut x, mut y) = (rig.bytes(&s, 4096), rig.bytes(&s, 4096));
        s.fill(&mut x, 1).unwrap();
        s.fill(&mut y, 1).unwrap();
        s.synchronize().unwrap();
        stray(&rig, raw, x.range());
        let line = call(&s, &mut x, &mut y);
        let lines = later(&rig.sim.take_violations());
        assert!(lines.iter().all(|&later| later == line), "{name}: {lines:?} and not {line}");
        rig.sim.oracle(false);
    }
}

#[test]
fn operations_of_a_pool_are_named_by_the_callers_line_under_every_mode() {
    for debug in [Debugging::default(), Debugging::all()] {
        for kind in 0..4 {
            let rig = Rig::on(Sim::h200(1), 64, |config| config.debug = debug.clone());
            let (s, raw) = (rig.stream(), rig.sim.driver().stream_create(DeviceId(0), 0).unwrap());
            let parkable = rig.pool.parkable(Tag::named("lines")).unwrap();
            let request = Request::bytes(MIB);
            let (block, made) = match kind {
                0 => (rig.pool.alloc(&s, request).unwrap(), line!()),
                1 => (rig.pool.alloc_stable(&s, request).unwrap().into_block(), line!()),
                2 => (parkable.alloc(&s, request).unwrap(), line!()),
                _ => {
                    let (address, made) = (rig.pool.alloc_raw(&s, request).unwrap(), line!());
                    (rig.pool.from_raw(address).unwrap(), made)
                }
            };
            drop(parkable);
            let at = block.range();
            // A plain drop has no line, so a later access is reported with the allocation's line.
            drop(block);
            stray(&rig, raw, at);
            let found = rig.sim.take_violations();
            let after = found[0].earlier.unwrap();
            assert_eq!(
                (after.site.file(), after.site.line()),
                (file!(), made),
                "{kind}: {}",
                found[0]
            );
            assert!(after.work.contains("drop"), "{}", found[0]);
            later(&found);
            // Dropping the pool unmaps what the stray stream has written, which follows from the
            // violation that was found.
            let sim = rig.sim.clone();
            drop((rig, s));
            assert_eq!(sim.take_violations(), [], "{kind}");
        }
    }
}

/// Allocates a block, and returns it with the line.
type Allocate = fn(&Rig, &Stream, &Budget) -> (Block, u32);

#[test]
fn allocations_that_a_cache_serves_are_named_by_their_callers_lines() {
    let ways: [(&str, Allocate); 4] = [
        ("pool", |rig, s, _| (rig.alloc(s, MIB), line!())),
        ("opaque", |rig, s, _| {
            (Opaque::allocate(&rig.pool, s, Request::bytes(MIB)).unwrap(), line!())
        }),
        ("reserved", |rig, s, _| {
            let held = Mutex::new(rig.budget.reserve(MIB).unwrap());
            (rig.pool.alloc_reserved(s, Request::bytes(MIB), &held).unwrap(), line!())
        }),
        ("tenant", |rig, s, tenant| {
            let tenant = rig.pool.for_tenant(tenant).unwrap();
            (tenant.alloc(s, Request::bytes(MIB)).unwrap(), line!())
        }),
    ];
    for records in [false, true] {
        for (name, allocate) in ways {
            let rig = Rig::on(Sim::h200(1), 64, |config| {
                let recorder = || Arc::new(Recorder::new(Arc::new(RingSink::new(16))));
                config.recorder = records.then(recorder);
            });
            let (s, raw) = (rig.stream(), rig.sim.driver().stream_create(DeviceId(0), 0).unwrap());
            let tenant = Budget::new("lines", 64 * MIB);
            let first = allocate(&rig, &s, &tenant).0;
            let at = first.address();
            drop(first);
            let (cached, made) = allocate(&rig, &s, &tenant);
            assert_eq!(cached.address(), at, "{name}: the cache has it");
            stray(&rig, raw, cached.range());
            let found = rig.sim.take_violations();
            let line = found[0].earlier.unwrap().site.line();
            assert_eq!((found.len(), line), (1, made), "{name}: {}", found[0]);
            later(&found);
            // And a plain drop by the same line.
            drop(cached);
            stray(&rig, raw, range_at(at));
            let found = rig.sim.take_violations();
            let line = found[0].earlier.unwrap().site.line();
            assert_eq!((found.len(), line), (1, made), "{name}: {}", found[0]);
            later(&found);
        }
    }
}

fn range_at(address: u64) -> DeviceRange {
    DeviceRange { device: DeviceId(0), address, bytes: MIB }
}

#[test]
fn an_end_of_a_pool_under_work_that_it_does_not_know_is_named_by_the_line_that_opened_it() {
    let sim = Sim::h200(1);
    let opened = line!() + 1;
    let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
    let s = pool.stream().unwrap();
    let x = pool.buffer::<u8>(&s, 4096).unwrap();
    let (driver, u) = (sim.driver(), sim.driver().stream_create(DeviceId(0), 0).unwrap());
    let event = driver.event_create(DeviceId(0)).unwrap();
    driver.event_record(event, s.raw()).unwrap();
    driver.stream_wait_event(u, event).unwrap();
    // In order, but the pool is not told of it.
    sim.access(u, x.range(), Access::Read, None).unwrap();
    assert_eq!(sim.violations(), []);
    drop((x, s, pool));
    let found = sim.take_violations();
    assert_eq!(later(&found), [opened], "{found:#?}");
}

#[test]
fn findings_and_violations_name_a_stream_by_the_same_number() {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.debug = Debugging::all());
    let (_first, s) = (rig.stream(), rig.stream());
    let block = rig.alloc(&s, 1000);
    let behind = DeviceRange { address: block.address() + 1000, bytes: 1, ..block.range() };
    rig.sim
        .launch(
            s.raw(),
            aquifer_driver::sim::SimKernel::new("stray")
                .writes(behind, None)
                .run(|m| m.write(0)[0] = 1),
        )
        .unwrap();
    let found = rig.pool.check().unwrap();
    let id = s.timeline().id().unwrap();
    assert_eq!(found[0].block.stream, id);
    assert!(found[0].to_string().contains(&format!("on stream {id}")), "{}", found[0]);
    let violations = rig.sim.take_violations();
    assert!(
        violations[0].to_string().contains(&format!("by stream {id} of device 0")),
        "{}",
        violations[0]
    );
    assert_eq!(rig.pool.leaks().unwrap().groups()[0].blocks[0].stream, id);
}
