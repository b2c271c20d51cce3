//! Tests of streams of other libraries: the pool relies on their owner's promise and on nothing
//! more.

use crate::support::{GPU, PATIENCE, Plain, Rig, within};
use aquifer_core::{DeviceId, MemoryError};
use aquifer_driver::{
    Access, Call, RawStream,
    sim::{Sim, SimKernel},
};
use aquifer_stream::{Fence, StreamLifetime, UseList};
use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

fn lives() -> [StreamLifetime; 3] {
    [StreamLifetime::KeptAlive(Arc::new(())), StreamLifetime::Retired, StreamLifetime::Fenced]
}

#[test]
#[expect(unsafe_code, reason = "names the driver's default streams")]
fn the_legacy_default_stream_is_one_under_both_its_handles_and_on_every_thread() {
    let rig = Rig::new(4);
    let legacy = rig.pool.legacy_default().unwrap();
    for handle in [0, 1] {
        // SAFETY: 1. the driver's own default stream, which is always there.
        let raw = unsafe { RawStream::from_raw(GPU, handle) };
        for life in lives() {
            assert_eq!(rig.adopt(raw, life).unwrap(), legacy);
        }
        let here = rig.pool.timeline(raw, None).unwrap();
        let there =
            thread::scope(|scope| scope.spawn(|| rig.pool.timeline(raw, None)).join().unwrap());
        assert!(Arc::ptr_eq(&here, legacy.timeline()) && Arc::ptr_eq(&there.unwrap(), &here));
    }
    // It can never be destroyed, so it stays in use.
    rig.launch(&legacy);
    legacy.clone().retire().unwrap();
    assert!(!legacy.timeline().is_retired());
    rig.launch(&legacy);
    legacy.synchronize().unwrap();
}

#[test]
fn each_thread_has_its_own_default_stream_for_which_no_other_thread_may_call() {
    let rig = Rig::stepped(4);
    let (home, mine) = (rig.lease(), rig.pool.thread_default().unwrap());
    assert_eq!(rig.pool.thread_default().unwrap(), mine);
    assert!(Arc::ptr_eq(
        &rig.pool.timeline(RawStream::per_thread(GPU), None).unwrap(),
        mine.timeline()
    ));
    rig.launch(&mine);
    let epoch = mine.timeline().open();
    thread::scope(|scope| {
        scope.spawn(|| {
            let theirs = rig.pool.thread_default().unwrap();
            assert_ne!(theirs, mine);
            assert_ne!(theirs.timeline().id(), mine.timeline().id());
            let refused = MemoryError::OtherThread { stream: 2 };
            assert_eq!(mine.timeline().fence(epoch), Ok(Fence::OutOfReach));
            assert_eq!(mine.wait_for(&home), Err(refused.clone()));
            assert_eq!(home.wait_for(&mine), Err(refused.clone()));
            assert_eq!(mine.is_idle(), Err(refused.clone()));
            assert_eq!(mine.clone().retire(), Err(refused.clone()));
            let soon = std::time::Instant::now();
            assert_eq!(mine.timeline().wait(epoch, Some(soon)), Err(refused));
            assert_eq!(rig.sim.pending(RawStream::per_thread(GPU)), 0, "that of this thread");
            // Every thread can wait for the device.
            assert_eq!(mine.timeline().wait(epoch, None), Ok(true));
            theirs.retire().unwrap();
        });
    });
    assert_eq!(rig.sim.pending(mine.raw()), 0);
    rig.launch(&mine);
    mine.synchronize().unwrap();
    assert_eq!(rig.sim.pending(mine.raw()), 0);
}

#[test]
fn a_use_on_a_threads_default_stream_is_fenced_where_it_ends_if_that_is_its_thread() {
    let rig = Rig::stepped(4);
    let (home, mine) = (rig.lease(), rig.pool.thread_default().unwrap());
    let uses = UseList::new();
    let prepare = || uses.prepare(1, home.timeline(), mine.timeline(), Access::Read).unwrap();
    let held = prepare();
    let before = rig.made(Call::EventRecord);
    held.finish().unwrap();
    assert_eq!(rig.made(Call::EventRecord), before + 1);
    let (held, again) = (prepare(), prepare());
    let before = rig.made(Call::EventRecord);
    thread::scope(|scope| {
        let ended = scope.spawn(|| held.finish()).join().unwrap();
        assert_eq!(ended, Err(MemoryError::OtherThread { stream: 2 }), "ended, and not proved");
    });
    assert_eq!(rig.made(Call::EventRecord), before);
    again.finish().unwrap();
    assert_eq!(rig.made(Call::EventRecord), before + 1, "which covers the other");
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let rig = Rig::on(Sim::h200(2), 4);
    let there = rig.sim.driver().stream_create(DeviceId(1), 0).unwrap();
    let wrong = MemoryError::WrongDevice { expected: GPU, actual: DeviceId(1) };
    for life in lives() {
        assert_eq!(rig.adopt(there, life), Err(wrong.clone()));
    }
    assert_eq!(rig.pool.timeline(there, None).map(drop), Err(wrong));
}

#[test]
fn a_stream_adopted_twice_is_one_timeline() {
    for life in lives() {
        let rig = Rig::new(4);
        let foreign = rig.foreign();
        let first = rig.adopt(foreign, life).unwrap();
        for again in lives() {
            let second = rig.adopt(foreign, again).unwrap();
            assert!(Arc::ptr_eq(first.timeline(), second.timeline()));
            assert_eq!(first, second);
        }
        assert!(Arc::ptr_eq(&rig.pool.timeline(foreign, None).unwrap(), first.timeline()));
        assert!(first.number() >= rig.pool.cap(), "numbers of adopted streams begin at the cap");
    }
}

#[test]
fn threads_that_adopt_one_stream_at_once_get_one_timeline() {
    let rig = Rig::new(4);
    for _ in 0..50 {
        let foreign = rig.foreign();
        let adopted: Vec<_> = thread::scope(|scope| {
            let each: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| rig.adopt(foreign, StreamLifetime::Retired).unwrap()))
                .collect();
            each.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(adopted.iter().all(|one| Arc::ptr_eq(one.timeline(), adopted[0].timeline())));
    }
}

#[test]
fn a_leased_stream_that_is_adopted_is_itself() {
    let rig = Rig::new(4);
    let leased = rig.lease();
    let adopted = rig.adopt(leased.raw(), StreamLifetime::Retired).unwrap();
    assert_eq!(adopted, leased);
    drop((adopted, leased));
    rig.assert_all_given_back();
}

#[test]
fn a_handle_that_comes_back_is_not_taken_for_the_stream_that_had_it() {
    for life in [StreamLifetime::Retired, StreamLifetime::Fenced] {
        let rig = Rig::new(4);
        let foreign = rig.foreign();
        let before = rig.adopt(foreign, life.clone()).unwrap();
        rig.destroy(foreign);
        let again = rig.foreign();
        assert_eq!(again, foreign, "the driver uses handles again");
        assert_eq!(
            rig.pool.timeline(again, None).map(drop),
            Err(MemoryError::UnknownId),
            "this one has not been adopted"
        );
        let after = rig.adopt(again, life).unwrap();
        assert_ne!(after, before);
        assert_ne!(after.timeline().id(), before.timeline().id());
        assert!(Arc::ptr_eq(&rig.pool.timeline(again, None).unwrap(), after.timeline()));
    }
}

#[test]
fn a_stream_without_recorded_uses_is_forgotten() {
    let rig = Rig::new(4);
    let foreign = rig.foreign();
    drop(rig.adopt(foreign, StreamLifetime::Retired).unwrap());
    assert_eq!(rig.pool.timeline(foreign, None).map(drop), Err(MemoryError::UnknownId));
    assert_eq!(rig.made(Call::StreamDestroy), 0, "it is not ours to destroy");
}

#[test]
fn a_retired_stream_is_waited_for_and_never_used_in_a_call() {
    let rig = Rig::stepped(4);
    let home = rig.lease();
    let mut memory = Plain::new(&rig, &home, 4096);
    let foreign = rig.foreign();
    let adopted = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    let (clone, behind) = (adopted.clone(), adopted.point());
    rig.launch(&adopted);
    let epoch = clone.timeline().open();
    adopted.retire().unwrap();
    assert_eq!(rig.sim.pending(foreign), 0, "its work is done");
    assert!(clone.timeline().is_retired());
    rig.destroy(foreign);

    let before = rig.sim.driver().calls().made();
    clone.synchronize().unwrap();
    assert_eq!(clone.is_idle(), Ok(true));
    assert!(clone.timeline().is_done(epoch));
    assert_eq!(clone.timeline().fence(clone.timeline().open()), Ok(Fence::Standing));
    clone.timeline().poll().unwrap();
    assert_eq!(home.wait_for(&clone), Ok(()), "there is nothing to wait for");
    assert!(aquifer_core::Gate::is_open(&behind));
    clone.clone().retire().unwrap();
    assert_eq!(clone.fill(&mut memory, 1), Err(MemoryError::UnknownId));
    drop(clone);
    assert_eq!(rig.sim.driver().calls().made(), before);
}

#[test]
fn a_wait_on_a_retired_stream_is_refused_as_gone() {
    let rig = Rig::stepped(4);
    let home = rig.lease();
    let foreign = rig.foreign();
    let adopted = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    adopted.clone().retire().unwrap();
    rig.destroy(foreign);
    rig.launch(&home);
    assert_eq!(adopted.wait_for(&home), Err(MemoryError::UnknownId));
    assert_eq!(rig.made(Call::StreamWaitEvent), 0);
}

#[test]
fn retirement_waits_for_what_other_threads_are_queueing() {
    let rig = Rig::stepped(4);
    let home = rig.lease();
    let mut memory = Plain::new(&rig, &home, 4096);
    let foreign = rig.foreign();
    let adopted = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    let clone = adopted.clone();
    let slow = rig.sim.stall(Call::Fill);
    thread::scope(|scope| {
        let filling = scope.spawn(move || clone.fill(&mut memory, 1).map(|()| memory));
        assert!(slow.wait_for(1, PATIENCE));
        let retiring = scope.spawn(move || adopted.retire());
        thread::sleep(Duration::from_millis(30));
        assert!(!retiring.is_finished(), "the handle is in use");
        drop(slow);
        drop(filling.join().unwrap().unwrap());
        retiring.join().unwrap().unwrap();
    });
    assert_eq!(rig.sim.pending(foreign), 0, "what was queued at the last moment is done too");
    rig.destroy(foreign);
    assert!(rig.sim.violations().is_empty());
}

#[test]
fn a_retirement_that_fails_leaves_the_stream_as_it_was() {
    let rig = Rig::stepped(4);
    let foreign = rig.foreign();
    let adopted = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    rig.launch(&adopted);
    rig.sim.fail(Call::StreamSynchronize, 1, 999);
    assert!(matches!(adopted.clone().retire(), Err(MemoryError::Driver(_))));
    assert!(!adopted.timeline().is_retired());
    assert_eq!(adopted.is_idle(), Ok(false));
    assert!(!adopted.timeline().is_done(adopted.timeline().open()));
    adopted.clone().retire().unwrap();
    assert_eq!(adopted.is_idle(), Ok(true));
}

/// If it were retired, its next lease would return a stream that is never waited for.
#[test]
fn a_leased_stream_is_synchronised_when_retired_and_lives_on() {
    let rig = Rig::stepped(1);
    let stream = rig.lease();
    rig.launch(&stream);
    stream.retire().unwrap();
    let next = rig.lease();
    assert_eq!(rig.sim.pending(next.raw()), 0);
    assert!(!next.timeline().is_retired());
    rig.launch(&next);
    assert_eq!(next.is_idle(), Ok(false));
    next.synchronize().unwrap();
    assert_eq!(rig.sim.pending(next.raw()), 0, "it is really waited for");
}

#[test]
fn a_fenced_stream_has_an_event_recorded_at_the_end_of_each_use() {
    let rig = Rig::stepped(4);
    let (home, foreign) = (rig.lease(), rig.foreign());
    let adopted = rig.adopt(foreign, StreamLifetime::Fenced).unwrap();
    let (home, on) = (home.timeline(), adopted.timeline());
    let mut uses = UseList::new();
    let recorded = || rig.made(Call::EventRecord);

    uses.record(home, on, Access::Read).unwrap();
    assert_eq!(recorded(), 1);
    uses.record(home, on, Access::Read).unwrap();
    assert_eq!(recorded(), 2);
    let (one, two) = (
        uses.prepare(1, home, on, Access::Read).unwrap(),
        uses.prepare(1, home, on, Access::Read).unwrap(),
    );
    let three = uses.prepare(1, home, on, Access::Read).unwrap();
    let before = recorded();
    one.finish().unwrap();
    assert_eq!(recorded(), before + 1, "of the use that was finished");
    drop(two);
    assert_eq!(recorded(), before + 2, "of the use that was dropped");
    three.abort();
    assert_eq!(recorded(), before + 2, "what was called off has no work");
    uses.lend(1, home, on, Access::Read).unwrap();
    let before = recorded();
    let noted = uses.take();
    assert_eq!(recorded(), before + 1, "the borrow ends with the block");

    // Its owner destroys it, and its work is still known to be done.
    rig.destroy(foreign);
    rig.sim.run_all();
    on.poll().unwrap();
    assert!(noted.iter().all(|n| n.is_done()));
    assert_eq!(rig.made(Call::EventRecord), before + 1);
}

#[test]
fn other_streams_have_no_event_recorded_for_a_use() {
    let rig = Rig::stepped(4);
    let (home, foreign) = (rig.lease(), rig.foreign());
    for on in [rig.lease(), rig.adopt(foreign, StreamLifetime::Retired).unwrap()] {
        let uses = UseList::new();
        uses.record(home.timeline(), on.timeline(), Access::Write).unwrap();
        drop(uses);
    }
    assert_eq!(rig.made(Call::EventRecord), 0);
}

#[test]
fn the_keep_alive_of_a_stream_lives_until_its_last_use_is_dropped() {
    let rig = Rig::stepped(4);
    let (home, foreign) = (rig.lease(), rig.foreign());
    let alive = Arc::new("the other library's stream");
    let watch: Weak<_> = Arc::downgrade(&alive);
    let timeline = rig.pool.timeline(foreign, Some(alive)).unwrap();
    let mut uses = UseList::new();
    uses.record(home.timeline(), &timeline, Access::Read).unwrap();
    drop(timeline);
    assert!(watch.upgrade().is_some(), "an event may have to be recorded on it yet");
    let noted = uses.take();
    drop(uses);
    assert!(watch.upgrade().is_some());
    drop(noted);
    assert!(watch.upgrade().is_none());
    assert_eq!(rig.made(Call::StreamDestroy), 0);
}

/// The last owner of another library's stream may run any code when it is dropped.
#[test]
fn no_lock_is_held_while_what_kept_a_stream_alive_is_dropped() {
    struct Asks(Rig);
    impl Drop for Asks {
        fn drop(&mut self) {
            // This would wait for ever behind a lock held by the thread that drops it.
            drop(self.0.pool.lease());
            let foreign = self.0.foreign();
            drop(self.0.adopt(foreign, StreamLifetime::Retired));
        }
    }
    let rig = Rig::new(4);
    let other = Rig { sim: rig.sim.clone(), pool: rig.pool.clone() };
    within(move || {
        for _ in 0..2 {
            let foreign = rig.foreign();
            let asks = Asks(Rig { sim: rig.sim.clone(), pool: rig.pool.clone() });
            let adopted = rig.adopt(foreign, StreamLifetime::KeptAlive(Arc::new(asks))).unwrap();
            adopted.clone().retire().unwrap();
            // A second timeline of the same stream, created while the first one is still held.
            let again = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
            assert_ne!(again, adopted);
            drop(adopted);
            drop(again);
        }
    });
    assert!(other.pool.lease().is_ok());
}

#[test]
fn work_of_an_adopted_stream_is_ordered_like_any_other() {
    let rig = Rig::stepped(4);
    let (home, foreign) = (rig.lease(), rig.foreign());
    let mut memory = Plain::new(&rig, &home, 4096);
    let adopted = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    home.fill(&mut memory, 1).unwrap();
    adopted.fill(&mut memory, 2).unwrap();
    rig.sim.launch(foreign, SimKernel::new("work")).unwrap();
    home.fill(&mut memory, 3).unwrap();
    drop(memory);
    adopted.retire().unwrap();
    rig.destroy(foreign);
    drop(home);
    rig.assert_all_given_back();
}
