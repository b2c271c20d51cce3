//! Tests of captures and graphs.
//!
//! Captures are in thread-local or relaxed mode, unless a test needs global mode and has the device
//! to itself: in global mode the calls of every other test of this process would break them.

use super::support::{DEVICE, OwnStream, driver, read_back};
use aquifer_driver::{
    CaptureMode, CaptureStatus, Driver, ExportTypes, Pattern, RawGraph, RawGraphExec, RawStream,
    Relaxed, Result,
};
use std::sync::Arc;

const BYTES: u64 = 1 << 20;

fn begin(driver: &Arc<dyn Driver>, stream: RawStream) {
    driver.capture_begin(stream, CaptureMode::ThreadLocal).unwrap();
}

fn fill(driver: &Arc<dyn Driver>, stream: RawStream, to: u64, byte: u8) {
    // SAFETY: 1. the tests' blocks live until the device is idle. 2. each has one stream at a time.
    unsafe { driver.fill_with(stream, to, Pattern::Byte(byte), BYTES) }.unwrap();
}

fn launch(driver: &Arc<dyn Driver>, exec: RawGraphExec, stream: RawStream) -> Result<()> {
    // SAFETY: 1. and 2. as for a fill.
    unsafe { driver.graph_launch(exec, stream) }
}

fn destroy(driver: &Arc<dyn Driver>, graph: RawGraph) {
    // SAFETY: 1. no test uses it again.
    unsafe { driver.graph_destroy(graph) }.unwrap();
}

fn destroy_exec(driver: &Arc<dyn Driver>, exec: RawGraphExec) {
    // Another test of this process may capture in global mode.
    let _relaxed = Relaxed::enter(&**driver);
    // SAFETY: 1. no test uses it again.
    unsafe { driver.graph_exec_destroy(exec) }.unwrap();
}

fn order(driver: &Arc<dyn Driver>, first: RawStream, then: RawStream) {
    let event = driver.event_create(DEVICE).unwrap();
    driver.event_record(event, first).unwrap();
    driver.stream_wait_event(then, event).unwrap();
    // SAFETY: 1. known only here. A queued wait for it continues.
    unsafe { driver.event_destroy(event) }.unwrap();
}

#[test]
fn streams_tell_which_capture_they_take_part_in() {
    let Some(driver) = driver() else { return };
    let (s, u, v) = (OwnStream::new(&driver), OwnStream::new(&driver), OwnStream::new(&driver));
    let status = |stream: &OwnStream| driver.capture_status(stream.raw).unwrap();
    assert_eq!(status(&s), CaptureStatus::None);
    driver.capture_begin(s.raw, CaptureMode::Relaxed).unwrap();
    driver.capture_begin(v.raw, CaptureMode::Relaxed).unwrap();
    order(&driver, s.raw, u.raw);
    let first = status(&s);
    assert!(matches!(first, CaptureStatus::Active { .. }), "{first:?}");
    assert_eq!(status(&u), first);
    assert_ne!(status(&v), first);
    order(&driver, u.raw, s.raw);
    destroy(&driver, driver.capture_end(s.raw).unwrap());
    destroy(&driver, driver.capture_end(v.raw).unwrap());
    assert_eq!((status(&s), status(&u)), (CaptureStatus::None, CaptureStatus::None));
    driver.capture_begin(s.raw, CaptureMode::Relaxed).unwrap();
    assert_ne!(status(&s), first, "numbers do not come back");
    assert_eq!(driver.stream_query(s.raw).unwrap_err().code, 900);
    assert_eq!(status(&s), CaptureStatus::Invalidated);
    assert_eq!(driver.capture_end(s.raw).unwrap_err().code, 901);
    assert_eq!(status(&s), CaptureStatus::None);
}

#[test]
fn thread_local_captures_are_broken_by_their_own_thread_and_relaxed_ones_by_none() {
    let Some(driver) = driver() else { return };
    let s = OwnStream::new(&driver);
    let event = driver.event_create(DEVICE).unwrap();
    for (mode, elsewhere, relaxed, breaks) in [
        (CaptureMode::ThreadLocal, false, false, true),
        (CaptureMode::ThreadLocal, false, true, false),
        (CaptureMode::ThreadLocal, true, false, false),
        (CaptureMode::Relaxed, false, false, false),
        (CaptureMode::Relaxed, true, false, false),
    ] {
        driver.capture_begin(s.raw, mode).unwrap();
        let ask = || {
            let _relaxed = relaxed.then(|| Relaxed::enter(&*driver));
            driver.event_query(event)
        };
        let answer = if elsewhere {
            std::thread::scope(|scope| scope.spawn(ask).join().unwrap())
        } else {
            ask()
        };
        let what = format!("{mode:?}, elsewhere {elsewhere}, relaxed {relaxed}");
        assert_eq!(answer.map_err(|e| e.code), if breaks { Err(900) } else { Ok(true) }, "{what}");
        match driver.capture_end(s.raw) {
            Ok(graph) => {
                assert!(!breaks, "{what}");
                destroy(&driver, graph);
            }
            Err(error) => assert!(breaks && error.code == 901, "{what}: {error}"),
        }
    }
    // SAFETY: 1. known only here.
    unsafe { driver.event_destroy(event) }.unwrap();
}

#[test]
fn mapping_leaves_a_capture_alone_and_its_graph_runs_over_what_is_mapped_later() {
    let Some(driver) = driver() else { return };
    let info = driver.device_info(DEVICE).unwrap();
    if !info.virtual_memory {
        println!("skipped: no virtual memory management");
        return;
    }
    let granule = info.granularity;
    let s = OwnStream::new(&driver);
    let range = driver.address_reserve(DEVICE, granule, 0).unwrap();
    let map = || {
        let handle = driver.handle_create(DEVICE, granule, ExportTypes::NONE).unwrap();
        // SAFETY: 1. nothing is mapped there.
        unsafe { driver.map(range, granule, handle) }.unwrap();
        driver.set_access(range, granule, &[DEVICE]).unwrap();
        handle
    };
    // SAFETY: throughout: 1. unmapped memory is not used by queued work. 2. handles are released
    // once.
    let unmap = |handle| unsafe {
        driver.unmap(DEVICE, range, granule).unwrap();
        driver.handle_release(handle).unwrap();
    };
    begin(&driver, s.raw);
    let first = map();
    fill(&driver, s.raw, range, 5);
    let graph = driver.capture_end(s.raw).unwrap();
    // A fill over unmapped memory is refused here, with code 1.
    let exec = driver.graph_instantiate(graph).unwrap();
    destroy(&driver, graph);
    unmap(first);
    // A graph keeps addresses, and other memory is mapped there now.
    let second = map();
    launch(&driver, exec, s.raw).unwrap();
    assert_eq!(read_back(&driver, s.raw, range, BYTES as usize), vec![5; BYTES as usize]);
    destroy_exec(&driver, exec);
    s.synchronize();
    unmap(second);
    // SAFETY: 1. nothing is mapped there.
    unsafe { driver.address_free(DEVICE, range, granule) }.unwrap();
}
