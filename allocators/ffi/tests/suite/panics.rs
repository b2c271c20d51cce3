//! A panic stops at the C interface: it becomes a status with its text, and calls no panic hook.
#![expect(unsafe_code, reason = "calls what C calls")]

use aquifer_ffi::{
    entry::aq_last_error,
    runtime::{AQ_DRIVER_SIM, aq_runtime_create, aq_runtime_destroy, aq_runtime_options},
    sim::aq_sim_panic,
    status::Status,
};
use std::{
    cell::Cell,
    ffi::CStr,
    panic,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

static PRINTED: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

/// Counts what a watched thread prints. Called before each runtime: the first one sets a hook that
/// calls the hook before it.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if IS_WATCHED.get() {
                PRINTED.fetch_add(1, Ordering::Relaxed);
            } else {
                others(info);
            }
        }));
    });
}

/// One test, since the hook is the process's.
#[test]
fn a_panic_is_a_code_and_is_printed_only_if_it_is_somebody_elses() {
    watch();
    IS_WATCHED.set(true);
    let options = aq_runtime_options {
        size: size_of::<aq_runtime_options>(),
        driver: AQ_DRIVER_SIM,
        ..Default::default()
    };
    let mut runtime = 0;
    assert_eq!(
        // SAFETY: 1. of this version, with its size. 2. a local.
        unsafe { aq_runtime_create(&raw const options, &raw mut runtime) },
        Status::Ok as i32
    );
    for _ in 0..3 {
        assert_eq!(aq_sim_panic(runtime), Status::Panic as i32);
        // SAFETY: 1. never null, ended by a zero, and good until this thread's next failure.
        let said = unsafe { CStr::from_ptr(aq_last_error()) }.to_string_lossy();
        assert!(said.contains("planted by aq_sim_panic") && said.contains("sim.rs"), "{said}");
    }
    let printed = PRINTED.load(Ordering::Relaxed);
    let theirs = panic::catch_unwind(|| panic!("not ours")).is_err();
    let after = PRINTED.load(Ordering::Relaxed);
    assert_eq!((printed, theirs, after), (0, true, 1));
    assert_eq!(aq_runtime_destroy(runtime), Status::Ok as i32);
}
