//! Every interleaving of the protocols between threads and streams, each beside an incorrect
//! variant that the model must reject.
//!
//! Run with `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=3 cargo test -p aquifer-stream --test loom
//! --release`.
//!
//! | protocol | model |
//! |---|---|
//! | the lock | `the_lock_lets_one_thread_in…`, `values_locked_at_once…` |
//! | epochs: close, record, publish | `closing_before_recording…`, `two_fences_at_once…` |
//! | epochs: what is done | `seeing_an_epoch_done…` |
//! | uses: the end and the free | `the_end_of_a_use_and_the_free…`, `the_last_use_and_the_close…` |
//! | uses: exclusion, and what a wait forgets | `a_prepared_write_excludes…`, `a_wait_clears…` |
//! | retirement of a handle | `a_fence_and_a_retirement…`, `a_retirement_that_fails…` |
#![cfg(loom)]
#![expect(unsafe_code, reason = "touches a cell whose accesses the model checks")]

use aquifer_driver::{Access, DeviceId, DeviceRange, sim::Sim};
use aquifer_stream::{Epochs, LastUse, Retirement, Spin, Stream, StreamPool, UseList};
use loom::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};
use std::sync::{
    Arc as StdArc,
    atomic::{AtomicU32 as StdU32, Ordering as StdOrdering},
};

/// A driver with two threads that queue on one stream: it accepts them one at a time.
#[derive(Clone, Copy, PartialEq)]
enum Queued {
    Work,
    Event,
}

/// A stream, and an event that knows its place in it.
type Queue = Mutex<Vec<Queued>>;

fn enqueue(queue: &Queue, item: Queued) -> usize {
    let mut queue = queue.lock().unwrap();
    queue.push(item);
    queue.len() - 1
}

/// One thread queues work and frees its block while another one fences. An event that claims to
/// prove the block's epoch must always lie after the block's work.
fn an_event_never_proves_work_queued_after_it(record_first: bool) {
    loom::model(move || {
        let queue = loom::sync::Arc::new(Queue::new(Vec::new()));
        let epochs = loom::sync::Arc::new(Epochs::<usize>::new());
        let fencing = {
            let (queue, epochs) = (queue.clone(), epochs.clone());
            thread::spawn(move || {
                let (epoch, at) = if record_first {
                    let at = enqueue(&queue, Queued::Event);
                    (epochs.close(), at)
                } else {
                    let epoch = epochs.close();
                    (epoch, enqueue(&queue, Queued::Event))
                };
                epochs.publish(epoch, StdArc::new(at));
            })
        };
        let work = enqueue(&queue, Queued::Work);
        let stamp = epochs.open();
        fencing.join().unwrap();
        if let Some((_, event)) = epochs.proof(stamp) {
            assert!(*event > work, "an event at {event} is taken as proof of work at {work}");
        }
    });
}

#[test]
fn closing_before_recording_is_right() {
    an_event_never_proves_work_queued_after_it(false);
}

#[test]
#[should_panic(expected = "is taken as proof of work")]
fn recording_before_closing_is_a_race() {
    an_event_never_proves_work_queued_after_it(true);
}

#[test]
fn two_fences_at_once_leave_the_events_in_order_and_each_proves_its_epoch() {
    loom::model(|| {
        let queue = loom::sync::Arc::new(Queue::new(Vec::new()));
        let epochs = loom::sync::Arc::new(Epochs::<usize>::new());
        let work = enqueue(&queue, Queued::Work);
        let stamp = epochs.open();
        let fence = |queue: &Queue, epochs: &Epochs<usize>| {
            let epoch = epochs.close();
            let at = enqueue(queue, Queued::Event);
            epochs.publish(epoch, StdArc::new(at));
        };
        let other = {
            let (queue, epochs) = (queue.clone(), epochs.clone());
            thread::spawn(move || fence(&queue, &epochs))
        };
        fence(&queue, &epochs);
        other.join().unwrap();
        let (first, event) = epochs.proof(stamp).unwrap();
        assert!(*event > work);
        assert_eq!(epochs.oldest().unwrap().0, first, "the oldest comes first");
        assert_eq!(epochs.finish(epochs.proved()).len(), 2);
        assert!(epochs.is_done(stamp));
    });
}

#[test]
fn the_lock_lets_one_thread_in_at_a_time_and_shows_it_what_the_last_one_wrote() {
    loom::model(|| {
        let spin = loom::sync::Arc::new(Spin::new(0u32));
        let other = {
            let spin = spin.clone();
            thread::spawn(move || spin.with(|n| *n += 1))
        };
        spin.with(|n| *n += 1);
        other.join().unwrap();
        assert_eq!(spin.with(|n| *n), 2);
    });
}

/// One thread moves a unit from the first value to the second. Their sum never exceeds one unit,
/// and no sum of one instant does.
fn a_sum_of_values_is_one_that_they_had_at_one_instant(at_once: bool) {
    loom::model(move || {
        let values = loom::sync::Arc::new([Spin::new(1u32), Spin::new(0u32)]);
        let mover = {
            let values = values.clone();
            thread::spawn(move || {
                values[0].with(|n| *n -= 1);
                values[1].with(|n| *n += 1);
            })
        };
        let mut sum = 0;
        if at_once {
            Spin::lock_all(&values.each_ref()).for_each(|n| sum += *n);
        } else {
            values.iter().for_each(|value| value.with(|n| sum += *n));
        }
        assert!(sum <= 1, "a sum that never was: {sum}");
        mover.join().unwrap();
        assert_eq!(values[1].with(|n| *n), 1);
    });
}

#[test]
fn values_locked_at_once_are_read_at_one_instant() {
    a_sum_of_values_is_one_that_they_had_at_one_instant(true);
}

#[test]
#[should_panic(expected = "a sum that never was")]
fn values_locked_one_after_the_other_are_not() {
    a_sum_of_values_is_one_that_they_had_at_one_instant(false);
}

/// How a thread announces a call for a handle that another thread retires.
#[derive(Clone, Copy, PartialEq)]
enum Announce {
    Counted,
    /// Checks permission first and increments the count afterwards.
    LookThenCount,
}

fn nobody_calls_for_a_handle_that_is_gone(how: Announce) {
    loom::model(move || {
        let retirement = loom::sync::Arc::new(Retirement::new());
        let (gone, count) =
            (loom::sync::Arc::new(AtomicBool::new(false)), loom::sync::Arc::new(AtomicU32::new(0)));
        let calling = {
            let (retirement, gone, count) = (retirement.clone(), gone.clone(), count.clone());
            thread::spawn(move || {
                let call =
                    || assert!(!gone.load(Ordering::Acquire), "a call for a handle that is gone");
                match how {
                    Announce::Counted => {
                        if let Ok(_calling) = retirement.enter() {
                            call();
                        }
                    }
                    Announce::LookThenCount => {
                        if !retirement.is_over() {
                            count.fetch_add(1, Ordering::AcqRel);
                            call();
                            count.fetch_sub(1, Ordering::AcqRel);
                        }
                    }
                }
            })
        };
        assert_eq!(retirement.end(|| Ok::<_, ()>(())), Some(Ok(())));
        while count.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
        // The owner destroys it.
        gone.store(true, Ordering::Release);
        calling.join().unwrap();
    });
}

#[test]
fn a_fence_and_a_retirement_see_each_other() {
    nobody_calls_for_a_handle_that_is_gone(Announce::Counted);
}

#[test]
#[should_panic(expected = "a call for a handle that is gone")]
fn looking_before_counting_is_a_race() {
    nobody_calls_for_a_handle_that_is_gone(Announce::LookThenCount);
}

#[test]
fn a_failed_retirement_admits_waiting_calls() {
    loom::model(|| {
        let retirement = loom::sync::Arc::new(Retirement::new());
        let other = {
            let retirement = retirement.clone();
            thread::spawn(move || assert!(retirement.enter().is_ok()))
        };
        assert_eq!(retirement.end(|| Err::<(), _>(())), Some(Err(())));
        other.join().unwrap();
        assert!(!retirement.is_over() && retirement.enter().is_ok());
    });
}

/// A block's owner stream, a stream that uses it, and its bytes, on a device that runs nothing by
/// itself.
struct Rig {
    sim: Sim,
    home: Stream,
    user: Stream,
    range: DeviceRange,
}

impl Rig {
    fn new() -> Self {
        let sim = Sim::h200(1).symbolic().stepped();
        let pool = StreamPool::new(sim.driver(), DeviceId(0), 2);
        let (home, user) = (pool.lease().unwrap(), pool.lease().unwrap());
        let address = sim.driver().mem_alloc(DeviceId(0), 512).unwrap();
        let range = DeviceRange { device: DeviceId(0), address, bytes: 512 };
        Self { sim, home, user, range }
    }

    fn write(&self, stream: &Stream) {
        self.sim.access(stream.raw(), self.range, Access::Write, None).unwrap();
    }

    fn assert_silent(&self) {
        assert!(self.sim.violations().is_empty(), "the bytes were given out too early");
    }
}

/// A block is freed while its user ends a use. Its memory must not be reused before the user's work
/// is done.
fn a_freed_block_is_held_back(look_at_open: bool) {
    loom::model(move || {
        let rig = StdArc::new(Rig::new());
        let mut list = UseList::new();
        let used =
            list.prepare(1, rig.home.timeline(), rig.user.timeline(), Access::Write).unwrap();
        let using = {
            let rig = rig.clone();
            thread::spawn(move || {
                rig.write(&rig.user);
                used.finish().unwrap();
            })
        };
        let mut uses = list.take();
        uses.forget_done();
        let open = look_at_open && uses.is_open();
        let done =
            uses.stamped().all(|(on, epoch)| rig.home.timeline().wait_for(&on, epoch).is_ok());
        if !open && done {
            rig.write(&rig.home);
        }
        using.join().unwrap();
        assert!(!uses.is_open() && uses.stamped().count() == 1);
        rig.assert_silent();
    });
}

#[test]
fn the_end_of_a_use_and_the_free_of_its_block_may_come_in_any_order() {
    a_freed_block_is_held_back(true);
}

#[test]
#[should_panic(expected = "given out too early")]
fn passing_over_open_uses_is_a_race() {
    a_freed_block_is_held_back(false);
}

struct Told(StdU32);

impl LastUse for Told {
    fn ended(&self) {
        self.0.fetch_add(1, StdOrdering::SeqCst);
    }
}

/// A pool closes while the last use of a block ends. Either the pool sees the end, or it is
/// notified.
fn a_closed_pool_hears_of_the_last_use(trust_the_first_look: bool) {
    loom::model(move || {
        let rig = Rig::new();
        let mut list = UseList::new();
        let used = list.prepare(1, rig.home.timeline(), rig.user.timeline(), Access::Read).unwrap();
        let uses = list.take();
        let ending = thread::spawn(move || used.finish().unwrap());
        let told = StdArc::new(Told(StdU32::new(0)));
        let whom: StdArc<dyn LastUse> = told.clone();
        let looked = uses.is_open();
        let open = uses.tell(&whom);
        let expected = if trust_the_first_look { looked } else { open };
        ending.join().unwrap();
        assert_eq!(
            told.0.load(StdOrdering::SeqCst),
            u32::from(expected),
            "a block that nobody takes home"
        );
    });
}

#[test]
fn the_last_use_and_the_close_of_its_pool_see_each_other() {
    a_closed_pool_hears_of_the_last_use(false);
}

#[test]
#[should_panic(expected = "a block that nobody takes home")]
fn looking_before_asking_to_be_told_is_a_race() {
    a_closed_pool_hears_of_the_last_use(true);
}

/// Two threads prepare a write of a block that has not been used before.
fn one_of_two_writers_wins(one_account: bool) {
    loom::model(move || {
        let rig = StdArc::new(Rig::new());
        let lists = StdArc::new([UseList::new(), UseList::new()]);
        let inside = loom::sync::Arc::new(AtomicU32::new(0));
        let write = move |rig: &Rig, list: &UseList, inside: &AtomicU32| {
            let Ok(used) = list.prepare(1, rig.home.timeline(), rig.home.timeline(), Access::Write)
            else {
                return;
            };
            assert_eq!(inside.fetch_add(1, Ordering::AcqRel), 0, "two writers at once");
            inside.fetch_sub(1, Ordering::AcqRel);
            used.abort();
        };
        let other = {
            let (rig, lists, inside) = (rig.clone(), lists.clone(), inside.clone());
            thread::spawn(move || write(&rig, &lists[0], &inside))
        };
        write(&rig, &lists[usize::from(!one_account)], &inside);
        other.join().unwrap();
    });
}

#[test]
fn a_prepared_write_excludes_another_also_at_the_first_use() {
    one_of_two_writers_wins(true);
}

#[test]
#[should_panic(expected = "two writers at once")]
fn two_accounts_of_one_block_exclude_nothing() {
    one_of_two_writers_wins(false);
}

/// The owner stream waits for a use and forgets it, while the same stream records another one.
fn what_is_noted_during_a_wait_is_kept(forget_all: bool) {
    loom::model(move || {
        let rig = StdArc::new(Rig::new());
        let list = StdArc::new(UseList::new());
        let (home, user) = (rig.home.timeline(), rig.user.timeline());
        rig.write(&rig.user);
        list.record(home, user, Access::Read).unwrap();
        // The model does not include the driver's lock that orders a record with work queued after
        // it, so the event exists before the threads start.
        user.fence(user.open()).unwrap();
        let using = {
            let (rig, list) = (rig.clone(), list.clone());
            thread::spawn(move || {
                rig.write(&rig.user);
                list.record(rig.home.timeline(), rig.user.timeline(), Access::Read).unwrap();
            })
        };
        list.lend(1, home, home, Access::Write).unwrap();
        using.join().unwrap();
        let mut uses = StdArc::into_inner(list).unwrap().take();
        if forget_all {
            uses.clear();
        }
        for (on, epoch) in uses.stamped() {
            home.wait_for(&on, epoch).unwrap();
        }
        rig.write(&rig.home);
        rig.assert_silent();
    });
}

#[test]
fn a_wait_clears_what_it_waited_for() {
    what_is_noted_during_a_wait_is_kept(false);
}

#[test]
#[should_panic(expected = "given out too early")]
fn clearing_more_than_was_waited_for_is_a_race() {
    what_is_noted_during_a_wait_is_kept(true);
}

/// Data that the host read before it reported an epoch as done is visible to every thread that sees
/// the epoch as done.
#[test]
fn seeing_an_epoch_done_implies_seeing_earlier_reads() {
    loom::model(|| {
        let epochs = loom::sync::Arc::new(Epochs::<usize>::new());
        let seen = loom::sync::Arc::new(loom::cell::UnsafeCell::new(false));
        let stamp = epochs.close();
        let polling = {
            let (epochs, seen) = (epochs.clone(), seen.clone());
            thread::spawn(move || {
                // SAFETY: 1. this is what the test checks: the model fails if two accesses are not
                // ordered.
                seen.with_mut(|seen| unsafe { *seen = true });
                drop(epochs.finish(stamp));
            })
        };
        if epochs.is_done(stamp) {
            // SAFETY: 1. as above.
            assert!(seen.with(|seen| unsafe { *seen }));
        }
        polling.join().unwrap();
    });
}
