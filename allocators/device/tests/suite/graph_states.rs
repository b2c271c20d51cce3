//! Tests of graph memory that also serves work that is not captured, and that is brought back to an
//! earlier state.
#![expect(unsafe_code, reason = "captures by hand, as other libraries do")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{self, MIB, Rig};
use aquifer_core::MemoryError;
use aquifer_device::{DeviceBuffer, DevicePool, Graph, GraphPool, PoolConfig, Request};
use aquifer_driver::{Access, Call, CaptureMode, DeviceId, sim::Sim};
use aquifer_stream::Stream;
use std::time::Duration;

fn kinds() -> [Rig; 2] {
    [Rig::new(256), Rig::on(Sim::h200(1), 256, |config| config.bypass = true)]
}

/// Runs `work` while all work of `s` is served from `graphs`.
fn served<T>(graphs: &GraphPool, s: &Stream, work: impl FnOnce() -> T) -> T {
    let raw = s.raw();
    let announced = graphs.announce_all_where(move |stream| stream == raw).unwrap();
    let out = work();
    drop(announced);
    out
}

fn captured<T>(s: &Stream, work: impl FnOnce() -> T) -> T {
    s.driver().capture_begin(s.raw(), CaptureMode::ThreadLocal).unwrap();
    let out = work();
    let graph = s.driver().capture_end(s.raw()).unwrap();
    // SAFETY: 1. known only here.
    unsafe { s.driver().graph_destroy(graph) }.unwrap();
    out
}

#[test]
fn an_announcement_of_all_work_serves_captured_and_other_work_of_its_streams_alone() {
    for rig in kinds() {
        let (s, u) = (rig.stream(), rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let blocks = served(&graphs, &s, || {
            let eager = rig.alloc(&s, MIB);
            assert_eq!(graphs.stats().blocks, 1);
            let other = rig.alloc(&u, MIB);
            assert_eq!(graphs.stats().blocks, 1, "a stream that is not announced");
            let in_capture = captured(&s, || rig.alloc(&s, MIB));
            assert_eq!(graphs.stats().blocks, 2);
            [eager, other, in_capture]
        });
        let after = rig.alloc(&s, MIB);
        assert_eq!(graphs.stats().blocks, 2, "the announcement has ended");
        let live: Vec<u64> = graphs.live_blocks().iter().map(|(at, _)| at.address).collect();
        let mut expected = [blocks[0].address(), blocks[2].address()];
        expected.sort_unstable();
        assert_eq!(live, expected);
        assert!(graphs.live_blocks().iter().all(|(at, on)| at.bytes == MIB && *on == s.raw()));
        drop((blocks, after));
        rig.assert_silent();
    }
}

#[test]
fn a_stream_reuses_its_own_eager_memory_before_its_work_is_done_and_a_capture_does_not() {
    let rig = Rig::stepped(256);
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    let write = || {
        let mut buffer = rig.bytes(&s, MIB);
        s.fill(&mut buffer, 1).unwrap();
        buffer.block().address()
    };
    let first = served(&graphs, &s, write);
    // In order behind its own work, within an announcement and in the next one.
    served(&graphs, &s, || {
        assert_eq!(write(), first);
        assert_eq!(write(), first);
    });
    // The work has not run, and captured work may run on any stream.
    let elsewhere = served(&graphs, &s, || captured(&s, || rig.alloc(&s, MIB).address()));
    assert_ne!(elsewhere, first);
    rig.sim.run_all();
    s.synchronize().unwrap();
    rig.assert_silent();
}

#[test]
fn memory_is_brought_back_to_an_earlier_state_with_its_contents() {
    for rig in kinds() {
        let s = rig.stream();
        let graphs = rig.pool.graph_pool().unwrap();
        let sizes = [700 * 1024, 512, 3 * MIB];
        let addresses = served(&graphs, &s, || {
            sizes.map(|bytes| {
                let mut buffer = rig.bytes(&s, bytes);
                s.fill(&mut buffer, 7).unwrap();
                buffer.into_block().into_raw()
            })
        });
        let state = graphs.live_blocks();
        assert_eq!(state.len(), 3);
        let before = graphs.stats();
        addresses.iter().for_each(|&address| rig.pool.free_raw(address).unwrap());
        assert_eq!(graphs.stats().live, 0);
        for (at, on) in &state {
            assert_eq!(*on, s.raw());
            let block = graphs.alloc_at(&s, Request::bytes(at.bytes), at.address).unwrap();
            assert_eq!((block.address(), block.bytes()), (at.address, at.bytes));
            assert_eq!(block.into_raw(), at.address);
        }
        assert_eq!(graphs.live_blocks(), state);
        assert_eq!(graphs.stats(), before);
        for &address in &addresses {
            let block = rig.pool.from_raw(address).unwrap();
            let read = support::read(&s, &DeviceBuffer::from_block(block).unwrap());
            assert!(read.iter().all(|&byte| byte == 7));
        }
        rig.assert_silent();
    }
}

#[test]
fn an_address_that_is_in_use_or_not_the_pools_is_refused_and_nothing_changes() {
    for rig in kinds() {
        let (s, u) = (rig.stream(), rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let (live, freed) = served(&graphs, &s, || (rig.alloc(&s, MIB), rig.alloc(&s, MIB)));
        let (at, free) = (live.address(), freed.address());
        drop(freed);
        let before = graphs.stats();
        let place = |bytes, address| graphs.alloc_at(&s, Request::bytes(bytes), address);
        let busy = |address| MemoryError::Busy { address };
        assert_eq!(place(512, at).unwrap_err(), busy(at));
        assert_eq!(place(512, at + 512).unwrap_err(), busy(at + 512));
        for address in [0, 512, u64::MAX - 511] {
            assert_eq!(place(512, address).unwrap_err(), MemoryError::ForeignBlock { address });
        }
        assert!(matches!(place(0, free), Err(MemoryError::ZeroSize)));
        assert!(matches!(place(u64::MAX, free), Err(MemoryError::TooLarge { .. })));
        assert!(matches!(place(512, free + 1), Err(MemoryError::BadAlignment { .. })));
        assert_eq!(graphs.stats(), before);
        // Memory that another stream still uses.
        let shared = place(MIB, free).unwrap();
        let held = shared.prepare(&u, Access::Write).unwrap();
        drop(shared);
        assert_eq!(place(MIB, free).unwrap_err(), busy(free));
        held.finish().unwrap();
        u.synchronize().unwrap();
        assert!(place(MIB, free).is_ok());
        drop(live);
        rig.assert_silent();
    }
}

#[test]
fn a_block_at_an_address_is_ordered_behind_the_work_that_used_it_last() {
    let rig = Rig::stepped(256);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let address = served(&graphs, &s, || {
        let mut buffer = rig.bytes(&s, MIB);
        s.fill(&mut buffer, 1).unwrap();
        buffer.block().address()
    });
    let waits = || rig.calls(Call::StreamWaitEvent);
    let before = waits();
    let block = graphs.alloc_at(&u, Request::bytes(MIB), address).unwrap();
    assert_eq!(waits(), before + 1);
    let mut buffer = DeviceBuffer::<u8>::from_block(block).unwrap();
    u.fill(&mut buffer, 2).unwrap();
    rig.sim.run_all();
    drop(buffer);
    rig.assert_silent();
}

/// Captures a graph that fills a buffer of its own with `byte`.
fn filling(rig: &Rig, graphs: &GraphPool, s: &Stream, bytes: u64, byte: u8) -> Filling {
    // SAFETY: 1. and 2. the work touches only the graph pool's own block.
    unsafe {
        graphs.capture(s, |s| {
            let mut out = rig.bytes(s, bytes);
            s.fill(&mut out, byte)?;
            Ok(out)
        })
    }
    .unwrap()
}

type Filling = (Graph, DeviceBuffer<u8>);

#[test]
fn a_shortage_takes_the_free_handles_that_no_captured_work_has_used_and_no_others() {
    let rig = Rig::new(16);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    served(&graphs, &s, || drop(rig.alloc(&s, 12 * MIB)));
    assert_eq!(graphs.stats().physical, 12 * MIB);
    let (graph, out) = filling(&rig, &graphs, &s, 3 * MIB, 7);
    let scratch = filling(&rig, &graphs, &s, MIB, 5).1.block().address();
    assert_eq!(graphs.stats().physical, 12 * MIB, "captures use the memory that is free");
    // Two handles are the graph's, and the others go.
    let ordinary = rig.alloc(&u, 12 * MIB);
    assert_eq!((graphs.stats().physical, graphs.stats().live), (4 * MIB, 3 * MIB));
    assert!(rig.pool.alloc(&u, Request::bytes(MIB)).is_err());
    drop(ordinary);
    graph.launch(&s).unwrap();
    assert!(support::read(&s, &out).iter().all(|&byte| byte == 7));
    // The second graph is gone, but its memory is not given back while the pool may launch.
    drop(out);
    rig.pool.trim(0).unwrap();
    assert_eq!(graphs.stats().physical, 4 * MIB);
    let again = served(&graphs, &s, || rig.alloc(&s, MIB));
    assert!(graphs.stats().physical == 4 * MIB && again.address() <= scratch);
    drop((again, graph, graphs));
    s.synchronize().unwrap();
    rig.assert_empty();
}

#[test]
fn free_memory_of_graphs_makes_room_for_new_memory_of_the_caches_without_a_limit() {
    let rig = Rig::new(1024);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    served(&graphs, &s, || drop(rig.alloc(&s, 12 * MIB)));
    let first = rig.alloc(&u, 8 * MIB);
    assert_eq!((graphs.stats().physical, rig.pool.stats().physical), (4 * MIB, 12 * MIB));
    let second = rig.alloc(&u, 8 * MIB);
    let stats = rig.pool.stats();
    assert_eq!(
        (graphs.stats().physical, stats.physical, stats.peak_physical),
        (0, 16 * MIB, 16 * MIB)
    );
    drop((first, second));
    rig.assert_silent();
}

#[test]
fn a_captured_block_takes_the_free_range_that_it_fills_and_else_the_lowest() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    let [long, wall, short, _end] = served(&graphs, &s, || {
        captured(&s, || [8 * MIB, MIB, 3 * MIB, MIB].map(|bytes| rig.alloc(&s, bytes)))
    });
    let (lowest, filled) = (long.address(), short.address());
    let physical = graphs.stats().physical;
    // Free before the capture, and freed within it.
    drop(short);
    s.synchronize().unwrap();
    served(&graphs, &s, || {
        captured(&s, || {
            let first = rig.alloc(&s, 512);
            drop(long);
            let block = rig.alloc(&s, 3 * MIB - 512);
            assert_eq!((first.address(), block.address()), (filled, filled + 512));
            let small = rig.alloc(&s, 512);
            assert_eq!((small.address(), graphs.stats().physical), (lowest, physical));
        });
    });
    drop(wall);
    rig.assert_silent();
}

#[test]
fn free_memory_of_graphs_whose_work_still_runs_is_waited_for_on_shortage() {
    // Without a deadline: the device runs no work unless it is waited for.
    let rig = Rig::on(Sim::h200(1).stepped(), 16, |config| config.wait = Duration::MAX);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    served(&graphs, &s, || {
        let mut buffer = rig.bytes(&s, 12 * MIB);
        s.fill(&mut buffer, 1).unwrap();
    });
    assert!(rig.alloc(&u, 12 * MIB).bytes() == 12 * MIB);
    assert_eq!(graphs.stats().physical, 0);
    rig.assert_silent();
}

#[test]
fn a_reclaim_by_another_pool_takes_the_free_memory_of_graphs() {
    let rig = Rig::new(16);
    let other = DevicePool::open(
        rig.sim.driver(),
        DeviceId(0),
        PoolConfig::with_budget(rig.budget.clone()),
    )
    .unwrap();
    let (s, u) = (rig.stream(), other.stream().unwrap());
    let graphs = rig.pool.graph_pool().unwrap();
    served(&graphs, &s, || drop(rig.alloc(&s, 12 * MIB)));
    assert!(other.alloc(&u, Request::bytes(12 * MIB)).is_ok());
    assert_eq!(graphs.stats().physical, 0);
    rig.assert_silent();
}

#[test]
fn memory_that_is_live_at_a_capture_or_retained_stays_with_its_pool() {
    let rig = Rig::new(16);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let input = served(&graphs, &s, || rig.alloc(&s, 4 * MIB));
    let (_graph, out) = filling(&rig, &graphs, &s, 4 * MIB, 7);
    served(&graphs, &s, || drop(rig.alloc(&s, 4 * MIB)));
    drop((input, out));
    rig.pool.trim(0).unwrap();
    assert_eq!(graphs.stats().physical, 8 * MIB);
    graphs.retain_free();
    served(&graphs, &s, || drop(rig.alloc(&s, 12 * MIB)));
    rig.pool.trim(0).unwrap();
    assert_eq!(graphs.stats().physical, 12 * MIB);
    assert!(rig.pool.alloc(&u, Request::bytes(6 * MIB)).is_err());
    rig.assert_silent();
}

#[test]
fn an_address_whose_memory_was_given_back_gets_new_memory_or_nothing_changes() {
    let rig = Rig::new(16);
    let (s, u) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let at = served(&graphs, &s, || rig.alloc(&s, 8 * MIB).address());
    let place = |address, bytes| graphs.alloc_at(&s, Request::bytes(bytes), address);
    rig.pool.trim(0).unwrap();
    assert_eq!(graphs.stats().physical, 0);
    // One handle, into which half of the block reaches.
    let first = place(at + MIB, 512).unwrap();
    assert_eq!((first.address(), graphs.stats().physical), (at + MIB, 2 * MIB));
    let before = (graphs.stats(), rig.budget.used());
    assert_eq!(place(at, 8 * MIB).unwrap_err(), MemoryError::Busy { address: at });
    assert_eq!((graphs.stats(), rig.budget.used()), before);
    let ordinary = rig.alloc(&u, 10 * MIB);
    drop(first);
    let before = (graphs.stats(), rig.budget.used());
    assert!(matches!(place(at, 8 * MIB), Err(MemoryError::OutOfMemory(_))));
    assert_eq!((graphs.stats(), rig.budget.used()), before);
    drop(ordinary);
    let mut whole = DeviceBuffer::<u8>::from_block(place(at, 8 * MIB).unwrap()).unwrap();
    s.fill(&mut whole, 3).unwrap();
    assert!(support::read(&s, &whole).iter().all(|&byte| byte == 3));
    assert_eq!(graphs.stats().physical, 8 * MIB);
    rig.assert_silent();
}
