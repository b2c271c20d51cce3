//! Tests that violations of the oracle are reported with source lines of the program and never with
//! lines of this library.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_core::Tag;
use aquifer_device::{Debugging, DeviceBuffer, Request};
use aquifer_driver::{
    Access, DeviceId, DeviceRange, Operand, RawStream,
    sim::{Sim, Violation},
};
use aquifer_stream::{Grid, Stream};

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

fn grid() -> Grid {
    Grid::new(16, 4)
}

#[test]
fn copies_and_fills_are_named_by_their_callers_lines() {
    let calls: [(&str, Call); 11] = [
        ("fill", |s, x, _| (s.fill(x, 1).unwrap(), line!()).1),
        ("fill_bytes", |s, x, _| (s.fill_bytes(x, 1).unwrap(), line!()).1),
        ("fill_2d", |s, x, _| (s.fill_2d(x, 1, 64, 32, 4).unwrap(), line!()).1),
        ("copy", |s, x, y| (s.copy(x, y).unwrap(), line!()).1),
        ("copy_2d", |s, x, y| (s.copy_2d(x, y, grid()).unwrap(), line!()).1),
        ("copy_to_peer", |s, x, y| (s.copy_to_peer(x, y, s).unwrap(), line!()).1),
        ("upload", |s, x, _| {
            let from = vec![1; 4096];
            let queue = s.scope(|c| (c.upload(&from, x), line!())).unwrap();
            queue.0.map(|()| queue.1).unwrap()
        }),
        ("upload_2d", |s, x, _| {
            let from = vec![1; 64];
            let queue = s.scope(|c| (c.upload_2d(&from, x, grid()), line!())).unwrap();
            queue.0.map(|()| queue.1).unwrap()
        }),
        ("download", |s, x, _| {
            let mut to = vec![0; 4096];
            let queue = s.scope(|c| (c.download(x, &mut to), line!())).unwrap();
            queue.0.map(|()| queue.1).unwrap()
        }),
        ("download_2d", |s, x, _| {
            let mut to = vec![0; 64];
            let queue = s.scope(|c| (c.download_2d(x, &mut to, grid()), line!())).unwrap();
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
            let opened = line!() + 1;
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
            // Dropping the pool unmaps what the stray stream has written.
            let sim = rig.sim.clone();
            drop((rig, s));
            for violation in sim.take_violations() {
                for party in violation.earlier.iter().chain([&violation.later]) {
                    let own = [file!(), "allocators/device/tests/suite/support/mod.rs"];
                    assert!(
                        own.contains(&party.site.file()),
                        "{kind} opened at {opened}: {violation}"
                    );
                }
            }
        }
    }
}

#[test]
fn findings_and_violations_name_a_stream_by_the_same_number() {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.debug = Debugging::all());
    let (_first, s) = (rig.stream(), rig.stream());
    let block = rig.pool.alloc(&s, Request::bytes(1000)).unwrap();
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
