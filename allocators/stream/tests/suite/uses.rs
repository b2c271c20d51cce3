//! Tests of block uses: which may overlap, and which must be waited for.
//!
//! - A write excludes all others, and reads share. A conflicting use that has ended is waited for
//!   on the device.
//! - A use keeps its block pending until it has ended, and is covered by the epoch in which it
//!   ended.
//! - A refusal records nothing.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{self, Rig};
use aquifer_core::MemoryError;
use aquifer_driver::{Access, Call};
use aquifer_stream::{LastUse, Stream, UseList, Uses};
use std::{
    sync::{
        Barrier,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

const BLOCK: u64 = 0x4000;
const BUSY: MemoryError = MemoryError::Busy { address: BLOCK };

struct Block<'a> {
    rig: &'a Rig,
    home: Stream,
    uses: UseList,
}

impl<'a> Block<'a> {
    fn new(rig: &'a Rig) -> Self {
        Self { rig, home: rig.lease(), uses: UseList::new() }
    }

    fn prepare(&self, on: &Stream, access: Access) -> Result<aquifer_stream::Use, MemoryError> {
        self.uses.prepare(BLOCK, self.home.timeline(), on.timeline(), access)
    }

    fn lend(&self, on: &Stream, access: Access) -> Result<(), MemoryError> {
        self.uses.lend(BLOCK, self.home.timeline(), on.timeline(), access)
    }

    fn record(&self, on: &Stream, access: Access) {
        self.uses.record(self.home.timeline(), on.timeline(), access).unwrap();
    }

    /// Takes the uses of the block, as its free does.
    fn take(&mut self) -> Uses {
        self.uses.take()
    }

    fn waits(&self) -> u64 {
        self.rig.made(Call::StreamWaitEvent)
    }
}

fn all_done(uses: &Uses) -> bool {
    uses.iter().all(|noted| noted.is_done())
}

#[test]
fn a_prepared_write_excludes_and_reads_share() {
    let rig = Rig::stepped(4);
    let block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    for excluded in [Access::Read, Access::Write, Access::ReadWrite] {
        for excluding in [Access::Write, Access::ReadWrite] {
            let held = block.prepare(&u, excluding).unwrap();
            for on in [&u, &v, &block.home] {
                assert_eq!(block.prepare(on, excluded).map(drop), Err(BUSY));
                assert_eq!(block.lend(on, excluded), Err(BUSY));
            }
            drop(held);
        }
    }
    let reads = [&u, &v, &block.home].map(|on| block.prepare(on, Access::Read).unwrap());
    assert_eq!(block.prepare(&u, Access::Write).map(drop), Err(BUSY));
    drop(reads);
    block.prepare(&u, Access::Write).unwrap().abort();
}

#[test]
fn of_threads_that_prepare_a_write_at_once_one_wins() {
    let rig = Rig::new(8);
    let block = Block::new(&rig);
    let streams: Vec<_> = (0..4).map(|_| rig.lease()).collect();
    let (start, inside) = (Barrier::new(4), AtomicU32::new(0));
    thread::scope(|scope| {
        for stream in &streams {
            let (block, start, inside) = (&block, &start, &inside);
            scope.spawn(move || {
                start.wait();
                for _ in 0..500 {
                    let Ok(held) = block.prepare(stream, Access::Write) else { continue };
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two writers at once");
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(held);
                }
            });
        }
    });
}

#[test]
fn a_reader_waits_for_writers_and_a_writer_for_all_users() {
    let rig = Rig::stepped(4);
    let block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    // Each also waits for the block's owner stream.
    block.prepare(&u, Access::Read).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 1);
    block.prepare(&v, Access::Read).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 2, "readers do not wait for each other");
    block.prepare(&block.home, Access::Write).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 4, "a writer waits for both readers");
    block.prepare(&v, Access::Read).unwrap().finish().unwrap();
    assert_eq!(
        block.waits(),
        5,
        "a reader waits for the writer, which was on the block's own stream"
    );
}

#[test]
fn a_use_that_could_not_be_ordered_is_not_noted() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    rig.launch(&block.home);
    for call in [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent] {
        rig.sim.fail(call, 1, 999);
        assert!(
            matches!(block.prepare(&u, Access::Write), Err(MemoryError::Driver(_))),
            "{call:?}"
        );
        rig.sim.clear_failures();
        rig.sim.fail(Call::StreamWaitEvent, 1, 999);
        assert!(matches!(block.lend(&u, Access::Write), Err(MemoryError::Driver(_))), "{call:?}");
        rig.sim.clear_failures();
    }
    drop(block.prepare(&block.home, Access::Write).unwrap());
    assert!(block.take().is_empty(), "nobody else uses it");
}

#[test]
fn a_use_is_covered_by_the_epoch_in_which_it_ended() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    let held = block.prepare(&u, Access::Read).unwrap();
    u.timeline().fence(u.timeline().open()).unwrap();
    // Its work is queued after that event.
    rig.launch(&u);
    let ended = u.timeline().open();
    held.finish().unwrap();
    let noted = block.take();
    assert_eq!(noted.iter().map(|n| n.epoch()).collect::<Vec<_>>(), [Some(ended)]);
    u.timeline().poll().unwrap();
    assert!(!all_done(&noted), "the event passed, the work did not");
    u.synchronize().unwrap();
    assert!(all_done(&noted));
}

#[test]
fn a_use_that_is_held_when_its_block_is_freed_is_open_until_it_ends() {
    let rig = Rig::new(4);
    let mut block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    let (held, called_off) =
        (block.prepare(&u, Access::Read).unwrap(), block.prepare(&v, Access::Read).unwrap());
    let noted = block.take();
    assert!(noted.iter().all(|n| n.is_open() && !n.is_done() && n.epoch().is_none()));
    drop(held);
    called_off.abort();
    assert!(!noted.is_open());
    assert_eq!(noted.iter().count(), 1, "no work of the other was queued");
    assert!(!all_done(&noted), "nobody has looked yet");
    u.synchronize().unwrap();
    assert!(all_done(&noted));
}

/// A stream is ordered with itself, but the free says nothing about work that is queued later.
#[test]
fn a_use_on_the_home_stream_that_ends_after_the_free_holds_the_block_until_its_work_is_done() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let home = block.home.clone();
    let held = block.prepare(&home, Access::Write).unwrap();
    let freed_in = home.timeline().open();
    let mut uses = block.take();
    home.timeline().fence(freed_in).unwrap();
    rig.launch(&home);
    held.finish().unwrap();
    home.timeline().poll().unwrap();
    uses.forget_done();
    assert_eq!(uses.stamped().map(|(_, epoch)| epoch).collect::<Vec<_>>(), [freed_in + 1]);
    home.synchronize().unwrap();
    uses.forget_done();
    assert!(uses.is_empty());
}

#[test]
fn a_lent_use_is_stamped_when_its_borrow_must_be_over() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    block.lend(&u, Access::Write).unwrap();
    u.timeline().fence(u.timeline().open()).unwrap();
    rig.launch(&u);
    let before = block.waits();
    block.lend(&v, Access::Read).unwrap();
    assert_eq!(block.waits(), before + 2, "for the block's own stream and for the writer");
    rig.launch(&v);
    v.synchronize().unwrap();
    assert_eq!(rig.sim.pending(u.raw()), 0, "and the wait covers the writer's work");
    let noted = block.take();
    assert!(noted.iter().all(|n| n.epoch().is_some()), "at the free all borrows are over");
}

#[test]
fn one_note_is_enough_for_one_stream_and_kind_of_access() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    for _ in 0..100 {
        rig.launch(&u);
        block.record(&u, Access::Read);
        u.timeline().fence(u.timeline().open()).unwrap();
    }
    rig.launch(&u);
    block.record(&u, Access::Write);
    let last = u.timeline().open();
    let noted = block.take();
    assert_eq!(noted.iter().count(), 2);
    assert!(noted.iter().any(|n| n.epoch() == Some(last)));
    assert!(
        noted.iter().all(|n| n.epoch() >= Some(last - 1)),
        "the later epoch covers the earlier ones"
    );
}

#[test]
fn completed_uses_and_those_of_the_owner_stream_keep_nothing_pending() {
    let rig = Rig::new(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    assert!(block.uses.is_empty() && block.take().is_empty());
    block.record(&block.home, Access::Write);
    block.prepare(&block.home, Access::Write).unwrap().finish().unwrap();
    block.record(&u, Access::Read);
    u.synchronize().unwrap();
    assert!(block.take().is_empty());
    let held = block.prepare(&block.home, Access::Write).unwrap();
    assert_eq!(
        block.take().iter().count(),
        1,
        "an open one does: nobody knows what its holder will queue"
    );
    drop(held);
}

#[test]
fn uses_that_end_one_after_the_other_stay_one_note() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    for _ in 0..100 {
        let held = block.prepare(&u, Access::Read).unwrap();
        rig.launch(&u);
        held.finish().unwrap();
        block.lend(&u, Access::Read).unwrap();
    }
    let last = u.timeline().open();
    let epochs: Vec<_> = block.take().iter().map(|n| n.epoch()).collect();
    assert!(epochs == [Some(last)], "{epochs:?}");
}

#[test]
fn exactly_the_uses_the_owner_stream_waited_for_are_forgotten() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    block.record(&u, Access::Write);
    block.lend(&block.home, Access::Read).unwrap();
    block.record(&v, Access::Read);
    let left: Vec<_> = block.take().iter().map(|n| n.on().clone()).collect();
    assert_eq!(left.len(), 1, "the writer has been waited for");
    assert_eq!(left[0].id(), v.timeline().id(), "a read that came later has not");
    // A refused wait forgets nothing, nor does the wait of another stream.
    block.record(&u, Access::Write);
    rig.launch(&u);
    rig.sim.fail(Call::StreamWaitEvent, 1, 999);
    assert!(block.lend(&block.home, Access::Read).is_err());
    block.prepare(&v, Access::Write).unwrap().abort();
    assert_eq!(block.take().iter().count(), 1);
}

/// The stream waits for the epoch that it saw. A use recorded during the wait is not covered.
#[test]
fn a_use_noted_while_the_home_stream_waits_is_kept() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    block.record(&u, Access::Write);
    rig.launch(&u);
    let slow = rig.sim.stall(Call::StreamWaitEvent);
    thread::scope(|scope| {
        let lending = scope.spawn(|| block.lend(&block.home, Access::Read));
        assert!(slow.wait_for(1, support::PATIENCE));
        block.record(&u, Access::Write);
        drop(slow);
        lending.join().unwrap().unwrap();
    });
    let now = u.timeline().open();
    assert_eq!(block.take().iter().map(|n| n.epoch()).collect::<Vec<_>>(), [Some(now)]);
}

#[test]
fn a_watcher_is_notified_when_the_last_open_use_of_a_freed_block_ends() {
    #[derive(Default)]
    struct Told(AtomicU32);
    impl LastUse for Told {
        fn ended(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let rig = Rig::new(4);
    let mut block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    let (one, two) =
        (block.prepare(&u, Access::Read).unwrap(), block.prepare(&v, Access::Read).unwrap());
    let told = std::sync::Arc::new(Told::default());
    let whom: std::sync::Arc<dyn LastUse> = told.clone();
    let uses = block.take();
    assert!(uses.tell(&whom));
    drop(one);
    assert_eq!(told.0.load(Ordering::SeqCst), 0);
    two.abort();
    assert_eq!(told.0.load(Ordering::SeqCst), 1);
    assert!(!uses.tell(&whom), "none is open");
}

#[test]
fn a_block_that_is_given_up_with_an_open_use_leaves_its_account_to_the_use() {
    let rig = Rig::new(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    let held = block.prepare(&u, Access::Write).unwrap();
    drop(block.take());
    // If the next block reused the list, the end of this use would end one of that block.
    let next = Block { rig: &rig, home: block.home.clone(), uses: UseList::new() };
    let excluding = next.prepare(&u, Access::Write).unwrap();
    drop(held);
    assert_eq!(next.prepare(&u, Access::Write).map(drop), Err(BUSY));
    drop(excluding);
}

#[test]
fn uses_that_are_taken_over_are_taken_with_the_block_again() {
    for lender_has_its_own in [true, false] {
        let rig = Rig::stepped(4);
        let (mut lent_on, mut lender) = (Block::new(&rig), Block::new(&rig));
        let (other, third) = (rig.lease(), rig.lease());
        let open = lent_on.prepare(&other, Access::Read).unwrap();
        if lender_has_its_own {
            lender.record(&third, Access::Read);
        }
        let own = usize::from(lender_has_its_own);
        let taken = lent_on.take();
        lender.uses.take_over(lender.home.timeline(), taken);
        lender.uses.take_over(lender.home.timeline(), Uses::default());
        assert_eq!(
            lender.prepare(&third, Access::Write).map(drop),
            Err(BUSY),
            "what came along excludes"
        );
        let mut uses = lender.take();
        assert_eq!(uses.iter().count(), 1 + own);
        assert!(uses.is_open(), "the other one's holder has not finished it");
        rig.launch(&other);
        open.finish().unwrap();
        assert!(!uses.is_open());
        assert_eq!(uses.stamped().count(), 1 + own);
        for stream in [&other, &third] {
            stream.synchronize().unwrap();
        }
        uses.forget_done();
        assert!(uses.is_empty());
        assert!(lent_on.take().is_empty());
    }
}

#[test]
fn work_queued_for_inherited_uses_is_waited_for() {
    let rig = Rig::stepped(4);
    let (mut lent_on, mut lender) = (Block::new(&rig), Block::new(&rig));
    let (other, third) = (rig.lease(), rig.lease());
    lent_on.record(&other, Access::Read);
    rig.launch(&other);
    lender.record(&third, Access::Read);
    let taken = lent_on.take();
    lender.uses.take_over(lender.home.timeline(), taken);
    let before = lender.waits();
    lender.lend(&lender.home, Access::Write).unwrap();
    assert_eq!(lender.waits() - before, 2, "for each of the two");
}

/// The lender's stream is ordered with itself, but not with the work of the borrower's stream.
#[test]
fn a_lender_treats_the_stream_it_lent_to_as_another_stream() {
    let rig = Rig::stepped(3);
    let (mut lent_on, mut lender) = (Block::new(&rig), Block::new(&rig));
    let open = lent_on.prepare(&lent_on.home, Access::Write).unwrap();
    let taken = lent_on.take();
    lender.uses.take_over(lender.home.timeline(), taken);
    rig.launch(&lent_on.home);
    open.finish().unwrap();
    let uses: Vec<_> = lender.take().iter().collect();
    assert_eq!(uses.len(), 1);
    assert_eq!(uses[0].epoch(), Some(lent_on.home.timeline().open()));
}

#[test]
fn an_inherited_use_that_ends_on_the_lenders_stream_after_the_free_is_stamped() {
    for lender_has_its_own in [true, false] {
        let rig = Rig::stepped(4);
        let (mut lent_on, mut lender) = (Block::new(&rig), Block::new(&rig));
        let home = lender.home.clone();
        let open = lent_on.prepare(&home, Access::Read).unwrap();
        if lender_has_its_own {
            lender.record(&rig.lease(), Access::Read);
        }
        let taken = lent_on.take();
        lender.uses.take_over(home.timeline(), taken);
        let mut uses = lender.take();
        home.timeline().fence(home.timeline().open()).unwrap();
        rig.launch(&home);
        open.finish().unwrap();
        uses.forget_done();
        let last = home.timeline().open();
        assert!(
            uses.iter().any(|noted| noted.on().number() == home.timeline().number()
                && noted.epoch() == Some(last))
        );
    }
}

#[test]
fn uses_that_are_asked_for_while_the_block_lives_say_how_they_end_and_stay_noted() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    block.record(&u, Access::Read);
    let (ends, called_off) =
        (block.prepare(&v, Access::Read).unwrap(), block.prepare(&v, Access::Read).unwrap());
    rig.launch(&v);
    let home = block.home.timeline().clone();
    let current = [block.uses.current(&home), block.uses.current(&home)];
    block.record(&u, Access::Read);
    let then = v.timeline().open();
    ends.finish().unwrap();
    called_off.abort();
    rig.launch(&v);
    block.record(&v, Access::Read);
    for current in current {
        assert_eq!(current.len(), 3);
        let of_v: Vec<_> = current.iter().filter(|noted| noted.on().raw() == v.raw()).collect();
        let mut epochs: Vec<_> = of_v.iter().map(|noted| noted.epoch()).collect();
        epochs.sort_unstable();
        assert_eq!(epochs, [Some(0), Some(then)], "called off, and ended when it did");
    }
    assert_eq!(block.take().iter().count(), 2, "one of each stream");
}
