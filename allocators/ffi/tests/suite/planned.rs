//! A runtime whose pools have a plan.
#![expect(unsafe_code, reason = "calls what C calls")]

use aquifer_ffi::{
    device::{aq_alloc, aq_free},
    entry::aq_last_error,
    facts::{aq_device_stats, aq_stats},
    runtime::{
        AQ_DRIVER_SIM, aq_runtime, aq_runtime_create, aq_runtime_destroy, aq_runtime_options,
    },
    status::Status,
};
use aquifer_formats::plan::{Plan, PlanBlock, PlanOptions};
use std::{
    env,
    ffi::{CStr, CString},
    fs, process, ptr,
};

const BYTES: u64 = 3 << 20;
const OK: i32 = Status::Ok as i32;

/// Creates a runtime over one simulated device with the plan of this file.
fn create(plan: &CStr) -> (i32, aq_runtime) {
    let options = aq_runtime_options {
        size: size_of::<aq_runtime_options>(),
        driver: AQ_DRIVER_SIM,
        plan: plan.as_ptr(),
        ..Default::default()
    };
    let mut runtime = 0;
    crate::panics::watch();
    // SAFETY: 1. Of this version, with its size, and a text of this function's caller. 2. A local.
    let status = unsafe { aq_runtime_create(&raw const options, &raw mut runtime) };
    (status, runtime)
}

#[test]
fn a_runtime_serves_recorded_blocks_by_the_plan_that_its_options_name() {
    let block = |first, end| PlanBlock { bytes: BYTES, first, end, stream: 0, shared: false };
    let plan = Plan::make(&[block(0, 2), block(1, 3)], &PlanOptions::default()).unwrap();
    let path = env::temp_dir().join(format!("aquifer-ffi-{}.plan", process::id()));
    plan.write_to(fs::File::create(&path).unwrap()).unwrap();
    let text = CString::new(path.to_str().unwrap()).unwrap();

    let (status, runtime) = create(&text);
    assert_eq!(status, OK);
    for _ in 0..3 {
        let mut addresses = [0; 2];
        for address in &mut addresses {
            // SAFETY: 1. A local.
            assert_eq!(unsafe { aq_alloc(runtime, 0, BYTES, ptr::null_mut(), address) }, OK);
        }
        for address in addresses {
            assert_eq!(aq_free(runtime, 0, address), OK);
        }
    }
    // SAFETY: 1. A struct of integers.
    let mut stats: aq_stats = unsafe { std::mem::zeroed() };
    stats.size = size_of::<aq_stats>();
    // SAFETY: 1. A local of this version, with its size.
    assert_eq!(unsafe { aq_device_stats(runtime, 0, &raw mut stats) }, OK);
    assert_eq!((stats.plan_hits, stats.plan_strays, stats.physical), (6, 0, 2 * BYTES));
    assert_eq!(aq_runtime_destroy(runtime), OK);

    fs::write(&path, b"no plan").unwrap();
    let (status, _) = create(&text);
    fs::remove_file(&path).unwrap();
    // SAFETY: 1. Never null, ended by a zero, and valid until this thread's next failure.
    let error = unsafe { CStr::from_ptr(aq_last_error()) }.to_string_lossy();
    assert!(status != OK && error.contains(path.to_str().unwrap()), "{status}: {error}");
}
