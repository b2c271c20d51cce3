//! Tests of runs of pages in a block of device memory.
//!
//! - The lowest run is taken, views never reach beyond their pages, and pages of another arena are
//!   refused.
//! - Freed pages are reused immediately, and the next owner is ordered after all earlier users on
//!   any stream.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{self, Rig};
use aquifer_core::MemoryError;
use aquifer_device::{DevicePages, ForeignPages, PageRun};
use aquifer_driver::{Access, Operand, OperandMut, sim::Sim};
use aquifer_stream::Stream;
use std::collections::VecDeque;

const PAGE: u64 = 4096;

fn look(stream: &Stream, arena: &DevicePages, pages: &PageRun) -> Vec<u8> {
    let mut back = vec![0; pages.bytes() as usize];
    let view = arena.view(pages, 0..pages.bytes()).unwrap();
    stream.scope(|c| c.download(view, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn an_arena_takes_one_block_fills_frees_and_returns_the_same_offset() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let arena = DevicePages::new(&rig.pool, &s, 8, PAGE).unwrap();
    assert_eq!((rig.pool.stats().blocks, arena.bytes(), arena.page_bytes()), (1, 8 * PAGE, PAGE));
    assert!(arena.address().is_multiple_of(PAGE));
    let mut held: Vec<_> = (0..4).map(|_| arena.take(PAGE + 1).unwrap()).collect();
    let offsets: Vec<_> = held.iter().map(|pages| pages.offset() / PAGE).collect();
    assert_eq!((offsets, held[0].bytes(), arena.free_pages()), (vec![0, 2, 4, 6], 2 * PAGE, 0));
    assert_eq!(
        arena.take(0),
        Err(MemoryError::TooLarge { requested: 0, limit: 0 }),
        "a page at least"
    );
    for at in [0, 1] {
        arena.free(held.remove(at)).unwrap();
    }
    let full = MemoryError::TooLarge { requested: 3 * PAGE, limit: 2 * PAGE };
    assert_eq!((arena.take(3 * PAGE), arena.free_pages()), (Err(full), 4));
    arena.free(held.remove(0)).unwrap();
    assert_eq!(arena.take(6 * PAGE).unwrap().offset(), 0, "freed neighbours are one run");
    assert!(arena.take(u64::MAX).is_err());
    drop(arena);
    assert_eq!(rig.pool.stats().blocks, 0);
    assert_eq!(
        DevicePages::new(&rig.pool, &s, 4, 3000).unwrap_err(),
        MemoryError::BadAlignment { align: 3000 }
    );
    assert_eq!(DevicePages::new(&rig.pool, &s, 0, PAGE).unwrap_err(), MemoryError::ZeroSize);
    assert!(DevicePages::new(&rig.pool, &s, usize::MAX, PAGE).is_err());
    assert_eq!(rig.pool.stats().blocks, 0);
}

#[test]
#[expect(clippy::reversed_empty_ranges, reason = "a range that is refused")]
fn a_view_never_reaches_beyond_its_pages() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let arena = DevicePages::new(&rig.pool, &s, 8, PAGE).unwrap();
    let (_first, mut pages) = (arena.take(1).unwrap(), arena.take(2 * PAGE).unwrap());
    let part = arena.view(&pages, 100..300).unwrap().range();
    assert_eq!((part.address - arena.address(), part.bytes), (PAGE + 100, 200));
    assert_eq!(arena.view_mut(&mut pages, 2 * PAGE..2 * PAGE).unwrap().range().bytes, 0);
    for range in [0..2 * PAGE + 1, 2 * PAGE..u64::MAX, u64::MAX..u64::MAX, 3..2] {
        let refused = match range.end.checked_sub(range.start) {
            Some(len) => MemoryError::OutOfBounds { offset: range.start, len, bytes: 2 * PAGE },
            None => MemoryError::ReversedRange { start: range.start, end: range.end },
        };
        assert_eq!(arena.view(&pages, range.clone()).unwrap_err(), refused);
        assert_eq!(arena.view_mut(&mut pages, range).unwrap_err(), refused);
    }
}

#[test]
fn pages_of_another_arena_are_refused_and_come_back() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let [ours, theirs] = [(); 2].map(|()| DevicePages::new(&rig.pool, &s, 4, PAGE).unwrap());
    let mut pages = theirs.take(1).unwrap();
    let foreign = MemoryError::ForeignBlock { address: ours.address() };
    assert_eq!(ours.view(&pages, 0..1).unwrap_err(), foreign);
    assert_eq!(ours.view_mut(&mut pages, 0..1).unwrap_err(), foreign);
    let ForeignPages(pages) = ours.free(pages).unwrap_err();
    assert_eq!((ours.free_pages(), theirs.free_pages()), (4, 3));
    theirs.free(pages).unwrap();
    assert_eq!(theirs.free_pages(), 4);
}

/// Work is queued and runs later, in every order that the streams allow.
#[test]
fn the_next_owner_of_freed_pages_is_ordered_after_all_users() {
    for seed in 0..60 {
        let rig = Rig::on(Sim::h200(1).seeded(seed), 16, |_| ());
        let streams: Vec<_> = (0..3).map(|_| rig.stream()).collect();
        let arena = DevicePages::new(&rig.pool, &streams[0], 6, PAGE).unwrap();
        let mut held: VecDeque<(PageRun, u8)> = VecDeque::new();
        for round in 0..24u8 {
            let (one, other) =
                (&streams[usize::from(round) % 3], &streams[usize::from(round / 3 + 1) % 3]);
            let mut pages = arena.take(PAGE * (1 + u64::from(round % 2))).unwrap();
            let all = 0..pages.bytes();
            one.fill(&mut arena.view_mut(&mut pages, all).unwrap(), round).unwrap();
            if let Some((before, _)) = held.back() {
                // This reads one run and writes another one of the same block.
                let from = arena.view(before, 0..100).unwrap();
                other.copy(from, &mut arena.view_mut(&mut pages, 0..100).unwrap()).unwrap();
                other.fill(&mut arena.view_mut(&mut pages, 0..100).unwrap(), round).unwrap();
            }
            held.push_back((pages, round));
            if held.len() == 3 {
                let (pages, value) = held.pop_front().unwrap();
                if round % 5 == 0 {
                    assert!(
                        look(other, &arena, &pages).iter().all(|&byte| byte == value),
                        "seed {seed}"
                    );
                }
                arena.free(pages).unwrap();
            }
        }
        for (pages, value) in held {
            assert!(
                look(&streams[2], &arena, &pages).iter().all(|&byte| byte == value),
                "seed {seed}"
            );
        }
        drop(arena);
        let mut next = rig.bytes(&streams[0], 6 * PAGE);
        streams[0].fill(&mut next, 1).unwrap();
        rig.assert_silent();
    }
}

/// Each view is lent to a stream of its own, and the two are used alternately.
#[test]
fn views_of_two_runs_used_together_are_recorded_until_both_end() {
    for seed in 0..60 {
        let rig = Rig::on(Sim::h200(1).seeded(seed), 16, |_| ());
        let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
        let arena = DevicePages::new(&rig.pool, &s, 2, PAGE).unwrap();
        for _ in 0..3 {
            let (mut a, mut b) = (arena.take(1).unwrap(), arena.take(1).unwrap());
            {
                let mut x = arena.view_mut(&mut a, 0..PAGE).unwrap();
                let mut y = arena.view_mut(&mut b, 0..PAGE).unwrap();
                x.order_mut(u.raw(), None, Access::ReadWrite).unwrap();
                y.order_mut(v.raw(), None, Access::ReadWrite).unwrap();
                for _ in 0..2 {
                    rig.sim.access(u.raw(), x.range(), Access::Write, None).unwrap();
                    rig.sim.access(v.raw(), y.range(), Access::Write, None).unwrap();
                }
            }
            arena.free(a).unwrap();
            arena.free(b).unwrap();
            let mut both = arena.take(2 * PAGE).unwrap();
            s.fill(&mut arena.view_mut(&mut both, 0..2 * PAGE).unwrap(), 2).unwrap();
            arena.free(both).unwrap();
        }
        rig.assert_silent();
    }
}

/// A kernel with a table of offsets finds its pages by itself.
#[test]
fn a_use_of_all_pages_is_ordered_after_earlier_uses_of_each_and_before_later_ones() {
    for seed in 0..30 {
        let rig = Rig::on(Sim::h200(1).seeded(seed), 16, |_| ());
        let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
        let mut arena = DevicePages::new(&rig.pool, &s, 4, PAGE).unwrap();
        let (mut a, mut b) = (arena.take(1).unwrap(), arena.take(1).unwrap());
        for round in 0..4 {
            u.fill(&mut arena.view_mut(&mut a, 0..PAGE).unwrap(), round).unwrap();
            v.fill(&mut arena.view_mut(&mut b, 0..PAGE).unwrap(), round).unwrap();
            let mut copy = rig.bytes(&s, 4 * PAGE);
            s.copy(arena.all(), &mut copy).unwrap();
            assert!(
                support::read(&s, &copy)[..2 * PAGE as usize].iter().all(|&byte| byte == round)
            );
            v.fill(&mut arena.all_mut(), 77).unwrap();
        }
        assert!(look(&u, &arena, &a).iter().all(|&byte| byte == 77));
        rig.assert_silent();
    }
}
