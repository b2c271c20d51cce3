//! Tests of parking in two steps, for several tags as one, and of parked memory of graphs.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "parks what nothing is about to use")]

use crate::support::{MIB, Rig, plain, read};
use allocator_api2::alloc::Global;
use aquifer_core::{MemoryError, Tag};
use aquifer_device::{DeviceBuffer, Graph, GraphPool, Park, Parkable, PendingPark, Request};
use aquifer_driver::{
    Access, Call, Operand,
    sim::{Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::time::Duration;

const SLOT: u64 = 4 * MIB;

fn tags() -> [Tag; 2] {
    [Tag::named("sleeping weights"), Tag::named("sleeping cache")]
}

fn rig(limit_mib: u64) -> Rig {
    Rig::on(Sim::h200(1), limit_mib, |config| {
        config.handle_bytes = SLOT;
        config.wait = Duration::from_millis(50);
    })
}

fn begin_park(rig: &Rig, tag: Tag, how: Park) -> Result<PendingPark, MemoryError> {
    // SAFETY: 1. and 2. each test queues nothing meanwhile, except what is refused.
    unsafe { rig.pool.begin_park(tag, how) }
}

fn saved() -> Park {
    Park::save_in(Global)
}

fn filled(stream: &Stream, parkable: &Parkable, byte: u8, bytes: usize) -> DeviceBuffer<u8> {
    let mut buffer = parkable.buffer(stream, bytes).unwrap();
    stream.fill(&mut buffer, byte).unwrap();
    buffer
}

/// Captures a graph that adds the temporaries that it writes first, and returns its output.
fn captured(rig: &Rig, graphs: &GraphPool, s: &Stream, byte: u8) -> (Graph, DeviceBuffer<u8>) {
    // SAFETY: 1. and 2. the work touches only blocks of the graph pool.
    unsafe {
        graphs.capture(s, |s| {
            let mut temporary: DeviceBuffer<u8> = rig.pool.buffer(s, 3 << 20)?;
            s.fill(&mut temporary, byte)?;
            let mut out: DeviceBuffer<u8> = rig.pool.buffer(s, 1 << 20)?;
            s.copy(temporary.slice(0..1 << 20)?, &mut out)?;
            Ok(out)
        })
    }
    .unwrap()
}

#[test]
fn a_block_freed_while_its_resume_is_undone_is_gone_and_the_others_are_restored() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let (gone, kept) = (filled(&s, &parkable, 1, 6 << 20), filled(&s, &parkable, 2, 3 << 20));
    begin_park(&rig, tags()[0], saved()).unwrap().commit();
    let pending = rig.pool.begin_resume(tags()[0], None).unwrap();
    drop(gone);
    drop(pending);
    assert_eq!((rig.budget.used(), rig.pool.stats().blocks), (0, 1));
    let report = rig.pool.resume(tags()[0], None).unwrap();
    assert_eq!((report.blocks, report.restored), (1, 3 << 20));
    assert_eq!(read(&s, &kept), vec![2; 3 << 20]);
    drop((kept, parkable));
    rig.assert_empty();
}

#[test]
fn saved_contents_are_the_last_parks_and_are_kept_until_the_next_one_or_their_block_ends() {
    let rig = rig(256);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let contents = |address, bytes| {
        let mut into = vec![0; bytes];
        rig.pool.read_saved(address, &mut into).then_some(into)
    };
    // Of two pieces.
    let (mut large, small) = (filled(&s, &parkable, 1, 65 << 20), filled(&s, &parkable, 2, 4096));
    let (at, other) = (large.range().address, small.range().address);
    let pending = begin_park(&rig, tags()[0], saved()).unwrap();
    assert_eq!(contents(at, 1), None, "the park can still be undone");
    pending.commit();
    assert_eq!(contents(at + (64 << 20) - 512, 1024), Some(vec![1; 1024]));
    assert_eq!((contents(other, 4096), contents(other + 1, 4096)), (Some(vec![2; 4096]), None));
    drop(rig.pool.begin_resume(tags()[0], None).unwrap().keep_saved());
    rig.pool.begin_resume(tags()[0], None).unwrap().keep_saved().commit();
    s.fill(&mut large, 3).unwrap();
    assert_eq!(contents(at, 1), Some(vec![1]));
    drop(small);
    assert_eq!(contents(other, 1), None);
    drop(begin_park(&rig, tags()[0], Park::discard()).unwrap());
    assert_eq!(contents(at, 1), None, "a park drops what was kept, also if it is undone");
    begin_park(&rig, tags()[0], saved()).unwrap().commit();
    assert_eq!(contents(at, 1), Some(vec![3]));
    rig.pool.resume(tags()[0], None).unwrap();
    assert_eq!(contents(at, 1), None);
    drop((large, parkable));
    rig.assert_empty();
}

#[test]
fn memory_of_a_block_whose_resume_was_undone_serves_any_stream_after_its_free() {
    let rig = rig(64);
    let (s, u) = (rig.stream(), rig.stream());
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let (gone, kept) = (filled(&s, &parkable, 1, 1 << 20), filled(&u, &parkable, 2, 1 << 20));
    let address = gone.range().address;
    begin_park(&rig, tags()[0], Park::discard()).unwrap().commit();
    // The driver keeps the mapping, so the next resume has the same memory.
    rig.sim.fail(Call::Unmap, 1, 999);
    drop(rig.pool.begin_resume(tags()[0], None).unwrap());
    drop(gone);
    rig.pool.resume(tags()[0], None).unwrap();
    let next = parkable.buffer::<u8>(&u, 1 << 20).unwrap();
    assert_eq!(next.range().address, address);
    rig.assert_silent();
    drop((next, kept));
}

#[test]
fn work_that_is_not_recorded_is_waited_for_on_request() {
    let rig = Rig::on(Sim::new(SimConfig::h200(1)).seeded(7), 64, |config| {
        config.wait = Duration::from_millis(50);
    });
    let (s, u) = (rig.stream(), rig.stream());
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let buffer = filled(&s, &parkable, 9, 1 << 20);
    // Ordered, but not recorded, as by a program that knows addresses alone.
    u.wait_for(&s).unwrap();
    rig.sim.access(u.raw(), buffer.range(), Access::Read, Some(buffer.generation())).unwrap();
    begin_park(&rig, tags()[0], saved().after_all_work()).unwrap().commit();
    rig.pool.resume(tags()[0], None).unwrap();
    assert_eq!(read(&s, &buffer), vec![9; 1 << 20]);
    rig.assert_silent();
}

#[test]
fn a_wait_for_the_whole_device_has_no_deadline() {
    let rig = Rig::on(Sim::h200(1).stepped(), 64, |config| config.wait = Duration::from_millis(1));
    let s = rig.stream();
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let buffer = filled(&s, &parkable, 6, 4096);
    // The device runs no work until it is waited for.
    assert_eq!(begin_park(&rig, tags()[0], saved()).map(drop), Err(MemoryError::TimedOut));
    begin_park(&rig, tags()[0], saved().after_all_work()).unwrap().commit();
    rig.pool.resume(tags()[0], None).unwrap();
    assert_eq!(read(&s, &buffer), vec![6; 4096]);
    rig.assert_silent();
}

#[test]
fn a_wait_for_the_whole_device_is_refused_while_a_capture_is_announced() {
    let rig = rig(64);
    let s = rig.stream();
    let parkable = rig.pool.parkable(tags()[0]).unwrap();
    let buffer = filled(&s, &parkable, 1, 4096);
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    let refused = begin_park(&rig, tags()[0], saved().after_all_work()).map(drop);
    assert_eq!(refused, Err(MemoryError::Capturing { stream: 0 }));
    drop(announced);
    assert!(!rig.pool.is_parked(tags()[0]));
    begin_park(&rig, tags()[0], saved().after_all_work()).unwrap().commit();
    rig.pool.resume(tags()[0], None).unwrap();
    assert_eq!(read(&s, &buffer), vec![1; 4096]);
    rig.assert_silent();
}

#[test]
fn graphs_keep_their_addresses_and_contents_while_their_memory_is_away() {
    let rig = rig(64);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.parkable_graph_pool(tags()[0]).unwrap();
    let (graph, out) = captured(&rig, &graphs, &s, 7);
    graph.launch(&u).unwrap();
    assert_eq!(read(&s, &out), vec![7; 1 << 20]);
    let before = rig.pool.stats();
    for _ in 0..3 {
        let report = begin_park(&rig, tags()[0], saved()).unwrap().commit();
        assert_eq!((report.blocks, report.saved), (1, 1 << 20));
        assert_eq!((report.released, report.refused), (before.physical, 0));
        let parked = rig.pool.stats();
        assert_eq!((parked.physical, parked.live, parked.graphs), (0, 0, 0));
        assert_eq!((rig.budget.used(), graphs.stats().physical), (0, 0));
        let refused = Err(MemoryError::Parked { tag: tags()[0] });
        assert_eq!(graph.launch(&u), refused);
        // SAFETY: 1. and 2. nothing is captured.
        let capture = unsafe {
            graphs.capture(&s, |s| rig.pool.alloc(s, Request::bytes(512)).map(drop)).map(drop)
        };
        assert_eq!(capture, refused);
        let report = rig.pool.resume(tags()[0], None).unwrap();
        assert_eq!((report.taken, report.restored), (before.physical, 1 << 20));
        let after = rig.pool.stats();
        assert_eq!(
            (after.physical, after.live, after.graphs),
            (before.physical, before.live, before.graphs)
        );
        assert_eq!(read(&s, &out), vec![7; 1 << 20], "the output is there before a launch");
        graph.launch(&u).unwrap();
        assert_eq!(read(&s, &out), vec![7; 1 << 20]);
    }
    drop((graph, graphs, out));
    u.synchronize().unwrap();
    rig.assert_empty();
}

#[test]
fn an_output_of_a_graph_may_be_dropped_in_every_phase() {
    for phase in 0..4 {
        let rig = rig(64);
        let s = rig.stream();
        let graphs = rig.pool.parkable_graph_pool(tags()[0]).unwrap();
        let (graph, out) = captured(&rig, &graphs, &s, 8);
        graph.launch(&s).unwrap();
        let mut out = Some(out);
        let mut at = |now: usize| {
            if now == phase {
                drop(out.take());
            }
        };
        let pending = begin_park(&rig, tags()[0], saved()).unwrap();
        at(0);
        pending.commit();
        at(1);
        let pending = rig.pool.begin_resume(tags()[0], None).unwrap();
        at(2);
        pending.commit();
        at(3);
        graph.launch(&s).unwrap();
        let stats = rig.pool.stats();
        assert_eq!((stats.blocks, stats.live, stats.requested), (0, 0, 0), "phase {phase}");
        drop((graph, graphs));
        s.synchronize().unwrap();
        rig.assert_empty();
    }
}

#[test]
fn devices_without_virtual_memory_have_no_memory_of_graphs() {
    let rig = Rig::on(plain(), 64, |_| ());
    for refused in [rig.pool.graph_pool(), rig.pool.parkable_graph_pool(tags()[0])] {
        assert!(matches!(refused.map(drop), Err(MemoryError::Unsupported { .. })));
    }
}
