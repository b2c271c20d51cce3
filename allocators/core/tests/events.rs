//! Records arrive whole, in order, and nowhere else.

use aquifer_core::{
    Action, DeviceId, Event, Recorder, Sink, Tag,
    event::{NullSink, Place, RingSink, TraceFile},
};
use std::{env, fs, process, sync::Arc, thread};

const PLACE: Place = Place::Device(DeviceId(0));

fn tell(recorder: &Recorder, action: Action, address: u64, bytes: u64) {
    let ticket = recorder.ticket();
    recorder.record(ticket, recorder.event(action, PLACE, 3, address, bytes, Tag::NONE));
}

#[test]
fn a_full_ring_drops_the_oldest_and_counts_them() {
    let ring = Arc::new(RingSink::new(2));
    let recorder = Recorder::new(ring.clone());
    for address in 1..=5 {
        tell(&recorder, Action::Allocate, address, 1);
    }
    assert_eq!(ring.dropped(), 3);
    assert_eq!(ring.take().iter().map(|e| e.address).collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn a_ring_of_nothing_keeps_nothing_and_counts_all() {
    let ring = RingSink::new(0);
    ring.record(&Recorder::new(Arc::new(NullSink)).event(Action::Free, PLACE, 0, 0, 0, Tag::NONE));
    assert_eq!((ring.dropped(), ring.take().len()), (1, 0));
}

#[test]
fn events_of_many_threads_arrive_in_the_order_of_their_tickets() {
    // Each event carries its place as its address.
    let ring = Arc::new(RingSink::new(100_000));
    let recorder = Recorder::new(ring.clone());
    let order = std::sync::Mutex::new(0u64);
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..500 {
                    let (ticket, place) = {
                        let mut order = order.lock().unwrap();
                        *order += 1;
                        (recorder.ticket(), *order)
                    };
                    thread::yield_now();
                    recorder.record(ticket, recorder.event(Action::Free, PLACE, 0, place, 0, Tag::NONE));
                }
            });
        }
    });
    let events: Vec<Event> = ring.take();
    assert_eq!(events.len(), 2000);
    assert!(events.iter().zip(1..).all(|(event, place)| event.address == place));
}

#[test]
#[cfg_attr(miri, ignore = "writes a file")]
fn a_trace_file_tells_blocks_at_one_address_apart() {
    let path = env::temp_dir().join(format!("aquifer-trace-{}.csv", process::id()));
    let recorder = Recorder::new(Arc::new(TraceFile::create(&path).unwrap()));
    tell(&recorder, Action::Allocate, 0x1000, 100);
    tell(&recorder, Action::Free, 0x1000, 100);
    tell(&recorder, Action::Complete, 0x1000, 100);
    tell(&recorder, Action::Grow, 0, 5);
    tell(&recorder, Action::Allocate, 0x1000, 200);
    tell(&recorder, Action::Free, 0x2000, 1);
    recorder.sink().flush();
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let rows: Vec<String> =
        text.lines().skip(1).map(|row| row.split_once(',').unwrap().1.to_owned()).collect();
    assert!(text.starts_with("t_us,op,id,bytes,stream\n"));
    assert_eq!(rows, ["a,1,100,3", "f,1,100,3", "c,1,100,3", "a,2,200,3"]);
}
