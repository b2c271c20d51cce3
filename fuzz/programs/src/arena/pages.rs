//! Runs of pages, checked against an array of flags.
#![expect(clippy::panic, reason = "a broken promise ends the program")]

use super::books::{Books, Latch};
use crate::program::{Bytes, MAX_OPS, count_operation};
use aquifer_adapters::{PageArena, Pages};
use aquifer_core::Gate;
use std::sync::Arc;

const PAGE: usize = 16;

/// Runs the program that `bytes` encodes.
///
/// # Panics
///
/// If an invariant is violated.
pub fn run(bytes: &mut Bytes<'_>) {
    let books = Books::default();
    let count = 1 + usize::from(bytes.u8());
    let Ok(arena) = PageArena::new_in(count, PAGE, books.clone()) else {
        panic!("nothing is refused yet")
    };
    let mut free = vec![true; count];
    let mut held: Vec<(Pages, u8)> = Vec::new();
    let mut latches: Vec<(usize, usize, Arc<Latch>)> = Vec::new();
    for op in 0..MAX_OPS {
        if bytes.is_empty() {
            break;
        }
        count_operation();
        match bytes.choice(8) {
            0..=3 => {
                let size = usize::from(bytes.small()) % (PAGE * 40);
                let pages = size.div_ceil(PAGE).max(1);
                let room = |free: &[bool]| {
                    (0..=count.saturating_sub(pages)).find(|&at| {
                        free.get(at..at + pages).is_some_and(|run| run.iter().all(|&free| free))
                    })
                };
                let mut lowest = room(&free);
                if lowest.is_none() {
                    // Gates are polled only here.
                    latches.retain(|(from, to, latch)| {
                        free[*from..*to].iter_mut().for_each(|page| *page |= latch.is_open());
                        !latch.is_open()
                    });
                    lowest = room(&free);
                }
                match arena.take(size) {
                    Err(error) => {
                        assert!(lowest.is_none(), "{error}, but a run at {lowest:?} is free");
                    }
                    Ok(mut taken) => {
                        let at = taken.offset() / PAGE;
                        assert_eq!((Some(at), taken.bytes()), (lowest, pages * PAGE));
                        free[at..at + pages].fill(false);
                        let all = 0..taken.bytes();
                        let Ok(view) = arena.view_mut(&mut taken, all) else { panic!("all of it") };
                        view.fill(op as u8);
                        held.push((taken, op as u8));
                    }
                }
            }
            4 | 5 => {
                let Some(which) = usize::from(bytes.u8()).checked_rem(held.len()) else { continue };
                let (pages, _) = held.swap_remove(which);
                let (from, to) = (pages.offset() / PAGE, (pages.offset() + pages.bytes()) / PAGE);
                if bytes.flag() {
                    assert_eq!(arena.free(pages), Ok(()));
                    free[from..to].fill(true);
                } else {
                    let latch = Arc::new(Latch::default());
                    assert_eq!(arena.free_after(pages, latch.clone()), Ok(()));
                    latches.push((from, to, latch));
                }
            }
            6 => {
                if let Some(which) = usize::from(bytes.u8()).checked_rem(latches.len()) {
                    latches[which].2.open();
                }
            }
            _ => {
                let Some((pages, _)) = held.last() else { continue };
                let (start, end) = (usize::from(bytes.u16()) % 800, usize::from(bytes.u16()) % 800);
                let inside = start <= end && end <= pages.bytes();
                assert_eq!(arena.view(pages, start..end).is_ok(), inside);
            }
        }
        for (pages, stamp) in &held {
            let Ok(view) = arena.view(pages, 0..pages.bytes()) else { panic!("all of it") };
            assert!(view.iter().all(|byte| byte == stamp), "{pages:?} was overwritten");
        }
        assert_eq!(arena.free_pages(), free.iter().filter(|&&free| free).count());
    }
    drop(arena);
    latches.iter().for_each(|(_, _, latch)| latch.open());
    assert_eq!(books.reap(), (0, 0), "something was not given back");
}
