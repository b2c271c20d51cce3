//! A capture, launches of its graph, and its end, as one step of a program.
//!
//! Captured work touches no memory before it is launched, so the program's order applies to
//! launches: each is ordered after all accesses that conflict with any node. Launches of one
//! executable are ordered among themselves by the driver, on any stream, and programs rely on it. A
//! second stream may take part in the capture. It is joined again, and in between it touches no
//! memory that the first one touches.

use super::{Clock, Generator, Memory, join};
use crate::agree::{EVENTS, HOSTS, HostPart, PAGEABLE, Part, Place, machine::Side};
use aquifer_driver::CaptureMode;

/// The memory that the nodes touch, and whether they write it.
type Touched = Vec<(Memory, bool)>;

/// Adds a capture, some launches, and the end of the executable.
pub(super) fn step(generator: &mut Generator<'_>) {
    let places = generator.places();
    let (Some(first), Some(second)) =
        (generator.choices.pick(&places), generator.choices.pick(&places))
    else {
        return;
    };
    let stream = generator.stream();
    let mode = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]
        [generator.choices.index(3)];
    let mut touched = Touched::new();
    generator.machine.capture_begin(stream, mode);
    node(generator, stream, first, &mut touched);
    if first.0 != second.0 && generator.choices.below(2) == 0 {
        let other = (stream + 1) % generator.streams;
        let (fork, joined) = (generator.choices.index(EVENTS), generator.choices.index(EVENTS));
        let order = |generator: &mut Generator<'_>, event, from, to| {
            generator.machine.record(event, from);
            generator.machine.wait(to, event);
        };
        order(generator, fork, stream, other);
        // Separate memory for each stream, and no host buffer, which both might pick.
        fill(generator, other, second, &mut touched);
        fill(generator, stream, first, &mut touched);
        order(generator, joined, other, stream);
        copy(generator, stream, first, second, &mut touched);
        generator.machine.capture_end(stream);
        // Outside a capture, an event recorded in one cannot be used, so record both again.
        generator.record(fork, stream);
        generator.record(joined, stream);
    } else {
        node(generator, stream, second, &mut touched);
        generator.machine.capture_end(stream);
    }
    let mut last: Option<Clock> = None;
    for _ in 0..1 + generator.choices.below(3) {
        let stream = generator.stream();
        if let Some(last) = &last {
            join(&mut generator.clocks[stream], last);
        }
        for &(memory, writes) in &touched {
            generator.order(stream, memory, writes);
        }
        generator.machine.launch(stream);
        last = Some(generator.clocks[stream].clone());
        if generator.choices.below(3) == 0 {
            // Other work on the same memory between two launches.
            generator.fill();
        }
    }
    generator.machine.graph_end();
}

/// Adds one operation on a location.
fn node(
    generator: &mut Generator<'_>,
    stream: usize,
    place: (Memory, Place, u64),
    touched: &mut Touched,
) {
    let up = match generator.choices.below(3) {
        0 => return fill(generator, stream, place, touched),
        which => which == 1,
    };
    let (memory, place, size) = place;
    // Copies of pageable memory in graphs are not tested, since they do not concern allocators.
    let host = generator.choices.index(PAGEABLE);
    let (offset, bytes) = generator.choices.range(HOSTS[host] as u64);
    let bytes = bytes.min(size);
    let part = Part { place, offset: generator.choices.below(size - bytes + 1), bytes };
    let side = HostPart { host, offset: offset as usize, bytes: bytes as usize };
    touched.push((memory, up));
    touched.push((Memory::Host(host), !up));
    let (device, host) = (Side::Device(part), Side::Host(side));
    let (from, to) = if up { (host, device) } else { (device, host) };
    generator.machine.copy(stream, from, to);
}

fn fill(
    generator: &mut Generator<'_>,
    stream: usize,
    (memory, place, size): (Memory, Place, u64),
    touched: &mut Touched,
) {
    let (byte, (offset, bytes)) = (generator.choices.byte(), generator.choices.range(size));
    touched.push((memory, true));
    generator.machine.fill(stream, Part { place, offset, bytes }, byte);
}

/// Copies from the first location to the second, which is different memory.
fn copy(
    generator: &mut Generator<'_>,
    stream: usize,
    (memory, place, size): (Memory, Place, u64),
    (other, to_place, to_size): (Memory, Place, u64),
    touched: &mut Touched,
) {
    let (_, bytes) = generator.choices.range(size.min(to_size));
    let from = Part { place, offset: generator.choices.below(size - bytes + 1), bytes };
    let to = Part { place: to_place, offset: generator.choices.below(to_size - bytes + 1), bytes };
    touched.push((memory, false));
    touched.push((other, true));
    generator.machine.copy(stream, Side::Device(from), Side::Device(to));
}
