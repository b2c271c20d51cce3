//! Who may use a block with whom, and what has to be waited for.
//!
//! - A write excludes, reads share; what conflicts and is stamped is waited for, on the device.
//! - A use is held back until it has ended, and covered by the epoch in which it ended.
//! - A refusal leaves no note.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use aquifer_core::MemoryError;
use aquifer_driver::{Access, Call};
use aquifer_stream::{Noted, Stream, UseList};
use std::{
    sync::{
        Barrier,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};
use support::Rig;

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

    /// The block is freed.
    fn take(&mut self) -> Vec<Noted> {
        self.uses.take(self.home.timeline())
    }

    fn waits(&self) -> u64 {
        self.rig.made(Call::StreamWaitEvent)
    }
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
fn a_reader_waits_for_writers_and_a_writer_for_everybody() {
    let rig = Rig::stepped(4);
    let block = Block::new(&rig);
    let (u, v) = (rig.lease(), rig.lease());
    // Each also waits for the block's own stream.
    block.prepare(&u, Access::Read).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 1);
    block.prepare(&v, Access::Read).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 2, "readers do not wait for each other");
    block.prepare(&block.home, Access::Write).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 4, "a writer waits for both readers");
    block.prepare(&v, Access::Read).unwrap().finish().unwrap();
    assert_eq!(block.waits(), 5, "a reader waits for the writer, which was on the block's own stream");
}

#[test]
fn a_use_that_could_not_be_ordered_is_not_noted() {
    let rig = Rig::stepped(4);
    let mut block = Block::new(&rig);
    let u = rig.lease();
    rig.launch(&block.home);
    for call in [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent] {
        rig.sim.fail(call, 1, 999);
        assert!(matches!(block.prepare(&u, Access::Write), Err(MemoryError::Driver(_))), "{call:?}");
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
    // Its work is queued behind that event.
    rig.launch(&u);
    let ended = u.timeline().open();
    held.finish().unwrap();
    let noted = block.take();
    assert_eq!(noted.iter().map(Noted::epoch).collect::<Vec<_>>(), [Some(ended)]);
    u.timeline().poll().unwrap();
    assert!(!noted[0].is_done(), "the event passed, the work did not");
    u.synchronize().unwrap();
    assert!(noted[0].is_done());
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
    assert!(noted.iter().all(|n| !n.is_open()));
    assert!(noted[1].is_done(), "no work of it was queued");
    assert!(!noted[0].is_done(), "nobody has looked yet");
    u.synchronize().unwrap();
    assert!(noted[0].is_done());
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
    assert_eq!(noted.len(), 2);
    assert!(noted.iter().any(|n| n.epoch() == Some(last)));
    assert!(noted.iter().all(|n| n.epoch() >= Some(last - 1)), "the later epoch covers the earlier ones");
}

#[test]
fn what_is_done_or_the_home_streams_own_holds_nothing_back() {
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
    assert_eq!(block.take().len(), 1, "an open one does: nobody knows what its holder will queue");
    drop(held);
}

#[test]
fn uses_that_are_taken_over_are_taken_with_the_block_again() {
    let rig = Rig::stepped(4);
    let (mut lent_on, mut lender) = (Block::new(&rig), Block::new(&rig));
    let (other, third) = (rig.lease(), rig.lease());
    let open = lent_on.prepare(&other, Access::Read).unwrap();
    lender.record(&third, Access::Read);
    let taken = lent_on.take();
    lender.uses.take_over(taken);
    lender.uses.take_over(Vec::new());
    let mut uses = lender.take();
    assert_eq!(uses.len(), 2);
    uses.retain(Noted::is_open);
    assert_eq!(uses.len(), 1, "the other one's holder has not finished it");
    open.finish().unwrap();
    assert!(!uses[0].is_open());
    assert!(lent_on.take().is_empty());
}
