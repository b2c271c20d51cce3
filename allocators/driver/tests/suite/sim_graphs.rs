//! Tests that captures and graphs behave as those of the real driver.
#![allow(
    unsafe_code,
    reason = "the tests answer for the memory that their copies and launches name"
)]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, Machine, PATIENCE, everywhere};
use aquifer_driver::{
    Access, Call, CaptureMode, CaptureStatus, DriverError, RawGraph, RawGraphExec, RawStream,
    Relaxed,
    sim::{Sim, SimKernel},
};

fn bytes() -> Machine {
    Machine::new(Sim::h200(1).capacity(64 << 20))
}

fn code<T: std::fmt::Debug>(answer: Result<T, DriverError>) -> u32 {
    answer.unwrap_err().code
}

fn try_launch(m: &Machine, exec: RawGraphExec, stream: RawStream) -> Result<(), DriverError> {
    // SAFETY: 1. and 2. The simulator checks what this asks for.
    unsafe { m.driver.graph_launch(exec, stream) }
}

fn end(m: &Machine, exec: RawGraphExec) {
    // SAFETY: 1. Tests use it again only in calls that are refused.
    unsafe { m.driver.graph_exec_destroy(exec) }.unwrap();
}

fn captured(m: &Machine, stream: RawStream, work: impl FnOnce()) -> RawGraph {
    m.driver.capture_begin(stream, CaptureMode::Global).unwrap();
    work();
    m.driver.capture_end(stream).unwrap()
}

#[test]
fn captured_work_runs_at_each_launch_and_at_no_other_time() {
    for sim in [Sim::h200(1), Sim::h200(1).stepped(), Sim::h200(1).seeded(3)] {
        let m = Machine::new(sim.capacity(64 << 20));
        let (a, x, y) = (m.stream(), m.alloc(8), m.alloc(8));
        // SAFETY: 1. and 2. `x` is mapped, and this test's own.
        unsafe { m.driver.fill(a, x.address, 1, 8) }.unwrap();
        let exec = m.exec(a, || {
            let add = SimKernel::new("add").touches(x, Access::ReadWrite, None);
            m.sim
                .launch(a, add.run(|memory| memory.write(0).iter_mut().for_each(|byte| *byte += 1)))
                .unwrap();
            // SAFETY: 1. and 2. as above.
            unsafe { m.driver.copy_on_device(a, y.address, x.address, 8) }.unwrap();
        });
        m.driver.stream_synchronize(a).unwrap();
        assert_eq!(m.sim.read_back(x), Some(vec![1; 8]));
        for launch in 1..=3 {
            m.launch(exec, a);
            m.driver.stream_synchronize(a).unwrap();
            assert_eq!(m.sim.read_back(y), Some(vec![1 + launch; 8]));
        }
        m.silent();
        end(&m, exec);
    }
}

#[test]
fn branches_run_in_the_order_of_the_events_that_were_captured() {
    for seed in 0..40 {
        let m = Machine::new(Sim::h200(1).capacity(64 << 20).seeded(seed));
        let (a, b, c) = (m.stream(), m.stream(), m.stream());
        let (x, y, z) = (m.alloc(4), m.alloc(4), m.alloc(4));
        let exec = m.exec(a, || {
            // SAFETY: 1. and 2. The three are mapped, and this test's own.
            let fill = |stream, byte| unsafe { m.driver.fill(stream, x.address, byte, 4) }.unwrap();
            // SAFETY: 1. and 2. as above.
            let copy =
                |stream, to, from| unsafe { m.driver.copy_on_device(stream, to, from, 4) }.unwrap();
            fill(a, 1);
            m.order(a, b);
            m.order(a, c);
            copy(b, y.address, x.address);
            copy(c, z.address, x.address);
            m.order(b, a);
            m.order(c, a);
            fill(a, 2);
        });
        m.launch(exec, a);
        m.launch(exec, a);
        m.driver.stream_synchronize(a).unwrap();
        let read = |range| m.sim.read_back(range).unwrap()[0];
        assert_eq!((read(x), read(y), read(z)), (2, 1, 1), "seed {seed}");
        m.silent();
    }
}

#[test]
fn what_follows_a_launch_waits_for_every_branch_and_what_precedes_it_is_waited_for() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, y) = (m.alloc(4), m.alloc(4));
        let exec = m.exec(a, || {
            m.order(a, b);
            m.write(b, x);
            m.order(b, a);
            m.write(a, y);
        });
        // The launch may be on a stream that took no part in the capture.
        let other = m.stream();
        m.write(other, x);
        m.launch(exec, other);
        m.write(other, x);
        m.silent();
    });
}

#[test]
fn launches_of_one_executable_follow_one_another_on_whatever_stream() {
    everywhere(|m| {
        let (a, b, fork) = (m.stream(), m.stream(), m.stream());
        let (x, y) = (m.alloc(4), m.alloc(4));
        let exec = m.exec(a, || {
            m.order(a, fork);
            m.write(fork, x);
            m.write(a, y);
            m.order(fork, a);
        });
        m.launch(exec, a);
        m.launch(exec, b);
        m.launch(exec, a);
        m.silent();
        // A stream that takes the place of a destroyed one behaves like any other.
        m.sim.run_all();
        // SAFETY: 1. Not used again.
        unsafe { m.driver.stream_destroy(a) }.unwrap();
        let again = m.stream();
        assert_eq!(again, a, "the handle comes back");
        m.launch(exec, again);
        m.silent();
    });
}

#[test]
fn a_stepped_launch_runs_node_by_node_its_branches_too() {
    let m = Machine::new(Sim::h200(1).symbolic().stepped());
    let (a, b, x, y) = (m.stream(), m.stream(), m.alloc(4), m.alloc(4));
    let exec = m.exec(a, || {
        m.order(a, b);
        m.write(b, x);
        m.write(a, y);
        m.order(b, a);
    });
    m.launch(exec, a);
    let mut steps = 0;
    while m.sim.step(a) {
        steps += 1;
    }
    assert!(steps >= 2, "{steps}");
    assert_eq!(m.driver.stream_query(a), Ok(true));
}

#[test]
fn a_stream_reports_its_capture() {
    let m = bytes();
    let (a, b, c) = (m.stream(), m.stream(), m.stream());
    let status = |stream| m.driver.capture_status(stream);
    assert_eq!(status(a), Ok(CaptureStatus::None));
    m.driver.capture_begin(a, CaptureMode::Relaxed).unwrap();
    m.order(a, b);
    m.driver.capture_begin(c, CaptureMode::Relaxed).unwrap();
    let (first, other) = (status(a).unwrap(), status(c).unwrap());
    assert!(matches!(first, CaptureStatus::Active { .. }));
    assert_eq!(status(b), Ok(first), "it has joined");
    assert_ne!(first, other);
    // A merge breaks both captures.
    assert_eq!(code(m.driver.stream_wait_event(c, m.fence(b))), 902);
    for stream in [a, b, c] {
        assert_eq!(status(stream), Ok(CaptureStatus::Invalidated));
    }
    assert_eq!((code(m.driver.capture_end(a)), code(m.driver.capture_end(c))), (901, 901));
    assert_eq!(status(b), Ok(CaptureStatus::None));
    m.driver.capture_begin(a, CaptureMode::Relaxed).unwrap();
    assert!(![first, other].contains(&status(a).unwrap()), "numbers do not come back");
    let blocking = m.sim.blocking_stream(GPU).unwrap();
    m.driver.capture_begin(blocking, CaptureMode::Relaxed).unwrap();
    assert_eq!(code(status(m.sim.legacy_stream(GPU))), 906);
    m.driver.capture_end(blocking).unwrap();
    assert_eq!(status(m.sim.legacy_stream(GPU)), Ok(CaptureStatus::None));
}

#[test]
fn invalid_graph_calls_are_refused_with_their_codes() {
    let m = bytes();
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(4));
    assert_eq!(code(m.driver.capture_begin(m.sim.legacy_stream(GPU), CaptureMode::Global)), 900);
    assert_eq!(code(m.driver.capture_end(a)), 401, "nothing was begun");
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    assert_eq!(code(m.driver.capture_begin(a, CaptureMode::ThreadLocal)), 401);
    let wrong = std::thread::scope(|scope| scope.spawn(|| m.driver.capture_end(a)).join().unwrap());
    assert_eq!(code(wrong), 908);
    // Work of a stream that took part but is not joined.
    m.order(a, b);
    m.write(b, x);
    assert_eq!(code(m.driver.capture_end(a)), 904);
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    m.order(a, b);
    assert_eq!(code(m.driver.capture_end(b)), 903);
    assert_eq!(code(m.driver.capture_end(a)), 901, "and that breaks it");
    assert_eq!(m.driver.capture_status(b), Ok(CaptureStatus::None), "that ends it too");
    // A stream that took part without work needs no join.
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    let event = m.fence(a);
    m.driver.stream_wait_event(b, event).unwrap();
    m.driver.capture_end(a).unwrap();
    assert_eq!(code(m.driver.event_query(event)), 1);
    assert_eq!(code(m.driver.event_synchronize(event)), 1);
    assert_eq!(code(m.driver.stream_wait_event(b, event)), 1, "its capture is over");
    m.driver.event_record(event, a).unwrap();
    assert_eq!(m.driver.event_query(event), Ok(true), "recorded again it is an event as any");
}

#[test]
fn instantiating_beside_a_strict_capture_breaks_it_and_is_refused() {
    let m = bytes();
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(4));
    m.driver.capture_begin(a, CaptureMode::ThreadLocal).unwrap();
    m.write(a, x);
    let graph = m.driver.capture_end(a).unwrap();
    m.driver.capture_begin(b, CaptureMode::Global).unwrap();
    assert_eq!(code(m.driver.graph_instantiate(graph)), 900);
    assert_eq!(code(m.driver.capture_end(b)), 901);
    m.driver.capture_begin(b, CaptureMode::Relaxed).unwrap();
    let exec = m.driver.graph_instantiate(graph).unwrap();
    let other = m.driver.capture_end(b).unwrap();
    // SAFETY: 1. no copy of a handle is kept.
    unsafe {
        m.driver.graph_exec_destroy(exec).unwrap();
        m.driver.graph_destroy(graph).unwrap();
        m.driver.graph_destroy(other).unwrap();
    }
}

#[test]
fn a_launch_into_a_capture_and_the_end_of_an_executable_break_it() {
    let m = bytes();
    let (a, b) = (m.stream(), m.stream());
    let x = m.alloc(4);
    let exec = m.exec(a, || m.write(a, x));
    m.driver.capture_begin(a, CaptureMode::Relaxed).unwrap();
    assert_eq!(code(try_launch(&m, exec, a)), 900);
    assert_eq!(code(m.driver.capture_end(a)), 901);
    m.driver.capture_begin(a, CaptureMode::Global).unwrap();
    assert_eq!(try_launch(&m, exec, b), Ok(()), "on another stream it is no matter");
    // SAFETY: 1. It is refused.
    assert_eq!(code(unsafe { m.driver.graph_exec_destroy(exec) }), 900);
    assert_eq!(code(m.driver.capture_end(a)), 901);
    m.driver.capture_begin(a, CaptureMode::Global).unwrap();
    {
        let _relaxed = Relaxed::enter(&*m.driver);
        end(&m, exec);
    }
    assert!(m.driver.capture_end(a).is_ok());
}

#[test]
fn the_end_of_a_stream_that_began_a_capture_ends_that() {
    let m = bytes();
    let (a, b) = (m.stream(), m.stream());
    m.driver.capture_begin(a, CaptureMode::Global).unwrap();
    m.order(a, b);
    // SAFETY: 1. Not used again.
    unsafe { m.driver.stream_destroy(a) }.unwrap();
    assert_eq!(m.driver.capture_status(b), Ok(CaptureStatus::None));
    m.alloc(4);
    m.driver.stream_query(b).unwrap();
}

#[test]
fn a_graph_and_its_executables_end_apart_and_launches_end_by_themselves() {
    let m = Machine::new(Sim::h200(1).capacity(64 << 20).stepped());
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(4));
    let graph = captured(&m, a, || {
        m.order(a, b);
        // SAFETY: 1. and 2. `x` is mapped, and this test's own.
        unsafe { m.driver.fill(b, x.address, 9, 4) }.unwrap();
        m.order(b, a);
    });
    assert_eq!(m.sim.graph_nodes(graph), Some(1));
    let exec = m.driver.graph_instantiate(graph).unwrap();
    assert_eq!((m.sim.outstanding().graphs, m.sim.outstanding().graph_execs), (1, 1));
    assert_eq!(m.sim.outstanding().streams, 2, "branches are no streams of the program's");
    // SAFETY: 1. Used below only in calls that are refused.
    unsafe { m.driver.graph_destroy(graph) }.unwrap();
    assert_eq!(m.sim.graph_nodes(graph), None);
    assert_eq!(code(m.driver.graph_instantiate(graph)), 1);
    m.launch(exec, a);
    end(&m, exec);
    assert_eq!(code(try_launch(&m, exec, a)), 1);
    assert_eq!((m.sim.outstanding().graphs, m.sim.outstanding().graph_execs), (0, 0));
    assert_eq!(m.sim.read_back(x), Some(vec![0; 4]), "it has not run yet");
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.read_back(x), Some(vec![9; 4]));
    m.silent();
}

#[test]
fn a_captured_copy_reads_the_host_when_it_is_launched_pinned_or_not() {
    let m = bytes();
    let (a, x) = (m.stream(), m.alloc(4));
    let pinned = m.pinned(4);
    let mut own = [1_u8; 4];
    let pageable = std::ptr::NonNull::from(&mut own).cast::<u8>();
    for host in [pinned, pageable] {
        // SAFETY: 1. and 2. Both live, and nothing else accesses them.
        unsafe { host.write_bytes(1, 4) };
        let exec = m.exec(a, || {
            // SAFETY: 1. and 2. as above, and `x` is mapped.
            unsafe { m.driver.copy_to_device(a, x.address, host, 4) }.unwrap();
        });
        // SAFETY: as above.
        unsafe { host.write_bytes(2, 4) };
        m.launch(exec, a);
        m.driver.stream_synchronize(a).unwrap();
        assert_eq!(m.sim.read_back(x), Some(vec![2; 4]));
    }
    m.silent();
}

#[test]
fn a_call_that_fails_changes_nothing() {
    let m = bytes();
    let (a, x) = (m.stream(), m.alloc(4));
    m.sim.fail(Call::CaptureBegin, 1, 2);
    assert_eq!(code(m.driver.capture_begin(a, CaptureMode::Global)), 2);
    assert_eq!(m.driver.capture_status(a), Ok(CaptureStatus::None));
    m.driver.capture_begin(a, CaptureMode::Global).unwrap();
    // SAFETY: 1. and 2. `x` is mapped, and this test's own.
    unsafe { m.driver.fill(a, x.address, 5, 4) }.unwrap();
    m.sim.fail(Call::CaptureEnd, 1, 2);
    assert_eq!(code(m.driver.capture_end(a)), 2);
    let graph = m.driver.capture_end(a).unwrap();
    m.sim.fail(Call::GraphInstantiate, 1, 2);
    assert_eq!(code(m.driver.graph_instantiate(graph)), 2);
    assert_eq!(m.sim.outstanding().graph_execs, 0);
    let exec = m.driver.graph_instantiate(graph).unwrap();
    m.sim.fail(Call::GraphLaunch, 2, 2);
    m.launch(exec, a);
    // SAFETY: 1. and 2. as above.
    unsafe { m.driver.fill(a, x.address, 0, 4) }.unwrap();
    assert_eq!(code(try_launch(&m, exec, a)), 2);
    assert_eq!(m.sim.read_back(x), Some(vec![0; 4]));
    m.sim.fail(Call::GraphExecDestroy, 1, 2);
    // SAFETY: 1. It is refused.
    assert_eq!(code(unsafe { m.driver.graph_exec_destroy(exec) }), 2);
    m.launch(exec, a);
    assert_eq!(m.sim.read_back(x), Some(vec![5; 4]));
    end(&m, exec);
    m.sim.fail(Call::GraphDestroy, 1, 2);
    // SAFETY: 1. The first call is refused and the second is the last.
    assert_eq!(code(unsafe { m.driver.graph_destroy(graph) }), 2);
    // SAFETY: 1. as above.
    unsafe { m.driver.graph_destroy(graph) }.unwrap();
    m.silent();
}

#[test]
fn a_lost_device_drops_launches() {
    let m = Machine::new(Sim::h200(1).capacity(64 << 20).stepped());
    let (a, x) = (m.stream(), m.alloc(4));
    let graph = captured(&m, a, || {
        m.sim.launch(a, SimKernel::new("never").writes(x, None).run(|_| panic!("runs"))).unwrap();
    });
    let exec = m.driver.graph_instantiate(graph).unwrap();
    // SAFETY: 1. Not used again.
    unsafe { m.driver.graph_destroy(graph) }.unwrap();
    m.launch(exec, a);
    end(&m, exec);
    m.sim.lose_device(GPU);
    assert_eq!(code(m.driver.capture_begin(a, CaptureMode::Global)), 700);
    assert_eq!(code(try_launch(&m, exec, a)), 700);
    m.sim.run_all();
}

#[test]
fn a_delayed_launch_delays_no_other_work() {
    let m = bytes();
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(4));
    let exec = m.exec(a, || m.write(a, x));
    let stall = m.sim.stall(Call::GraphLaunch);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| m.launch(exec, a));
        assert!(stall.wait_for(1, PATIENCE));
        assert_eq!(m.driver.stream_query(b), Ok(true));
        assert!(!waiter.is_finished());
        drop(stall);
        waiter.join().unwrap();
    });
    m.silent();
}
