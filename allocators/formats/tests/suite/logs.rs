//! Tests that what a pool logs, in our own format or in RMM's, is read again.

use aquifer_core::{Budget, EventSink, Recorder, event::TraceFile};
use aquifer_device::{DevicePool, PoolConfig, Request};
use aquifer_driver::{Access, DeviceId, sim::Sim};
use aquifer_formats::{
    RmmLog,
    trace::{Trace, TraceAction, TraceFormat},
};
use std::{path::Path, sync::Arc};

/// Returns the trace of a small program, written by one of the library's sinks.
fn written<S: EventSink + 'static>(
    name: &str,
    sink: impl FnOnce(&Path) -> std::io::Result<S>,
    limit: u64,
) -> Trace {
    let path = std::env::temp_dir().join(format!("aquifer-{}-{name}.csv", std::process::id()));
    let sim = Sim::h200(1).symbolic();
    let mut config = PoolConfig::with_budget(Budget::new("the device", limit));
    config.recorder = Some(Arc::new(Recorder::new(Arc::new(sink(&path).unwrap()))));
    let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let [first, second, third] =
        [100, 200, 300].map(|bytes| pool.alloc(&s, Request::bytes(bytes)).unwrap());
    let used = second.prepare(&u, Access::Read).unwrap();
    drop(first);
    drop(second);
    let fourth = pool.alloc(&u, Request::bytes(400)).unwrap();
    assert!(pool.alloc(&u, Request::bytes(2 * limit)).is_err());
    used.finish().unwrap();
    u.synchronize().unwrap();
    pool.trim(0).unwrap();
    drop((third, fourth));
    drop((pool, s, u));
    let read = Trace::read(&path, None);
    let _ = std::fs::remove_file(&path);
    read.unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn what_the_library_writes_is_read_again() {
    let trace = written("written", TraceFile::create, 64 << 20);
    assert_eq!((trace.allocations(), trace.frees, trace.streams, trace.peak_live), (4, 4, 2, 700));
    assert_eq!(
        trace.blocks.iter().map(|b| b.lingers).collect::<Vec<_>>(),
        [false, true, false, false]
    );
    assert_eq!(trace.live_at_end, 0);
}

#[test]
fn what_the_library_writes_as_rmms_log_is_read_again_as_the_same_program() {
    let ours = written("as-ours", TraceFile::create, 64 << 20);
    let rmms = written("as-rmms", RmmLog::create, 64 << 20);
    assert_eq!(rmms.format, TraceFormat::Rmm);
    let told = |trace: &Trace| {
        let blocks: Vec<_> = trace.blocks.iter().map(|b| (b.bytes, b.stream, b.freed_on)).collect();
        // RMM's log has no completions.
        let steps: Vec<_> = trace
            .steps
            .iter()
            .filter(|step| step.action != TraceAction::Complete)
            .copied()
            .collect();
        (blocks, steps, trace.streams, trace.peak_live)
    };
    assert_eq!(told(&rmms), told(&ours));
}
