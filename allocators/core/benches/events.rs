//! What it costs to record an event into a ring: the ticket, the clock, and the event itself.
//!
//! The best of several rounds; without `cargo bench`'s flag it is only seen to run.
#![expect(clippy::print_stdout, reason = "that is what it is for")]

use aquifer_core::{
    Action, DeviceId, EventSink, Recorder, Tag,
    event::{MemoryLocation, NullSink, RingSink},
};
use std::{env, hint::black_box, sync::Arc, sync::Barrier, thread, time::Instant};

const EVENTS: u64 = 200_000;

/// Nanoseconds for each of the events that every one of `threads` records, at best.
fn recorded(sink: Arc<dyn EventSink>, threads: usize) -> f64 {
    let rounds = if env::args().any(|arg| arg == "--bench") { 30 } else { 1 };
    let (recorder, barrier) = (Recorder::new(sink), Barrier::new(threads));
    let round = || {
        barrier.wait();
        let start = Instant::now();
        for address in 0..EVENTS {
            let ticket = recorder.ticket();
            let place = MemoryLocation::Device(DeviceId(0));
            recorder.record(
                ticket,
                recorder.event(Action::Allocate, place, 1, black_box(address), 512, Tag::NONE),
            );
        }
        start.elapsed().as_secs_f64() * 1e9 / EVENTS as f64
    };
    let best = || (0..rounds).map(|_| round()).fold(f64::MAX, f64::min);
    thread::scope(|scope| {
        let each: Vec<_> = (0..threads).map(|_| scope.spawn(best)).collect();
        each.into_iter().filter_map(|one| one.join().ok()).fold(0.0, f64::max)
    })
}

fn main() {
    let clock = || {
        let start = Instant::now();
        for _ in 0..EVENTS {
            black_box(start.elapsed());
        }
        start.elapsed().as_secs_f64() * 1e9 / EVENTS as f64
    };
    println!(
        "the system's clock         {:6.1} ns",
        (0..30).map(|_| clock()).fold(f64::MAX, f64::min)
    );
    for threads in [1, 2] {
        let ring = || Arc::new(RingSink::new(1 << 12));
        println!(
            "a ring, {threads} threads          {:6.1} ns an event",
            recorded(ring(), threads)
        );
        println!(
            "in order, kept by nobody, {threads} {:6.1} ns an event",
            recorded(Arc::new(NullSink), threads)
        );
    }
}
