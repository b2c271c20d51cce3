//! Tests of the driver's results for invalid calls, and of whether the simulated driver returns the
//! same.
//!
//! Calls across the end of a range (map, unmap, set access) are not tested: their result depends on
//! the neighbouring memory. The simulated driver refuses them.

use super::support::{DEVICE, OwnStream, Pages, driver};
use aquifer_driver::{
    CaptureMode, DeviceId, Driver, ExportTypes, Pattern, RawStream, Relaxed, Result,
    sim::{OnViolation, Sim},
};
use std::sync::Arc;

/// More bytes than any device or host has.
const ABSURD: u64 = 1 << 46;

/// Every result with the name of its call.
struct Answers(Vec<(&'static str, u32)>);

impl Answers {
    fn note<T>(&mut self, what: &'static str, result: Result<T>) {
        self.0.push((what, result.map_or_else(|e| e.code, |_| 0)));
    }

    fn of(&self, what: &str) -> Option<u32> {
        self.0.iter().find(|(asked, _)| *asked == what).map(|&(_, code)| code)
    }
}

/// Makes invalid calls. Each group leaves nothing behind, whether its calls are refused or
/// accepted.
fn ask(driver: &Arc<dyn Driver>) -> Answers {
    let mut answers = Answers(Vec::new());
    devices_and_memory(driver, &mut answers);
    pools(driver, &mut answers);
    virtual_memory(driver, &mut answers);
    pinned(driver, &mut answers);
    fills(driver, &mut answers);
    captures(driver, &mut answers);
    unmapped_graphs(driver, &mut answers);
    answers
}

/// Tests what the driver checks when it instantiates a graph whose memory is no longer mapped.
fn unmapped_graphs(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let granule = driver.device_info(DEVICE).unwrap().granularity;
    if granule == 0 {
        return;
    }
    let stream = OwnStream::new(driver);
    let block = driver.mem_alloc(DEVICE, 4096).unwrap();
    let pinned = driver.host_alloc(DEVICE, 4096, true).unwrap();
    let range = driver.address_reserve(DEVICE, granule, 0).unwrap();
    let handle = driver.handle_create(DEVICE, granule, ExportTypes::NONE).unwrap();
    // SAFETY: throughout: 1. nothing is launched, so nothing is accessed. 2. each object is
    // destroyed once.
    unsafe {
        driver.map(range, granule, handle).unwrap();
        driver.set_access(range, granule, &[DEVICE]).unwrap();
        let captured = |work: &dyn Fn() -> Result<()>| {
            // Other tests of this process make calls meanwhile, so nothing is captured in global
            // mode.
            driver.capture_begin(stream.raw, CaptureMode::ThreadLocal).unwrap();
            work().unwrap();
            driver.capture_end(stream.raw).unwrap()
        };
        let (d, s) = (driver, stream.raw);
        let graphs = [
            ("graph: fill of what is unmapped", captured(&|| d.fill(s, range, 1, 4096))),
            (
                "graph: copy from what is unmapped",
                captured(&|| d.copy_on_device(s, block, range, 4096)),
            ),
            (
                "graph: copy to what is unmapped",
                captured(&|| d.copy_on_device(s, range, block, 4096)),
            ),
            (
                "graph: upload to what is unmapped",
                captured(&|| d.copy_to_device(s, range, pinned, 4096)),
            ),
            (
                "graph: download of what is unmapped",
                captured(&|| d.copy_to_host(s, pinned, range, 4096)),
            ),
        ];
        driver.unmap(DEVICE, range, granule).unwrap();
        for (what, graph) in graphs {
            let exec = driver.graph_instantiate(graph);
            answers.note(what, exec);
            if let Ok(exec) = exec {
                driver.graph_exec_destroy(exec).unwrap();
            }
            driver.graph_destroy(graph).unwrap();
        }
        driver.handle_release(handle).unwrap();
        driver.address_free(DEVICE, range, granule).unwrap();
        driver.host_free(DEVICE, pinned).unwrap();
        driver.mem_free(DEVICE, block).unwrap();
    }
}

fn captures(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let (a, b) = (OwnStream::new(driver), OwnStream::new(driver));
    let block = driver.mem_alloc(DEVICE, 4096).unwrap();
    let event = driver.event_create(DEVICE).unwrap();
    // Other tests of this process make calls meanwhile, so nothing is captured in global mode.
    let begin = || driver.capture_begin(a.raw, CaptureMode::ThreadLocal);
    // SAFETY: throughout: 1. the block lives until the device is idle. 2. one stream uses it. 3.
    // destroyed handles are not used again.
    unsafe {
        let fill = |stream: &OwnStream| driver.fill(stream.raw, block, 1, 4096);
        let end = |answers: &mut Answers, what, stream: &OwnStream| {
            let graph = driver.capture_end(stream.raw);
            answers.note(what, graph);
            if let Ok(graph) = graph {
                driver.graph_destroy(graph).unwrap();
            }
        };
        answers.note("capture on the legacy stream", {
            driver.capture_begin(RawStream::legacy(DEVICE), CaptureMode::ThreadLocal)
        });
        end(answers, "end a capture that is none", &a);
        answers.note("capture", begin());
        answers.note("capture twice", begin());
        let memory = driver.mem_alloc(DEVICE, 4096);
        answers.note("allocate in a capture", memory);
        end(answers, "end a capture in which memory was asked for", &a);
        if let Ok(memory) = memory {
            driver.mem_free(DEVICE, memory).unwrap();
        }

        answers.note("capture for a query", begin());
        answers.note("query a stream that captures", driver.stream_query(a.raw));
        answers.note("fill in a broken capture", fill(&a));
        answers.note("record in a broken capture", driver.event_record(event, a.raw));
        end(answers, "end a capture with a query", &a);

        answers.note("capture with an event", begin());
        answers.note("record in a capture", driver.event_record(event, a.raw));
        answers.note("join a capture", driver.stream_wait_event(b.raw, event));
        end(answers, "end a capture on a stream that joined", &b);
        end(answers, "end a capture that was joined without work", &a);
        answers.note("query a captured event", driver.event_query(event));
        answers.note("wait for a captured event", driver.event_synchronize(event));
        answers.note(
            "order by an event of a capture that is over",
            driver.stream_wait_event(b.raw, event),
        );
        answers.note("record a captured event again", driver.event_record(event, a.raw));
        a.synchronize();
        answers.note("query an event recorded again", driver.event_query(event));

        answers.note("capture to be left unjoined", begin());
        answers.note("record for a fork", driver.event_record(event, a.raw));
        answers.note("fork", driver.stream_wait_event(b.raw, event));
        answers.note("fill in a fork", fill(&b));
        end(answers, "end a capture with work unjoined", &a);
        answers.note("fill after that", fill(&b));
        b.synchronize();

        answers.note("record outside", driver.event_record(event, b.raw));
        answers.note("capture apart", begin());
        answers.note("wait for what is outside", driver.stream_wait_event(a.raw, event));
        end(answers, "end a capture that waited for what is outside", &a);

        answers.note("capture to launch", begin());
        answers.note("fill in a capture", fill(&a));
        let graph = driver.capture_end(a.raw).unwrap();
        let exec = driver.graph_instantiate(graph).unwrap();
        answers.note("capture to launch in", begin());
        answers.note("launch into a capture", driver.graph_launch(exec, a.raw));
        end(answers, "end a capture that was launched into", &a);
        answers.note("capture beside a launch", begin());
        answers.note("launch beside a capture", driver.graph_launch(exec, b.raw));
        answers.note("instantiate beside a capture", {
            driver.graph_instantiate(graph).map(|exec| {
                let _relaxed = Relaxed::enter(&**driver);
                driver.graph_exec_destroy(exec)
            })
        });
        end(answers, "end a capture beside a launch", &a);
        answers.note("capture beside a question", begin());
        answers.note("number of a stream beside a capture", driver.stream_id(b.raw));
        end(answers, "end a capture beside a question", &a);
        answers.note("capture before a question", begin());
        answers.note("number of a stream that captures", driver.stream_id(a.raw));
        end(answers, "end a capture after a question", &a);
        answers.note("capture beside an end", begin());
        let ended = driver.graph_exec_destroy(exec);
        answers.note("end an executable beside a capture", ended);
        end(answers, "end a capture beside the end of an executable", &a);
        if ended.is_err() {
            driver.graph_exec_destroy(exec).unwrap();
        }
        answers.note("capture beside the end of a graph", begin());
        answers.note("end a graph beside a capture", driver.graph_destroy(graph));
        end(answers, "end a capture beside the end of a graph", &a);
        driver.device_synchronize(DEVICE).unwrap();
        driver.event_destroy(event).unwrap();
        driver.mem_free(DEVICE, block).unwrap();
    }
}

fn fills(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let stream = OwnStream::new(driver);
    let block = driver.mem_alloc(DEVICE, 64).unwrap();
    // SAFETY: throughout: 1. all of it lies in the block. 2. one stream. Other conditions of a call
    // are deliberately broken.
    unsafe {
        let with = |to, pattern| driver.fill_with(stream.raw, to, pattern, 4);
        answers.note("fill halves", with(block + 2, Pattern::Half(1)));
        answers.note("fill halves off their address", with(block + 1, Pattern::Half(1)));
        answers.note("fill words off their address", with(block + 2, Pattern::Word(1)));
        stream.synchronize();
        driver.mem_free(DEVICE, block).unwrap();
    }
}

fn devices_and_memory(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let nowhere = DeviceId(9999);
    answers.note("info of a device that is not there", driver.device_info(nowhere));
    answers.note("stream on a device that is not there", driver.stream_create(nowhere, 0));
    answers.note("memory on a device that is not there", driver.mem_alloc(nowhere, 4096));
    answers.note("allocate nothing", driver.mem_alloc(DEVICE, 0));
    // SAFETY: 1. deliberately broken: nothing lies at address 0. 2. so nothing uses it.
    answers.note("free nothing", unsafe { driver.mem_free(DEVICE, 0) });
    answers.note("allocate too much", driver.mem_alloc(DEVICE, ABSURD));
    let block = driver.mem_alloc(DEVICE, 4096).unwrap();
    // SAFETY: 1. deliberately broken: the address starts no allocation. 2. nothing is queued.
    answers.note("free the middle of a block", unsafe { driver.mem_free(DEVICE, block + 256) });
    // SAFETY: 1. the block came from the driver. 2. nothing is queued.
    answers.note("free a block", unsafe { driver.mem_free(DEVICE, block) });
    // SAFETY: 1. deliberately broken: it has been freed.
    answers.note("free a block again", unsafe { driver.mem_free(DEVICE, block) });
}

fn pools(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let stream = OwnStream::new(driver);
    let pool = driver.pool_create(DEVICE).unwrap();
    let nothing = driver.pool_alloc(pool, stream.raw, 0);
    answers.note("pool: allocate nothing", nothing);
    if let Ok(nothing) = nothing {
        assert_eq!(nothing, 0, "no bytes lie nowhere");
        // SAFETY: 1. it came from the pool. 2. it has no bytes to use.
        answers.note("pool: free nothing", unsafe { driver.pool_free(stream.raw, nothing) });
    }
    answers.note("pool: allocate too much", driver.pool_alloc(pool, stream.raw, ABSURD));
    let block = driver.pool_alloc(pool, stream.raw, 4096).unwrap();
    // SAFETY: 1. deliberately broken: the address starts no allocation. 2. nothing uses it.
    answers.note("pool: free the middle of a block", unsafe {
        driver.pool_free(stream.raw, block + 256)
    });
    // SAFETY: 1. it came from the pool. 2. nothing uses it.
    answers.note("pool: free a block", unsafe { driver.pool_free(stream.raw, block) });
    // SAFETY: 1. deliberately broken: it has been freed.
    answers.note("pool: free a block again", unsafe { driver.pool_free(stream.raw, block) });
    stream.synchronize();
    // SAFETY: 1. the pool is this function's own.
    answers.note("pool: destroy", unsafe { driver.pool_destroy(pool) });
}

fn virtual_memory(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    let granule = driver.device_info(DEVICE).unwrap().granularity;
    if granule == 0 {
        println!("skipped: no virtual memory management to ask");
        return;
    }
    answers.note("reserve nothing", driver.address_reserve(DEVICE, 0, 0));
    answers.note("reserve half a granule", driver.address_reserve(DEVICE, granule / 2, 0));
    answers
        .note("reserve by an odd alignment", driver.address_reserve(DEVICE, granule, 3 * granule));
    answers.note("reserve more than there is", driver.address_reserve(DEVICE, 1 << 48, 0));
    answers.note("create nothing", driver.handle_create(DEVICE, 0, ExportTypes::NONE));
    answers.note(
        "create half a granule",
        driver.handle_create(DEVICE, granule / 2, ExportTypes::NONE),
    );
    answers.note("create too much", driver.handle_create(DEVICE, ABSURD, ExportTypes::NONE));

    let bytes = 8 * granule;
    let range = driver.address_reserve(DEVICE, bytes, 0).unwrap();
    let (one, two) = (
        driver.handle_create(DEVICE, granule, ExportTypes::NONE).unwrap(),
        driver.handle_create(DEVICE, 2 * granule, ExportTypes::NONE).unwrap(),
    );
    // SAFETY: throughout: 1. nothing is queued on any stream. Other conditions of a call are
    // deliberately broken.
    unsafe {
        answers.note("map off the granule", driver.map(range + granule / 2, granule, one));
        answers.note("map nothing", driver.map(range, 0, one));
        answers.note("map more than the handle", driver.map(range, 2 * granule, one));
        answers.note("map half a granule", driver.map(range, granule / 2, one));
        answers.note("unmap nothing there", driver.unmap(DEVICE, range, granule));
        answers.note("access to nothing mapped", driver.set_access(range, granule, &[DEVICE]));
        answers.note("access for nobody", driver.set_access(range, granule, &[]));

        answers.note("map", driver.map(range, granule, one));
        answers.note("map where something is", driver.map(range, granule, one));
        answers.note("map over the end of something", driver.map(range, 2 * granule, two));
        answers.note("map two granules", driver.map(range + 2 * granule, 2 * granule, two));
        answers.note("access", driver.set_access(range, granule, &[DEVICE]));
        answers.note("access across a hole", driver.set_access(range, 4 * granule, &[DEVICE]));
        answers.note("access into a hole", driver.set_access(range, 2 * granule, &[DEVICE]));
        answers.note(
            "access out of a hole",
            driver.set_access(range + granule, 3 * granule, &[DEVICE]),
        );
        answers.note(
            "access to half a mapping",
            driver.set_access(range + 2 * granule, granule, &[DEVICE]),
        );
        answers.note(
            "access to the other half",
            driver.set_access(range + 3 * granule, granule, &[DEVICE]),
        );
        answers.note("unmap half a mapping", driver.unmap(DEVICE, range + 2 * granule, granule));
        answers
            .note("unmap the other half", driver.unmap(DEVICE, range + 3 * granule, 2 * granule));
        answers.note("free a range in use", driver.address_free(DEVICE, range, bytes));
        answers.note("unmap with a hole", driver.unmap(DEVICE, range, 4 * granule));
        answers.note("unmap again", driver.unmap(DEVICE, range, granule));
        answers.note("access to what is gone", driver.set_access(range, 4 * granule, &[DEVICE]));
        answers.note("release", driver.handle_release(one));
        answers.note("release two", driver.handle_release(two));
        answers.note("free half a range", driver.address_free(DEVICE, range, bytes / 2));
        answers.note("free a range", driver.address_free(DEVICE, range, bytes));
        answers.note("free a range again", driver.address_free(DEVICE, range, bytes));
    }
}

fn pinned(driver: &Arc<dyn Driver>, answers: &mut Answers) {
    const BYTES: usize = 64 << 10;
    let stream = OwnStream::new(driver);
    let block = driver.mem_alloc(DEVICE, BYTES as u64).unwrap();
    let pages = Pages::new(BYTES);
    answers.note("pin nothing", driver.host_alloc(DEVICE, 0, false));
    // SAFETY: throughout: 1. the pages and the block live until the stream has been synchronised.
    // 2. nothing else accesses them. Other conditions of a call are deliberately broken.
    unsafe {
        answers.note("register nothing", driver.host_register(DEVICE, pages.at, 0));
        answers.note("unregister what is not", driver.host_unregister(DEVICE, pages.at));
        answers.note("register", driver.host_register(DEVICE, pages.at, BYTES / 2));
        answers.note("register again", driver.host_register(DEVICE, pages.at, BYTES / 2));
        answers.note("register what overlaps", driver.host_register(DEVICE, pages.at, BYTES));
        answers.note("register beside", driver.host_register(DEVICE, pages.half(), BYTES / 2));
        answers.note(
            "copy up across registrations",
            driver.copy_to_device(stream.raw, block, pages.at, BYTES),
        );
        answers.note(
            "copy down across registrations",
            driver.copy_to_host(stream.raw, pages.at, block, BYTES),
        );
        answers.note("copy nothing up", driver.copy_to_device(stream.raw, block, pages.at, 0));
        answers.note("copy nothing down", driver.copy_to_host(stream.raw, pages.at, block, 0));
        answers
            .note("copy nothing on the device", driver.copy_on_device(stream.raw, block, block, 0));
        answers.note("fill nothing", driver.fill(stream.raw, block, 0, 0));
        stream.synchronize();
        answers.note("free as if the driver's", driver.host_free(DEVICE, pages.at));
        answers
            .note("unregister in the middle", driver.host_unregister(DEVICE, pages.at.add(4096)));
        answers.note("unregister", driver.host_unregister(DEVICE, pages.at));
        answers.note("unregister beside", driver.host_unregister(DEVICE, pages.half()));
        answers.note("unregister again", driver.host_unregister(DEVICE, pages.at));
        driver.mem_free(DEVICE, block).unwrap();
    }
    let own = driver.host_alloc(DEVICE, BYTES, false).unwrap();
    // SAFETY: 1. it came from the driver, except for the second, deliberately broken call. 2.
    // nothing is queued.
    unsafe {
        answers.note("unregister the driver's own", driver.host_unregister(DEVICE, own));
        answers.note("register the driver's own", driver.host_register(DEVICE, own, BYTES));
        answers.note("free pinned", driver.host_free(DEVICE, own));
        answers.note("free pinned again", driver.host_free(DEVICE, own));
    }
}

#[test]
fn invalid_calls_are_refused_with_the_codes_that_callers_rely_on() {
    let Some(driver) = driver() else { return };
    let answers = ask(&driver);
    for (what, code) in &answers.0 {
        println!("{code:>4}  {what}");
    }
    for (what, code) in [
        ("info of a device that is not there", 101),
        ("allocate nothing", 1),
        ("allocate too much", 2),
        ("pool: allocate nothing", 0),
        ("pool: allocate too much", 2),
        ("create half a granule", 1),
        ("create too much", 2),
        ("map more than the handle", 801),
        ("unmap nothing there", 0),
        ("unmap half a mapping", 1),
        ("unmap with a hole", 0),
        ("access across a hole", 0),
        ("free a range", 0),
        ("pin nothing", 2),
        ("register again", 712),
        ("unregister again", 713),
        ("copy up across registrations", 1),
        ("copy down across registrations", 1),
        ("fill halves off their address", 1),
        ("fill words off their address", 1),
        ("graph: fill of what is unmapped", 1),
    ] {
        assert_eq!(answers.of(what), Some(code), "{what}");
    }
    driver.device_synchronize(DEVICE).unwrap();
}

#[test]
fn the_simulated_driver_answers_with_the_same_codes() {
    // Wrong calls are asked for on purpose, and some of them are violations.
    let simulated = ask(&Sim::h200(1).on_violation(OnViolation::Quiet).driver());
    let Some(driver) = driver() else { return };
    let real = ask(&driver);
    let mut differ = 0;
    println!("{:>6} {:>6}  asked", "cuda", "sim");
    for ((what, real), (also, simulated)) in real.0.iter().zip(&simulated.0) {
        assert_eq!(what, also);
        let mark = if real == simulated { ' ' } else { '*' };
        println!("{mark}{real:>5} {simulated:>6}  {what}");
        differ += usize::from(real != simulated);
    }
    assert_eq!(real.0.len(), simulated.0.len());
    assert_eq!(differ, 0, "see the table");
}
