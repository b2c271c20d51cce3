//! What tests and fuzz programs do between two stores of a member, as another process would that
//! runs at that moment. Only with the feature `steps`: a store costs more with it.

use std::cell::RefCell;

type Inside = Box<dyn FnOnce()>;

thread_local! {
    /// The stores of this thread until it is called, and what is called.
    static NEXT: RefCell<Option<(u64, Inside)>> = const { RefCell::new(None) };
}

/// Runs `work`, and calls `inside` before the store of this thread that comes after `stores`
/// others.
/// It is not called if `work` makes fewer. For an example, see `fuzz/programs/src/ledger.rs`.
pub fn run_inside<R>(stores: u64, inside: Inside, work: impl FnOnce() -> R) -> R {
    NEXT.set(Some((stores, inside)));
    let answer = work();
    drop(NEXT.take());
    answer
}

pub(crate) fn before_store() {
    let due = NEXT.with_borrow_mut(|next| match next {
        Some((0, _)) => next.take(),
        Some((stores, _)) => {
            *stores -= 1;
            None
        }
        None => None,
    });
    if let Some((_, inside)) = due {
        inside();
    }
}
