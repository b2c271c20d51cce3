//! Tests that unordered work of a launched graph is reported with the lines of the capture, the
//! launch and the other party.
#![allow(unsafe_code, reason = "commits on purpose what unsafe calls forbid")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, Machine, everywhere};
use aquifer_driver::{
    Access, BlockNote, CaptureMode, DeviceRange, Observer, Ownership, Pattern, RawStream,
    sim::{Agent, Sim, SimKernel, Violation, ViolationKind},
};

const FILE: &str = "sim_graph_faults.rs";

fn observer(m: &Machine) -> &dyn Observer {
    m.driver.observer().unwrap()
}

fn note(m: &Machine, range: DeviceRange, owner: Ownership<'_>) {
    observer(m).block(BlockNote { range, owner });
}

fn live(m: &Machine, range: DeviceRange, stream: RawStream, generation: u64) {
    note(m, range, Ownership::Live { stream, generation });
}

fn fill(m: &Machine, stream: RawStream, range: DeviceRange) {
    // SAFETY: 1. and 2. The simulator checks what this asks for.
    unsafe { m.driver.fill_with(stream, range.address, Pattern::Byte(1), range.bytes) }.unwrap();
}

/// Returns the line that launched the graph of a violation's later party.
fn launched(fault: &Violation) -> Option<u32> {
    let text = fault.to_string();
    let line = fault.later.launch.map(|site| site.line());
    if let Some(line) = line {
        assert!(text.contains("launched at") && text.contains(&format!("{FILE}:{line}")), "{text}");
    }
    line
}

#[test]
fn branches_that_no_event_orders_race_at_each_launch_and_not_before() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        let (mut first, mut second) = (0, 0);
        let exec = m.exec(a, || {
            m.order(a, b);
            first = at!(fill(m, a, x)).1;
            second = at!(fill(m, b, x)).1;
            m.order(b, a);
        });
        m.silent();
        let (_, launch) = at!(m.launch(exec, a));
        let fault = m.only(ViolationKind::WriteWrite, FILE, first, second);
        assert_eq!(launched(&fault), Some(launch));
        assert!(matches!(fault.later.agent, Agent::Graph { .. }), "{fault}");
        assert_eq!(fault.earlier.unwrap().launch.map(|site| site.line()), Some(launch), "{fault}");
    });
}

#[test]
fn a_launch_races_with_work_that_nothing_orders_with_it_before_and_after() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        let mut captured = 0;
        let exec = m.exec(a, || captured = at!(fill(m, a, x)).1);
        let (_, other) = at!(m.sim.access(b, x, Access::Read, None).unwrap());
        let (_, launch) = at!(m.launch(exec, a));
        let fault = m.only(ViolationKind::ReadWrite, FILE, other, captured);
        assert_eq!(launched(&fault), Some(launch));
        let (_, after) = at!(m.sim.access(b, x, Access::Read, None).unwrap());
        m.only(ViolationKind::WriteRead, FILE, captured, after);
        // With an order there is no violation.
        m.order(a, b);
        m.read(b, x);
        m.order(b, a);
        m.launch(exec, a);
        m.silent();
    });
}

#[test]
fn two_executables_of_one_graph_are_not_ordered() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        let mut captured = 0;
        m.driver.capture_begin(a, CaptureMode::Global).unwrap();
        captured += at!(fill(m, a, x)).1;
        let graph = m.driver.capture_end(a).unwrap();
        let (one, two) = (
            m.driver.graph_instantiate(graph).unwrap(),
            m.driver.graph_instantiate(graph).unwrap(),
        );
        m.launch(one, a);
        m.silent();
        m.launch(two, b);
        m.only(ViolationKind::WriteWrite, FILE, captured, captured);
    });
}

#[test]
fn memory_freed_after_the_capture_is_still_written_by_a_launch() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        live(m, x, a, 1);
        let (mut filled, mut named) = (0, 0);
        let by_fill = m.exec(a, || filled = at!(fill(m, a, x)).1);
        let by_name = m.exec(a, || {
            named = at!(m.sim.launch(a, SimKernel::new("named").writes(x, Some(1))).unwrap()).1;
        });
        m.launch(by_fill, a);
        m.launch(by_name, a);
        m.silent();
        let (_, freed) = at!(note(m, x, Ownership::Free));
        for (exec, captured) in [(by_fill, filled), (by_name, named)] {
            let (_, launch) = at!(m.launch(exec, a));
            let fault = m.only(ViolationKind::UseAfterFree, FILE, freed, captured);
            assert_eq!(launched(&fault), Some(launch));
        }
    });
}

#[test]
fn memory_with_a_new_owner_is_still_written_by_a_launch() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        live(m, x, a, 1);
        let mut captured = 0;
        // A fill names no block: it means the one that existed when it was captured.
        let exec = m.exec(a, || captured = at!(fill(m, a, x)).1);
        note(m, x, Ownership::Free);
        let (_, given) = at!(live(m, x, a, 2));
        let (_, launch) = at!(m.launch(exec, a));
        let fault =
            m.only(ViolationKind::StaleBlock { declared: 1, live: 2 }, FILE, given, captured);
        assert_eq!(launched(&fault), Some(launch));
        // This does not apply to a fill captured now.
        let exec = m.exec(a, || fill(m, a, x));
        m.launch(exec, a);
        m.silent();
    });
}

#[test]
fn a_part_with_a_new_owner_is_enough() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(256));
        let part = |offset, bytes| DeviceRange { address: x.address + offset, bytes, ..x };
        live(m, part(0, 64), a, 1);
        live(m, part(64, 64), a, 2);
        let mut captured = 0;
        let exec = m.exec(a, || captured = at!(fill(m, a, x)).1);
        m.launch(exec, a);
        m.silent();
        let (_, given) = at!(live(m, part(64, 64), a, 3));
        m.launch(exec, a);
        m.only(ViolationKind::StaleBlock { declared: 2, live: 3 }, FILE, given, captured);
    });
}

#[test]
fn a_graph_may_write_memory_kept_for_it_whatever_is_recorded_there() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(256));
        let part = |offset, bytes| DeviceRange { address: x.address + offset, bytes, ..x };
        observer(m).kept_for_graphs(x, 7);
        let mut captured = 0;
        let exec = m.exec(a, || {
            // Two blocks of the graph, one after the other at the same address.
            live(m, part(0, 64), a, 1);
            captured = at!(fill(m, a, part(0, 64))).1;
            note(m, part(0, 64), Ownership::Free);
            live(m, part(0, 64), a, 2);
            m.sim.launch(a, SimKernel::new("second").writes(part(0, 64), Some(2))).unwrap();
        });
        m.launch(exec, a);
        note(m, part(0, 64), Ownership::Free);
        m.launch(exec, a);
        m.silent();
        // Other work may not.
        let (_, later) = at!(m.sim.access(a, part(0, 64), Access::Read, None).unwrap());
        let found = m.sim.take_violations();
        assert_eq!(
            (found[0].kind, found[0].later.site.line()),
            (ViolationKind::UseAfterFree, later)
        );
        // Memory kept for another graph, or for none, does not belong to this graph.
        observer(m).kept_for_graphs(part(0, 64), 8);
        m.launch(exec, a);
        assert_eq!(m.sim.take_violations().len(), 2, "both nodes");
        observer(m).kept_for_graphs(part(0, 64), 7);
        m.launch(exec, a);
        m.silent();
        observer(m).let_go_by_graphs(part(32, 1));
        let (_, freed) = at!(note(m, part(0, 64), Ownership::Free));
        m.launch(exec, a);
        m.first(ViolationKind::UseAfterFree, FILE, Some(freed), captured);
    });
}

#[test]
fn graphs_over_the_memory_of_one_keeper_may_write_each_others_and_must_still_be_ordered() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        observer(m).kept_for_graphs(x, 7);
        let mut captured = [0; 2];
        let [one, two] = [(1, 0), (2, 1)].map(|(generation, i)| {
            m.exec(a, || {
                live(m, x, a, generation);
                captured[i] = at!(fill(m, a, x)).1;
                note(m, x, Ownership::Free);
            })
        });
        m.launch(one, a);
        m.launch(two, a);
        m.launch(one, a);
        m.silent();
        m.launch(two, b);
        m.only(ViolationKind::WriteWrite, FILE, captured[0], captured[1]);
    });
}

#[test]
fn a_block_given_out_in_a_capture_is_no_use_of_its_memory_until_the_launch() {
    everywhere(|m| {
        let (a, b, c, x) = (m.stream(), m.stream(), m.stream(), m.alloc(64));
        observer(m).kept_for_graphs(x, 7);
        let mut captured = 0;
        let (_, before) = at!(m.sim.access(c, x, Access::Write, None).unwrap());
        let exec = m.exec(a, || {
            live(m, x, a, 1);
            captured = at!(fill(m, a, x)).1;
        });
        m.silent();
        // Launched on another stream than captured: the last users of the bytes count.
        m.launch(exec, b);
        m.only(ViolationKind::WriteWrite, FILE, before, captured);
        m.order(b, c);
        m.write(c, x);
        m.order(c, b);
        m.launch(exec, b);
        m.silent();
    });
}

#[test]
fn memory_given_to_another_stream_comes_after_the_last_launch() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        live(m, x, a, 1);
        let mut captured = 0;
        let exec = m.exec(a, || captured = at!(fill(m, a, x)).1);
        m.launch(exec, a);
        note(m, x, Ownership::Free);
        let (_, given) = at!(live(m, x, b, 2));
        m.only(ViolationKind::Reuse, FILE, captured, given);
    });
}

#[test]
fn a_mapping_that_is_gone_is_met_by_the_launch() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, handle) = m.granule();
        let mut captured = 0;
        let exec = m.exec(a, || {
            captured =
                at!(m.sim.launch(a, SimKernel::new("late").writes(x, None).run(|_| ())).unwrap()).1;
        });
        m.unmap(x.address);
        m.silent();
        let (_, launch) = at!(m.launch(exec, a));
        let found = m.sim.take_violations();
        assert_eq!(
            (found.len(), found[0].kind, found[0].later.site.line()),
            (1, ViolationKind::Unmapped, captured)
        );
        assert_eq!(launched(&found[0]), Some(launch));
        m.driver.stream_synchronize(a).unwrap();
        // Mapping it again makes the launch valid. Unmapping it under a launch that the host has
        // not waited for is a fault.
        m.map(x.address, handle);
        m.launch(exec, b);
        m.silent();
        let (_, unmapped) = at!(m.unmap(x.address));
        m.only(ViolationKind::UnmapInFlight, FILE, captured, unmapped);
        assert_eq!(x.bytes, GRANULE);
    });
}

#[test]
fn a_fill_of_what_is_not_mapped_makes_nothing_that_can_be_launched_and_a_copy_or_a_kernel_does() {
    everywhere(|m| {
        let (a, y, pinned) = (m.stream(), m.alloc(64), m.pinned(64));
        let (x, handle) = m.granule();
        let d = &m.driver;
        // SAFETY: 1. and 2. The simulator checks what these ask for.
        let by_driver: [(&str, &dyn Fn()); 5] = unsafe {
            [
                ("fill", &|| fill(m, a, x)),
                ("copy from it", &|| d.copy_on_device(a, y.address, x.address, 64).unwrap()),
                ("copy to it", &|| d.copy_on_device(a, x.address, y.address, 64).unwrap()),
                ("upload", &|| d.copy_to_device(a, x.address, pinned, 64).unwrap()),
                ("download", &|| d.copy_to_host(a, pinned, x.address, 64).unwrap()),
            ]
        };
        let captured = |work: &dyn Fn()| {
            d.capture_begin(a, CaptureMode::Global).unwrap();
            work();
            d.capture_end(a).unwrap()
        };
        let graphs = by_driver.map(|(what, work)| (what, captured(work)));
        let by_kernel =
            captured(&|| m.sim.launch(a, SimKernel::new("kernel").writes(x, None)).unwrap());
        let before = m.sim.outstanding().graph_execs;
        m.unmap(x.address);
        let (fills, copies): (Vec<_>, Vec<_>) =
            graphs.into_iter().partition(|(what, _)| what.starts_with("fill"));
        for (what, graph) in fills {
            assert_eq!(d.graph_instantiate(graph).map_err(|e| e.code), Err(1), "{what}");
        }
        assert_eq!(m.sim.outstanding().graph_execs, before, "nothing was made");
        for (what, graph) in copies {
            assert!(d.graph_instantiate(graph).is_ok(), "{what}");
        }
        d.graph_instantiate(by_kernel).unwrap();
        m.map(x.address, handle);
        for (what, graph) in graphs {
            assert!(d.graph_instantiate(graph).is_ok(), "{what}");
        }
        m.silent();
    });
}

#[test]
fn pinned_memory_that_is_gone_is_met_by_the_launch_and_not_touched() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        let pinned = m.pinned(64);
        let mut captured = 0;
        let exec = m.exec(a, || {
            // SAFETY: 1. and 2. The simulator checks what this asks for.
            captured = at!(unsafe { m.driver.copy_to_host(a, pinned, x.address, 64) }.unwrap()).1;
        });
        m.launch(exec, a);
        m.driver.stream_synchronize(a).unwrap();
        // SAFETY: 1. It came from the driver. 2. What is queued is done.
        unsafe { m.driver.host_free(GPU, pinned) }.unwrap();
        m.silent();
        m.launch(exec, a);
        let found = m.sim.take_violations();
        assert_eq!(
            (found.len(), found[0].kind, found[0].later.site.line()),
            (1, ViolationKind::Unmapped, captured)
        );
        m.driver.stream_synchronize(a).unwrap();
    });
}

#[test]
fn the_host_writes_pinned_memory_under_a_launch() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(64));
        let pinned = m.pinned(64);
        let mut captured = 0;
        let exec = m.exec(a, || {
            // SAFETY: 1. and 2. The simulator checks what this asks for.
            captured = at!(unsafe { m.driver.copy_to_device(a, x.address, pinned, 64) }.unwrap()).1;
        });
        let address = pinned.as_ptr() as u64;
        m.sim.host_write(address, 64);
        m.launch(exec, a);
        m.silent();
        let (_, later) = at!(m.sim.host_write(address, 64));
        m.only(ViolationKind::ReadWrite, FILE, captured, later);
        m.driver.stream_synchronize(a).unwrap();
        m.sim.host_write(address, 64);
        m.launch(exec, a);
        m.silent();
    });
}

#[test]
fn the_end_of_a_graph_orders_nothing() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
        m.driver.capture_begin(a, CaptureMode::Global).unwrap();
        let captured = at!(fill(m, a, x)).1;
        let graph = m.driver.capture_end(a).unwrap();
        let exec = m.driver.graph_instantiate(graph).unwrap();
        m.launch(exec, a);
        m.sim.run_all();
        // SAFETY: 1. Not used again.
        unsafe {
            m.driver.graph_exec_destroy(exec).unwrap();
            m.driver.graph_destroy(graph).unwrap();
        }
        let (_, later) = at!(m.sim.access(b, x, Access::Write, None).unwrap());
        m.only(ViolationKind::WriteWrite, FILE, captured, later);
    });
}

#[test]
fn many_launches_leave_nothing_queued() {
    let m = Machine::new(Sim::h200(1).symbolic());
    let (a, b, x) = (m.stream(), m.stream(), m.alloc(64));
    let exec = m.exec(a, || {
        m.order(a, b);
        m.write(b, x);
        m.order(b, a);
    });
    for _ in 0..100_000 {
        m.launch(exec, a);
    }
    assert_eq!(m.sim.pending(a), 0);
    m.silent();
    assert!(m.sim.accesses_checked() >= 100_000);
}
