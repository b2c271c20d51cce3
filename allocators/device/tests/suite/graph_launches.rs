//! Tests of graph launches over the graph's own memory: each launch is ordered with every other use
//! of that memory.
#![expect(unsafe_code, reason = "captures")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, read};
use aquifer_core::MemoryError;
use aquifer_device::{DeviceBuffer, Graph, GraphPool, Request};
use aquifer_driver::sim::Sim;
use aquifer_stream::Stream;

const LEN: usize = 4096;

/// The number of queue orders to try.
const SEEDS: u64 = 16;

/// Returns whether every byte equals `byte`.
fn all(bytes: &[u8], byte: u8) -> bool {
    bytes.iter().all(|&b| b == byte)
}

fn seeded(seed: u64) -> Rig {
    Rig::on(Sim::h200(1).seeded(seed), 64, |_| ())
}

/// Captures a graph that copies its first block to its second through a temporary block freed
/// within it.
fn copies(
    rig: &Rig,
    graphs: &GraphPool,
    on: &Stream,
) -> (Graph, (DeviceBuffer<u8>, DeviceBuffer<u8>)) {
    // SAFETY: 1. and 2. the work touches blocks of the graph pool alone.
    let made = unsafe {
        graphs.capture(on, |s| {
            let from = rig.pool.buffer::<u8>(s, LEN)?;
            let mut between = rig.pool.buffer::<u8>(s, LEN)?;
            s.copy(&from, &mut between)?;
            let mut to = rig.pool.buffer::<u8>(s, LEN)?;
            s.copy(&between, &mut to)?;
            Ok((from, to))
        })
    };
    made.unwrap()
}

#[test]
fn an_eager_use_that_is_queued_when_its_block_is_freed_comes_before_the_next_launch() {
    for seed in 0..SEEDS {
        let rig = seeded(seed);
        let [s, u, v] = [0; 3].map(|_| rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let (graph, (mut from, to)) = copies(&rig, &graphs, &s);
        s.fill(&mut from, 5).unwrap();
        graph.launch(&s).unwrap();
        let mut copy = rig.bytes(&u, LEN as u64);
        u.copy(&to, &mut copy).unwrap();
        drop(to);
        s.fill(&mut from, 6).unwrap();
        graph.launch(&v).unwrap();
        assert!(all(&read(&u, &copy), 5), "seed {seed}");
        rig.assert_silent();
    }
}

/// As with the activations of a training step: the forward pass is captured first, and the capture
/// of the backward pass frees what that has allocated.
#[test]
fn what_an_earlier_capture_allocated_is_reused_within_the_capture_that_frees_it() {
    for seed in 0..SEEDS {
        let rig = seeded(seed);
        let [s, u, v] = [0; 3].map(|_| rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let len = 6 * MIB as usize;
        // SAFETY: 1. and 2. the work touches blocks of the graph pool alone, here and below.
        let forward = unsafe {
            graphs.capture(&s, |s| {
                let mut out = rig.pool.buffer::<u8>(s, len)?;
                s.fill(&mut out, 3)?;
                Ok(out)
            })
        };
        let (forward, mut between) = forward.unwrap();
        let (address, physical) = (between.block().address(), graphs.stats().physical);
        // Work outside of captures that is still queued when the memory is reused.
        s.fill(&mut between, 9).unwrap();
        // SAFETY: as above.
        let backward = unsafe {
            graphs.capture(&s, |s| {
                let mut first = rig.pool.buffer::<u8>(s, LEN)?;
                s.copy(between.slice(0..LEN)?, &mut first)?;
                drop(between);
                let mut out = rig.pool.buffer::<u8>(s, len)?;
                s.fill(&mut out, 4)?;
                Ok((first, out))
            })
        };
        let (backward, (first, out)) = backward.unwrap();
        assert_eq!(out.block().address(), address);
        assert_eq!(graphs.stats().physical, physical + 2 * MIB);
        backward.launch(&u).unwrap();
        assert!(all(&read(&u, &first), 9) && all(&read(&u, &out), 4), "seed {seed}");
        for on in [&u, &v, &s] {
            forward.launch(on).unwrap();
            backward.launch(&v).unwrap();
            assert!(all(&read(&v, &first), 3) && all(&read(&v, &out), 4), "seed {seed}");
        }
        rig.assert_silent();
    }
}

#[test]
fn a_graph_is_not_launched_while_a_stream_that_used_its_memory_captures_the_next_one() {
    for seed in 0..SEEDS {
        let rig = seeded(seed);
        let [s, u, v] = [0; 3].map(|_| rig.stream());
        let graphs = rig.pool.graph_pool().unwrap();
        let (first, (mut a, b)) = copies(&rig, &graphs, &s);
        s.fill(&mut a, 3).unwrap();
        // SAFETY: 1. and 2. the work touches blocks of the graph pool alone.
        let made = unsafe {
            graphs.capture(&s, |s| {
                let mut x = rig.pool.buffer::<u8>(s, LEN)?;
                for on in [&v, s] {
                    let capturing = MemoryError::Capturing { stream: s.raw().handle() };
                    assert_eq!(first.launch(on), Err(capturing));
                }
                s.fill(&mut x, 9)?;
                drop(rig.pool.buffer::<u8>(&u, LEN)?);
                rig.pool.trim(0)?;
                Ok(x)
            })
        };
        let (second, x) = made.unwrap();
        first.launch(&v).unwrap();
        second.launch(&u).unwrap();
        assert!(all(&read(&v, &x), 9) && all(&read(&v, &b), 3), "seed {seed}");
        rig.assert_silent();
    }
}

#[test]
fn a_capture_that_fails_leaves_no_graph_and_a_stream_that_runs() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let graphs = rig.pool.graph_pool().unwrap();
    let failed = |work: fn(&Rig, &Stream) -> Result<(), MemoryError>| {
        // SAFETY: 1. and 2. the work touches nothing.
        unsafe { graphs.capture(&s, |s| work(&rig, s)) }.map(drop)
    };
    assert_eq!(failed(|_, _| Err(MemoryError::TimedOut)), Err(MemoryError::TimedOut));
    let broken = Err(MemoryError::CaptureInvalidated { stream: s.raw().handle() });
    let query = |_: &Rig, s: &Stream| s.driver().stream_query(s.raw()).map(drop).or(Ok(()));
    assert_eq!(failed(query), broken);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        failed(|_, _| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    assert_eq!(s.timeline().is_capturing(), Ok(false));
    assert_eq!(failed(|rig, s| rig.pool.alloc(s, Request::bytes(MIB)).map(drop)), Ok(()));
    s.synchronize().unwrap();
    rig.assert_silent();
}
