//! The protocol by which readers get consistent figures of a slot.
//!
//! The first word of a slot is its sequence. It is odd while the writer is in the slot, and changes
//! with each update. There is one writer at a time. A reader copies the slot twice: equal copies
//! with an even sequence are consistent, since the second copy begins after the first has ended.
//!
//! A loom model tries every interleaving of a reader with two updates. It finds a torn copy if
//! either fence or the comparison of both copies is omitted: `RUSTFLAGS="--cfg loom" cargo test -p
//! aquifer-status --lib --release -- sequence::`.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A word of a slot: an atomic of the standard library, or one of loom's in the model.
pub(crate) trait SlotWord {
    /// Returns the value.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces the value.
    fn store(&self, value: u64, order: Ordering);
    /// Keeps the stores of such words after it behind the stores before it.
    fn release_fence();
}

impl SlotWord for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    fn release_fence() {
        fence(Ordering::Release);
    }
}

/// Changes the words of a slot. The caller makes sure that there is no other writer. A sequence
/// that a dead writer or another process has left odd is made even again.
pub(crate) fn update<W: SlotWord>(words: &[W], change: impl FnOnce(&[W])) {
    let Some(sequence) = words.first() else { return };
    let odd = sequence.load(Ordering::Relaxed).wrapping_add(1) | 1;
    sequence.store(odd, Ordering::Relaxed);
    // No store below may be seen before the odd sequence.
    W::release_fence();
    change(words);
    sequence.store(odd.wrapping_add(1), Ordering::Release);
}

/// Returns whether two copies of a slot, one made after the other, are consistent.
pub(crate) fn is_consistent(first: &[u64], second: &[u64]) -> bool {
    first.first().is_some_and(|sequence| sequence.is_multiple_of(2)) && first == second
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{array, sync::atomic::AtomicBool, thread};

    const WORDS: usize = 64;

    fn copy(words: &[AtomicU64]) -> [u64; WORDS] {
        let copy = array::from_fn(|n| words[n].load(Ordering::Relaxed));
        // As the end of a system call.
        fence(Ordering::SeqCst);
        copy
    }

    #[test]
    fn readers_accept_only_whole_updates() {
        let words: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
        let over = AtomicBool::new(false);
        let (accepted, torn) = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut accepted, mut torn) = (0, 0);
                let mut last = copy(&words);
                while !over.load(Ordering::Relaxed) {
                    let next = copy(&words);
                    if is_consistent(&last, &next) {
                        accepted += 1;
                        let value = next[1];
                        assert!(next[1..].iter().all(|&word| word == value), "{next:?}");
                        assert_eq!(next[0], 2 * value);
                    } else {
                        torn += 1;
                    }
                    last = next;
                }
                (accepted, torn)
            });
            for round in 1..200_000 {
                update(&words, |words| {
                    words[1..].iter().for_each(|word| word.store(round, Ordering::Relaxed));
                });
                if round.is_multiple_of(64) {
                    thread::yield_now();
                }
            }
            // Without a writer the reader must accept.
            thread::sleep(std::time::Duration::from_millis(10));
            over.store(true, Ordering::Relaxed);
            reader.join().unwrap()
        });
        assert!(accepted > 0 && torn > 0, "{accepted} accepted, {torn} not");
    }

    #[test]
    fn an_update_repairs_a_sequence_that_was_left_odd() {
        let words: [AtomicU64; 2] = [AtomicU64::new(7), AtomicU64::new(1)];
        let read = || [words[0].load(Ordering::Relaxed), words[1].load(Ordering::Relaxed)];
        assert!(!is_consistent(&read(), &read()));
        update(&words, |words| words[1].store(2, Ordering::Relaxed));
        assert!(is_consistent(&read(), &read()) && read()[0] > 7);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::{model, sync::atomic, thread};
    use std::sync::Arc;

    impl SlotWord for atomic::AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            Self::load(self, order)
        }

        fn store(&self, value: u64, order: Ordering) {
            Self::store(self, value, order);
        }

        fn release_fence() {
            atomic::fence(Ordering::Release);
        }
    }

    type Words = [atomic::AtomicU64; 3];

    fn copy(words: &Words) -> [u64; 3] {
        let copy = std::array::from_fn(|n| words[n].load(Ordering::Relaxed));
        // As the end of a system call.
        atomic::fence(Ordering::SeqCst);
        copy
    }

    #[test]
    fn equal_copies_with_an_even_sequence_are_of_one_update() {
        model(|| {
            let words: Arc<Words> = Arc::new(std::array::from_fn(|_| atomic::AtomicU64::new(0)));
            let writer = thread::spawn({
                let words = words.clone();
                move || {
                    for round in 1..=2 {
                        update(&*words, |words| {
                            words[1..].iter().for_each(|word| word.store(round, Ordering::Relaxed));
                        });
                    }
                }
            });
            let (first, second) = (copy(&words), copy(&words));
            if is_consistent(&first, &second) {
                assert_eq!((second[1], second[2]), (second[0] / 2, second[0] / 2));
            }
            writer.join().unwrap();
            // Without a writer the reader accepts.
            let (first, second) = (copy(&words), copy(&words));
            assert!(is_consistent(&first, &second) && second == [4, 2, 2]);
        });
    }
}
