//! Tests of the order of announcements. A process has one announcer, so they are one test.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use aquifer_core::{
    Action, DeviceId, Event, Recorder, Tag,
    event::{
        MemoryLocation, NullSink,
        announcement::{Announcement, Announcer, SuppliedRange, set_announcer, supply, withdraw},
    },
};
use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

static HEARD: Mutex<Vec<Announcement>> = Mutex::new(Vec::new());
/// Whether a call is being made, to find two at once.
static BUSY: AtomicBool = AtomicBool::new(false);
const PANICS: u64 = 0xdead;

#[derive(Debug)]
struct Listener;

impl Announcer for Listener {
    fn announce(&mut self, announcement: &Announcement) {
        assert!(!BUSY.swap(true, Ordering::SeqCst), "two calls at once");
        HEARD.lock().unwrap().push(*announcement);
        BUSY.store(false, Ordering::SeqCst);
        assert!(address(announcement) != PANICS, "a panic of the announcer");
    }
}

fn address(announcement: &Announcement) -> u64 {
    match announcement {
        Announcement::Supplied(range) | Announcement::Withdrawn(range) => range.address,
        Announcement::Event(event) => event.address,
        other => panic!("{other:?}"),
    }
}

/// Takes what has been announced, as addresses.
fn heard() -> Vec<u64> {
    mem::take(&mut *HEARD.lock().unwrap()).iter().map(address).collect()
}

fn event(recorder: &Recorder, address: u64) -> Event {
    let place = MemoryLocation::Device(DeviceId(0));
    recorder.event(Action::Allocate, place, 0, address, 512, Tag::NONE)
}

#[test]
fn announcements_come_in_the_order_of_tickets_and_before_the_call_returns() {
    let recorder = Arc::new(Recorder::new(Arc::new(NullSink)));
    supply(DeviceId(0), 1, 2);
    recorder.record(recorder.ticket(), event(&recorder, 1));
    assert!(set_announcer(Box::new(Listener)) && !set_announcer(Box::new(Listener)));
    assert_eq!(heard(), [], "nothing is announced without an announcer");

    supply(DeviceId(0), 0x1000, 4096);
    withdraw(DeviceId(0), 0x1000, 4096);
    let range = SuppliedRange { device: DeviceId(0), address: 0x1000, bytes: 4096 };
    let both = [Announcement::Supplied(range), Announcement::Withdrawn(range)];
    assert_eq!(mem::take(&mut *HEARD.lock().unwrap()), both);

    // A thread with several tickets does not wait for itself, in whatever order it uses them.
    let (first, second, third) = (recorder.ticket(), recorder.ticket(), recorder.ticket());
    recorder.record(third, event(&recorder, 3));
    recorder.record(first, event(&recorder, 1));
    recorder.record(second, event(&recorder, 2));
    assert_eq!(heard(), [1, 2, 3]);

    // A ticket that is dropped holds up nothing.
    let (dropped, next) = (recorder.ticket(), recorder.ticket());
    drop(dropped);
    recorder.record(next, event(&recorder, 4));
    assert_eq!(heard(), [4]);

    // A panic of the announcer is contained.
    recorder.record(recorder.ticket(), event(&recorder, PANICS));
    recorder.record(recorder.ticket(), event(&recorder, 5));
    assert_eq!(heard(), [PANICS, 5]);

    // A thread waits for an earlier ticket of another one.
    let earlier = recorder.ticket();
    let (done, is_done) = mpsc::channel();
    let other = {
        let recorder = recorder.clone();
        thread::spawn(move || {
            recorder.record(recorder.ticket(), event(&recorder, 7));
            done.send(heard()).unwrap();
        })
    };
    let early = is_done.recv_timeout(Duration::from_millis(100));
    assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
    recorder.record(earlier, event(&recorder, 6));
    assert_eq!(is_done.recv().unwrap(), [6, 7]);
    other.join().unwrap();

    // A dropped ticket announces nothing, so it is not waited for: its thread may hold a lock that
    // the holder of the earlier ticket needs.
    let earlier = recorder.ticket();
    let (done, is_done) = mpsc::channel();
    let other = {
        let recorder = recorder.clone();
        thread::spawn(move || {
            drop(recorder.ticket());
            done.send(heard()).unwrap();
        })
    };
    assert_eq!(is_done.recv_timeout(Duration::from_secs(60)), Ok(vec![]));
    recorder.record(earlier, event(&recorder, 8));
    other.join().unwrap();
    assert_eq!(heard(), [8]);

    // A thread that uses its tickets out of order waits for the last of its announcements, also if
    // a ticket of another thread lies between them, and also if the last ticket that it holds is
    // dropped.
    for dropped in [false, true] {
        let (taken, is_taken) = mpsc::channel();
        let (go_on, gone_on) = mpsc::channel();
        let (done, is_done) = mpsc::channel();
        let other = {
            let recorder = recorder.clone();
            thread::spawn(move || {
                let first = recorder.ticket();
                taken.send(()).unwrap();
                gone_on.recv().unwrap();
                let third = recorder.ticket();
                recorder.record(third, event(&recorder, 11));
                if dropped {
                    drop(first);
                } else {
                    recorder.record(first, event(&recorder, 9));
                }
                done.send(heard()).unwrap();
            })
        };
        is_taken.recv().unwrap();
        let second = recorder.ticket();
        go_on.send(()).unwrap();
        let early = is_done.recv_timeout(Duration::from_millis(100));
        assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
        recorder.record(second, event(&recorder, 10));
        let all = if dropped { &[10, 11][..] } else { &[9, 10, 11] };
        assert_eq!(is_done.recv().unwrap(), all);
        other.join().unwrap();
    }

    // Many threads: the order is that of a lock under which the tickets are taken.
    let (threads, rounds) = if cfg!(miri) { (3, 20) } else { (8, 500) };
    let order = Mutex::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let (ticket, number) = {
                        let mut order = order.lock().unwrap();
                        *order += 1;
                        (recorder.ticket(), *order)
                    };
                    recorder.record(ticket, event(&recorder, number));
                    let heard = HEARD.lock().unwrap();
                    assert!(heard.iter().any(|one| address(one) == number), "{number} is late");
                }
            });
        }
    });
    assert!(heard().into_iter().eq(1..=threads * rounds));
}
