//! Tests of the memory of graphs: it serves no other stream and keeps its place until the graph and
//! its last launch are done.
#![expect(unsafe_code, reason = "captures by hand, as other libraries do")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, assert_returned};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::{Announced, DeviceBuffer, Request};
use aquifer_driver::{Access, Call, CaptureMode, DeviceId, RawGraph, sim::Sim};
use aquifer_stream::{Stream, StreamLifetime};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn begin(s: &Stream, mode: CaptureMode) {
    s.driver().capture_begin(s.raw(), mode).unwrap();
}

fn end(s: &Stream) -> RawGraph {
    s.driver().capture_end(s.raw()).unwrap()
}

/// Returns pools beside whose caches, and beside whose bypass, graphs have memory.
fn kinds() -> [Rig; 2] {
    [Rig::new(256), Rig::on(Sim::h200(1), 256, |config| config.bypass = true)]
}

/// Ends the capture and its announcement, and returns the captured memory.
fn captured(rig: &Rig, s: &Stream, announced: Announced) -> aquifer_device::Captured {
    let graph = end(s);
    // SAFETY: 1. known only here.
    unsafe { rig.sim.driver().graph_destroy(graph) }.unwrap();
    announced.end()
}

#[test]
fn only_streams_of_an_announced_capture_allocate_from_its_memory() {
    for rig in kinds() {
        let (s, joined, other) = (rig.stream(), rig.stream(), rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let announced = graphs.announce(&s).unwrap();
        let before = rig.alloc(&s, MIB);
        assert_eq!(graphs.stats().blocks, 0, "it does not capture yet");
        begin(&s, CaptureMode::Global);
        let a = rig.alloc(&s, MIB);
        assert_eq!(graphs.stats().blocks, 1);
        let elsewhere = rig.alloc(&other, MIB);
        let apart = rig.alloc(&joined, MIB);
        assert_eq!(graphs.stats().blocks, 1, "others are served as before");
        joined.wait_for(&s).unwrap();
        let b = rig.alloc(&joined, MIB);
        assert_eq!(graphs.stats().blocks, 2, "one that has joined draws as well");
        s.wait_for(&joined).unwrap();
        let stats = rig.pool.stats();
        assert_eq!((stats.graphs, stats.requested), (graphs.stats().physical, 5 * MIB));
        assert!(graphs.stats().physical >= 2 * MIB && rig.budget.used() == stats.physical);
        drop(captured(&rig, &s, announced));
        let after = rig.alloc(&s, MIB);
        assert_eq!(graphs.stats().blocks, 2, "and after the capture nobody does");
        drop((before, a, elsewhere, apart, b, after));
        rig.assert_silent();
    }
}

#[test]
fn a_stream_that_joins_may_be_the_first_to_allocate() {
    let rig = Rig::new(64);
    let (s, joined) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    joined.wait_for(&s).unwrap();
    let block = rig.alloc(&joined, MIB);
    assert_eq!(graphs.stats().blocks, 1);
    s.wait_for(&joined).unwrap();
    drop(captured(&rig, &s, announced));
    drop(block);
    rig.assert_silent();
}

#[test]
fn captures_are_announced_by_a_filter_over_handles_and_blocks_go_by_address() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let (raw, asked) = (s.raw(), Arc::new(AtomicU64::new(0)));
    let count = asked.clone();
    let announced = graphs
        .announce_all_where(move |stream| {
            count.fetch_add(1, Ordering::Relaxed);
            stream == raw
        })
        .unwrap();
    drop(rig.alloc(&u, 4096));
    assert_eq!((asked.load(Ordering::Relaxed), graphs.stats().blocks), (1, 0));
    begin(&s, CaptureMode::Global);
    begin(&u, CaptureMode::Global);
    let address = rig.alloc(&s, 4096).into_raw();
    assert_eq!(graphs.stats().blocks, 1);
    let other = rig.alloc(&u, 4096);
    assert_eq!(graphs.stats().blocks, 1, "a capture that was not announced");
    rig.pool.share_raw(address).unwrap();
    rig.pool.free_raw(address).unwrap();
    assert!(rig.pool.free_raw(address).is_err(), "freed already");
    assert_eq!(graphs.stats().blocks, 0);
    drop(captured(&rig, &s, announced));
    end(&u);
    drop(other);
    rig.assert_silent();
}

#[test]
fn of_nested_announcements_the_newest_applies_until_it_ends() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let (outer, inner) = (rig.pool.graph_pool().unwrap(), rig.pool.graph_pool().unwrap());
    let blocks = || (outer.stats().blocks, inner.stats().blocks);
    let around = outer.announce_all_where(|_| true).unwrap();
    let mut held = vec![rig.alloc(&s, 4096)];
    assert_eq!(blocks(), (1, 0));
    let within = inner.announce_all_where(|_| true).unwrap();
    held.push(rig.alloc(&s, 4096));
    assert_eq!(blocks(), (1, 1), "eager work");
    begin(&s, CaptureMode::Global);
    held.push(rig.alloc(&s, 4096));
    assert_eq!(blocks(), (1, 2), "captured work");
    drop(within);
    // The capture goes on, and so does the announcement around it.
    held.push(rig.alloc(&s, 4096));
    assert_eq!(blocks(), (2, 2));
    drop(captured(&rig, &s, around));
    held.push(rig.alloc(&s, 4096));
    assert_eq!(blocks(), (2, 2), "no announcement is open");
    drop(held);
    rig.assert_silent();
}

#[test]
fn a_stream_alone_reuses_what_it_freed_in_its_capture() {
    for rig in kinds() {
        let (s, u) = (rig.stream(), rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let announced = graphs.announce(&s).unwrap();
        begin(&s, CaptureMode::Global);
        u.wait_for(&s).unwrap();
        let a = rig.alloc(&s, MIB);
        let at = a.address();
        drop(a);
        let theirs = rig.alloc(&u, MIB);
        assert_ne!(theirs.address(), at, "captured work of `s` is not ordered with that of `u`");
        let again = rig.alloc(&s, MIB);
        assert_eq!(again.address(), at, "its own work is in order");
        s.wait_for(&u).unwrap();
        drop(captured(&rig, &s, announced));
        drop((again, theirs));
        let eager = rig.alloc(&s, MIB);
        assert_ne!(eager.address(), at, "launches write there");
        rig.assert_silent();
    }
}

#[test]
fn a_block_used_by_another_captured_stream_is_pending_until_the_capture_ends() {
    let rig = Rig::new(64);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    let a = rig.alloc(&s, MIB);
    let at = a.address();
    u.wait_for(&s).unwrap();
    a.record_use(&u, Access::Read).unwrap();
    let calls = rig.sim.driver().calls().made();
    drop(a);
    assert_eq!(rig.sim.driver().calls().made(), calls, "a free makes no call");
    assert_eq!((graphs.stats().pending, rig.pool.stats().pending), (MIB, MIB));
    let b = rig.alloc(&s, MIB);
    assert_ne!(b.address(), at);
    s.wait_for(&u).unwrap();
    drop(captured(&rig, &s, announced));
    assert_eq!(graphs.stats().pending, 0, "the end settles it");
    let announced = graphs.announce(&u).unwrap();
    begin(&u, CaptureMode::Global);
    let c = rig.alloc(&u, MIB);
    assert_eq!(c.address(), at, "a capture that shares the pool draws from it");
    drop(captured(&rig, &u, announced));
    drop((b, c));
    rig.assert_silent();
}

#[test]
fn an_outside_block_freed_within_a_capture_is_collected_after_it() {
    let rig = Rig::stepped(64);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let outside = rig.alloc(&u, MIB);
    let at = outside.address();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    outside.record_use(&s, Access::Read).unwrap();
    drop(outside);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().pending, MIB, "no event can say when `s` is done");
    assert_ne!(rig.alloc(&u, MIB).address(), at);
    let graph = end(&s);
    drop(announced.end());
    s.synchronize().unwrap();
    rig.assert_empty();
    // SAFETY: 1. known only here.
    unsafe { rig.sim.driver().graph_destroy(graph) }.unwrap();
    rig.assert_silent();
}

#[test]
fn an_eager_stream_that_is_fenced_at_each_free_goes_on_after_its_capture() {
    let rig = Rig::new(64);
    let own = rig.stream();
    let raw = rig.sim.driver().stream_create(DeviceId(0), 0).unwrap();
    // SAFETY: 1. made just now. 2. never destroyed.
    let s = unsafe { rig.pool.streams().adopt(raw, StreamLifetime::Fenced) }.unwrap();
    let graphs = rig.pool.graph_pool().unwrap();
    let outside = rig.alloc(&s, MIB);
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    let inside = rig.alloc(&s, MIB);
    drop((outside, inside));
    drop(captured(&rig, &s, announced));
    drop(rig.alloc(&s, MIB));
    drop((graphs, own));
    rig.assert_empty();
}

#[test]
fn captures_that_share_a_pool_take_no_more_than_the_largest_and_serve_no_other_stream() {
    for rig in kinds() {
        let (s, u) = (rig.stream(), rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let mut kept = Vec::new();
        let mut held = 0;
        for round in 0..4 {
            let on = if round % 2 == 0 { &s } else { &u };
            let announced = graphs.announce(on).unwrap();
            begin(on, CaptureMode::Global);
            let blocks: Vec<_> = (0..4).map(|_| rig.alloc(on, 3 * MIB)).collect();
            drop(blocks);
            kept.push(captured(&rig, on, announced));
            if round == 0 {
                held = graphs.stats().physical;
            }
            assert_eq!(graphs.stats().physical, held, "round {round}");
        }
        rig.pool.trim(0).unwrap();
        assert_eq!(rig.pool.stats().physical, held, "a trim takes nothing that launches write");
        // Ordinary blocks under a budget to which the free memory of graphs is charged.
        let refused = rig.pool.alloc(&s, Request::bytes(250 * MIB)).unwrap_err();
        let MemoryError::OutOfMemory(refused) = refused else { panic!("{refused}") };
        assert_eq!((refused.graphs, refused.cached), (held, 0));
        assert!(refused.to_string().contains("  graphs      "), "{refused}");
        drop((graphs, kept));
        assert!(
            rig.pool.alloc(&s, Request::bytes(250 * MIB)).is_ok(),
            "and it is there when they are gone"
        );
        rig.assert_silent();
    }
}

#[test]
fn memory_is_released_after_handles_graphs_blocks_and_the_last_launch() {
    let rig = Rig::stepped(64);
    let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    let out = rig.alloc(&s, MIB);
    let foreign = captured(&rig, &s, announced);
    let physical = graphs.stats().physical;
    let busy = [&u, &v].map(|stream| {
        let mut scratch = rig.bytes(stream, 4096);
        stream.fill(&mut scratch, 1).unwrap();
        foreign.launched(stream).unwrap();
        scratch
    });
    drop(graphs);
    let held = || rig.pool.trim(0).map(|_| rig.pool.stats().graphs + rig.pool.stats().pending);
    assert_eq!(held(), Ok(physical));
    drop(foreign);
    assert_eq!(held(), Ok(physical), "a block lives");
    let calls = rig.sim.driver().calls().made();
    drop(out);
    assert_eq!(rig.sim.driver().calls().made(), calls, "the end of all of it calls nobody");
    assert_eq!(held(), Ok(physical), "launches run");
    u.synchronize().unwrap();
    assert_eq!(held(), Ok(physical), "one still runs");
    v.synchronize().unwrap();
    assert_eq!(held(), Ok(0));
    drop(busy);
    rig.assert_silent();
}

#[test]
fn after_untracked_launches_the_pool_synchronises_the_device_but_never_during_a_capture() {
    let rig = Rig::stepped(64);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    drop(rig.alloc(&s, MIB));
    end(&s);
    drop(announced);
    let mut scratch = rig.bytes(&u, 4096);
    u.fill(&mut scratch, 1).unwrap();
    drop(graphs);
    let syncs = || rig.calls(Call::DeviceSynchronize);
    let other = rig.pool.graph_pool().unwrap();
    let announced = other.announce(&s).unwrap();
    let before = syncs();
    rig.pool.trim(0).unwrap();
    assert_eq!((syncs(), rig.pool.stats().pending), (before, 2 * MIB));
    drop(announced);
    rig.pool.trim(0).unwrap();
    assert_eq!((syncs(), rig.pool.stats().pending), (before + 1, 0));
    assert_eq!(rig.sim.pending(u.raw()), 0, "its work may have been a launch");
    rig.assert_silent();
}

#[test]
fn pool_operations_break_no_capture_of_any_mode() {
    for mode in MODES {
        for rig in [Rig::new(32), Rig::on(Sim::h200(1), 32, |c| c.bypass = true)] {
            let (s, u) = (rig.stream(), rig.stream());
            let graphs = rig.pool.graph_pool().unwrap();
            let kept = rig.alloc(&s, 4096);
            let announced = graphs.announce(&s).unwrap();
            begin(&s, mode);
            let a = rig.alloc(&s, 5 * MIB);
            let elsewhere = rig.alloc(&u, 5 * MIB);
            drop((kept, elsewhere));
            rig.pool.trim(0).unwrap();
            let refused = rig.pool.alloc(&s, Request::bytes(1 << 33)).unwrap_err();
            assert!(
                matches!(refused, MemoryError::OutOfMemory(_) | MemoryError::OutOfBudget(_)),
                "{refused}"
            );
            let refused = rig.pool.alloc(&u, Request::bytes(1 << 33)).unwrap_err();
            assert!(
                matches!(refused, MemoryError::OutOfMemory(_) | MemoryError::OutOfBudget(_)),
                "{refused}"
            );
            let b = rig.alloc(&s, 5 * MIB);
            let address = b.into_raw();
            rig.pool.free_raw(address).unwrap();
            drop(rig.stable(&u, MIB));
            drop(a);
            drop(captured(&rig, &s, announced));
            rig.assert_silent();
        }
    }
}

#[test]
fn invalid_announcements_and_captures_are_refused_by_name() {
    let rig = Rig::on(Sim::h200(2), 64, |_| ());
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    let other = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    let twice = MemoryError::AlreadyAnnounced { stream: s.raw().handle() };
    assert_eq!(graphs.announce(&s).err(), Some(twice.clone()));
    assert_eq!(other.announce(&s).err(), Some(twice));
    begin(&s, CaptureMode::Global);
    // A query in a capture mode other than relaxed invalidates the capture.
    assert!(rig.sim.driver().stream_query(s.raw()).is_err());
    let broken = MemoryError::CaptureInvalidated { stream: s.raw().handle() };
    assert_eq!(rig.pool.alloc(&s, Request::bytes(1)).err(), Some(broken));
    assert!(rig.sim.driver().capture_end(s.raw()).is_err());
    drop(announced);
    drop(graphs.announce(&s).unwrap());
    let far = aquifer_device::DevicePool::open(rig.sim.driver(), DeviceId(1), Default::default())
        .unwrap();
    let elsewhere = far.stream().unwrap();
    let (expected, actual) = (DeviceId(0), DeviceId(1));
    assert_eq!(
        graphs.announce(&elsewhere).err(),
        Some(MemoryError::WrongDevice { expected, actual })
    );
    rig.assert_silent();
}

#[test]
fn one_thread_ends_an_announcement_that_another_has_made() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    std::thread::scope(|scope| scope.spawn(|| drop(announced)).join().unwrap());
    drop(graphs.announce(&s).unwrap());
}

#[test]
fn after_the_last_announcement_the_fast_path_serves_again() {
    let rig = Rig::on(Sim::h200(1), 64, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    drop(rig.alloc(&s, 4096));
    let asked = || rig.calls(Call::CaptureStatus);
    let graphs = rig.pool.graph_pool().unwrap();
    let (one, two) = (graphs.announce(&s).unwrap(), graphs.announce(&u).unwrap());
    drop(rig.alloc(&s, 4096));
    let before = asked();
    assert!(before > 0);
    drop(one);
    drop(rig.alloc(&s, 4096));
    assert!(asked() > before, "one is open");
    drop(two);
    let before = asked();
    drop(rig.alloc(&s, 4096));
    assert_eq!(asked(), before);
}

#[test]
fn captured_memory_for_tags_and_reservations_is_counted_as_usual() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let tag = Tag::named("weights of a graph");
    let limit = rig.pool.limit_tag(tag, MIB);
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&s).unwrap();
    begin(&s, CaptureMode::Global);
    let block = rig.pool.alloc(&s, Request::bytes(MIB).tag(tag)).unwrap();
    assert_eq!((rig.pool.held_by(tag), limit.used()), (MIB, MIB));
    assert!(rig.pool.alloc(&s, Request::bytes(1).tag(tag)).is_err());
    let held = std::sync::Mutex::new(rig.budget.reserve(4 * MIB).unwrap());
    let reserved = rig.pool.alloc_reserved(&s, Request::bytes(MIB), &held).unwrap();
    assert_eq!(held.lock().unwrap().remaining(), 3 * MIB);
    assert_eq!(graphs.stats().blocks, 2);
    drop((block, reserved, held));
    assert_eq!((rig.pool.held_by(tag), limit.used()), (0, 0));
    drop(captured(&rig, &s, announced));
    rig.assert_silent();
}

#[test]
fn a_closed_pool_leaves_nothing_after_its_last_graph() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    // SAFETY: 1. and 2. the work touches blocks of the graph pool alone.
    let made = unsafe {
        graphs.capture(&s, |s| {
            let mut x: DeviceBuffer<u8> = rig.pool.buffer(s, 4096)?;
            s.fill(&mut x, 7)?;
            Ok(x)
        })
    };
    let (graph, x) = made.unwrap();
    let Rig { sim, pool, budget } = rig;
    drop((graphs, pool));
    graph.launch(&s).unwrap();
    drop(graph);
    drop(x);
    drop(s);
    assert_returned(&sim, &budget);
}

#[test]
fn a_capture_whose_end_is_refused_is_ended_by_the_next_attempt() {
    let rig = Rig::new(256);
    let graphs = rig.pool.graph_pool().unwrap();
    let s = rig.stream();
    let capture = |s: &Stream| {
        // SAFETY: 1. the work touches nothing. 2. nor does anything else.
        unsafe { graphs.capture(s, |_| Ok(())) }.map(drop)
    };
    rig.sim.fail(Call::CaptureEnd, 1, 999);
    assert!(matches!(capture(&s), Err(MemoryError::Driver(refused)) if refused.code == 999));
    assert_eq!(s.timeline().is_capturing(), Ok(false), "the next try has ended it");
    assert_eq!(rig.sim.outstanding().graphs, 0);
    capture(&s).unwrap();

    // A capture that can never be ended stays open, and its stream is not leased meanwhile.
    rig.sim.fail_every(Call::CaptureEnd, 1, 999);
    assert!(capture(&s).is_err());
    rig.sim.clear_failures();
    assert_eq!(s.timeline().is_capturing(), Ok(true));
    let raw = s.raw();
    drop(s);
    let next = rig.stream();
    assert_ne!(next.raw(), raw);
    capture(&next).unwrap();
}
