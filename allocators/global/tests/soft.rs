//! Hooks of the soft cap are told outside of allocations, in turn, and once for a swing around the
//! line.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.
#![expect(clippy::unwrap_used, reason = "a test, though not in a harness")]

use aquifer_global::{Global, is_soft_cap_exceeded, on_soft_cap, set_soft_cap, soft_cap, stats};
use std::{
    cell::Cell,
    hint::black_box,
    panic::set_hook,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, channel},
    },
    thread,
    time::Duration,
};

#[global_allocator]
static GLOBAL: Global = Global::new();

const MIB: usize = 1 << 20;

/// Long enough for a thread to wake on a loaded machine; only waited for where nothing is to come.
const QUIET: Duration = Duration::from_millis(50);

fn main() {
    assert!(soft_cap() == u64::MAX && !is_soft_cap_exceeded());
    // Panics of hooks are on purpose.
    set_hook(Box::new(|_| {}));
    thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });
    let (tell, told) = channel();
    let caller = thread::current().id();
    on_soft_cap(move |soft| {
        assert!(!INSIDE.replace(true), "within another");
        assert_ne!(thread::current().id(), caller, "inside of an allocation");
        // More than any line here: a hook that allocates is not called for that.
        drop(black_box(vec![1u8; 64 * MIB]));
        tell.send((soft.exceeded, soft.cap)).unwrap();
        INSIDE.set(false);
    })
    .unwrap();
    on_soft_cap(|_| std::panic::resume_unwind(Box::new("on purpose"))).unwrap();
    let last = Arc::new(Mutex::new(0));
    let count = last.clone();
    on_soft_cap(move |_| *count.lock().unwrap() += 1).unwrap();

    it_is_told_when_it_is_exceeded_and_when_it_no_longer_is(&told);
    a_swing_around_the_line_is_told_once(&told);
    a_short_peak_is_told_too(&told);
    a_line_below_what_is_live_is_exceeded_at_once(&told);
    a_hook_may_need_what_the_allocating_thread_holds(&told);
    assert!(*last.lock().unwrap() >= 8, "hooks behind one that panics are called all the same");
}

fn it_is_told_when_it_is_exceeded_and_when_it_no_longer_is(told: &Receiver<(bool, u64)>) {
    let line = stats().live + 128 * MIB as u64;
    assert!(!set_soft_cap(line));
    let block = vec![1u8; 130 * MIB];
    assert!(is_soft_cap_exceeded());
    assert_eq!(told.recv(), Ok((true, line)));
    assert!(Vec::<u8>::new().try_reserve_exact(MIB).is_ok(), "nothing is refused");
    drop(block);
    assert!(!is_soft_cap_exceeded() || told.try_recv().is_err());
    assert_eq!(told.recv(), Ok((false, line)));
}

fn a_swing_around_the_line_is_told_once(told: &Receiver<(bool, u64)>) {
    let line = stats().live + 160 * MIB as u64;
    set_soft_cap(line);
    let most = vec![1u8; 155 * MIB];
    for _ in 0..100 {
        drop(black_box(vec![1u8; 6 * MIB]));
    }
    assert_eq!(told.recv(), Ok((true, line)));
    assert!(told.recv_timeout(QUIET).is_err(), "it has not fallen to seven eighths");
    assert!(is_soft_cap_exceeded());
    drop(most);
    assert_eq!(told.recv(), Ok((false, line)));
}

fn a_short_peak_is_told_too(told: &Receiver<(bool, u64)>) {
    let line = stats().live + 128 * MIB as u64;
    set_soft_cap(line);
    drop(black_box(vec![1u8; 200 * MIB]));
    assert_eq!(told.recv(), Ok((true, line)));
    assert_eq!(told.recv(), Ok((false, line)));
}

fn a_line_below_what_is_live_is_exceeded_at_once(told: &Receiver<(bool, u64)>) {
    let block = vec![1u8; 100 * MIB];
    let line = stats().live - 50 * MIB as u64;
    assert!(set_soft_cap(line));
    assert_eq!(told.recv(), Ok((true, line)));
    set_soft_cap(u64::MAX);
    assert_eq!(told.recv(), Ok((false, u64::MAX)));
    drop(block);
}

fn a_hook_may_need_what_the_allocating_thread_holds(told: &Receiver<(bool, u64)>) {
    static HELD: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    on_soft_cap(|soft| {
        if soft.exceeded {
            // Drops a cache, which a thread that fills it has locked while it grows.
            *HELD.lock().unwrap() = Vec::new();
        }
    })
    .unwrap();
    let line = stats().live + 128 * MIB as u64;
    set_soft_cap(line);
    HELD.lock().unwrap().reserve_exact(200 * MIB);
    assert_eq!(told.recv(), Ok((true, line)));
    assert_eq!(told.recv(), Ok((false, line)), "the hook let go of it");
    set_soft_cap(u64::MAX);
}
