//! Elastic memory through the C interface: each function, and what it refuses.
#![expect(unsafe_code, reason = "calls what C calls")]

use aquifer_ffi::{
    device::AQ_WRITE,
    elastic::*,
    entry::aq_last_error,
    facts::{aq_limit, aq_set_limit, aq_trim},
    runtime::{
        AQ_DRIVER_SIM, AQ_SIM_PLAIN, AQ_STREAMS_RETIRED, aq_runtime, aq_runtime_create,
        aq_runtime_destroy, aq_runtime_options,
    },
    sim::{
        aq_sim_stream_create, aq_sim_stream_synchronize, aq_sim_stream_wait, aq_sim_touch,
        aq_sim_violations,
    },
    status::Status,
};
use std::{
    ffi::{CStr, c_void},
    ptr,
};

const PAGE: u64 = 2 << 20;
const OK: i32 = Status::Ok as i32;
const NONE: *mut c_void = ptr::null_mut();

fn runtime(sim_flags: u32) -> aq_runtime {
    let options = aq_runtime_options {
        size: size_of::<aq_runtime_options>(),
        driver: AQ_DRIVER_SIM,
        streams: AQ_STREAMS_RETIRED,
        device_limit: 8 * PAGE,
        sim_flags,
        sim_seed: 7,
        ..Default::default()
    };
    let mut runtime = 0;
    crate::panics::watch();
    // SAFETY: 1. Of this version, with its size. 2. A local.
    assert_eq!(unsafe { aq_runtime_create(&raw const options, &raw mut runtime) }, OK);
    runtime
}

/// Reserves addresses on the default stream.
fn reserve(runtime: aq_runtime, bytes: u64, page: &mut u64) -> Result<(aq_elastic, u64), i32> {
    let (mut elastic, mut address) = (0, 0);
    // SAFETY: 1. The default stream. 2. Locals.
    let status =
        unsafe { aq_elastic_reserve(runtime, 0, bytes, page, NONE, &mut elastic, &mut address) };
    if status == OK { Ok((elastic, address)) } else { Err(status) }
}

fn release(elastic: aq_elastic, first: u64, pages: u64, stream: *mut c_void, idle: u32) -> i32 {
    // SAFETY: 1. The simulated driver checks streams.
    unsafe { aq_elastic_release(elastic, first * PAGE, pages * PAGE, stream, idle) }
}

/// The ends of up to two committed ranges, how many there are, and the idle and the charged pages.
fn pages(runtime: aq_runtime, elastic: aq_elastic) -> ([u64; 4], usize, u64, u64) {
    let (mut ranges, mut count, mut idle, mut used) = ([0; 4], 0, 0, 0);
    // SAFETY: 1. 2. Locals, and two ranges.
    unsafe {
        assert_eq!(aq_elastic_committed(elastic, &raw mut ranges[0], 2, &mut count, &mut idle), OK);
        assert_eq!(aq_limit(runtime, 0, ptr::null_mut(), &mut used), OK);
    }
    (ranges.map(|offset| offset / PAGE), count, idle / PAGE, used / PAGE)
}

/// Trims, and checks that nothing was accessed out of order and what is charged.
fn trim_to(runtime: aq_runtime, pages: u64) {
    let (mut used, mut violations) = (0, 0);
    // SAFETY: 1. 2. Locals, or null where it is allowed.
    unsafe {
        assert_eq!(aq_trim(runtime, 0, pages * PAGE, ptr::null_mut()), OK);
        assert_eq!(aq_limit(runtime, 0, ptr::null_mut(), &mut used), OK);
        assert_eq!(aq_sim_violations(runtime, &mut violations, ptr::null_mut()), OK);
    }
    assert_eq!((used / PAGE, violations), (pages, 0));
}

#[test]
fn pages_are_committed_idle_and_released_in_the_order_of_their_work() {
    let (runtime, mut page, mut other) = (runtime(0), 1, NONE);
    let (elastic, address) = reserve(runtime, 64 * PAGE, &mut page).unwrap();
    assert_eq!((page, address % PAGE), (PAGE, 0), "rounded up to the granularity");
    assert_eq!(aq_elastic_commit(elastic, PAGE - 1, 2), OK, "whole pages");
    assert_eq!(aq_elastic_commit(elastic, 3 * PAGE, PAGE), OK);
    assert_eq!(pages(runtime, elastic), ([0, 2, 3, 4], 2, 0, 3));
    assert_eq!(aq_elastic_check(elastic, 0, 2 * PAGE), OK);
    assert_eq!(aq_elastic_check(elastic, PAGE, 5 * PAGE), Status::Uncommitted as i32);
    // SAFETY: 1. Never null, ended by a zero, and valid until this thread's next failure.
    let text = unsafe { CStr::from_ptr(aq_last_error()) }.to_string_lossy();
    assert!(text.contains("2097152 bytes at offset 4194304 are not committed"), "{text}");

    // SAFETY: 1. A local.
    assert_eq!(unsafe { aq_sim_stream_create(runtime, 0, &mut other) }, OK);
    assert_eq!(aq_sim_touch(runtime, 0, NONE, address, 2 * PAGE, AQ_WRITE), OK);
    assert_eq!(aq_sim_stream_wait(runtime, 0, other, NONE), OK);
    assert_eq!(aq_sim_touch(runtime, 0, other, address + 3 * PAGE, PAGE, AQ_WRITE), OK);
    assert_eq!((release(elastic, 0, 2, NONE, 1), release(elastic, 3, 1, other, 1)), (OK, OK));
    assert_eq!(pages(runtime, elastic), ([0; 4], 0, 3, 3));
    // Another need takes them after a wait for their work, and no more than it lacks.
    assert_eq!(aq_elastic_commit(elastic, 8 * PAGE, 6 * PAGE), OK);
    assert_eq!(pages(runtime, elastic), ([8, 14, 0, 0], 1, 2, 8));
    assert_eq!(aq_elastic_commit(elastic, 0, 3 * PAGE), Status::OutOfMemory as i32);
    assert_eq!(pages(runtime, elastic).0, [8, 14, 0, 0]);
    assert_eq!(aq_elastic_commit(elastic, 0, 2 * PAGE), OK);

    // A limit that is lowered while it runs.
    assert_eq!(release(elastic, 1, 12, NONE, 1), OK);
    // SAFETY: 1. Null is allowed.
    assert_eq!(unsafe { aq_set_limit(runtime, 0, 3 * PAGE, ptr::null_mut()) }, OK);
    assert_eq!(aq_sim_stream_synchronize(runtime, 0, NONE), OK);
    assert_eq!(aq_sim_stream_synchronize(runtime, 0, other), OK);
    trim_to(runtime, 3);
    assert_eq!(aq_elastic_commit(elastic, PAGE, 2 * PAGE), Status::OutOfMemory as i32);
    assert_eq!(release(elastic, 0, 64, NONE, 0), OK);
    assert_eq!(pages(runtime, elastic).0, [0; 4]);
    trim_to(runtime, 0);

    // A tensor keeps the reservation. At its end, work on streams that no call named is waited for.
    let mut tensor = NONE;
    // SAFETY: 1. A local.
    assert_eq!(unsafe { aq_elastic_dlpack(elastic, &mut tensor) }, OK);
    let tensor = tensor.cast::<Managed>();
    // SAFETY: 1. It lives until it is deleted, and its shape has one dimension.
    unsafe {
        assert_eq!(((*tensor).data, (*tensor).device, (*tensor).dimensions), (address, [2, 0], 1));
        assert_eq!(((*tensor).element, *(*tensor).shape), ([1, 8, 1, 0], 64 * PAGE as i64));
        assert_eq!((*tensor).zeros, [0; 3], "no strides, no offset, no context");
    }
    assert_eq!(aq_elastic_commit(elastic, 0, PAGE), OK);
    assert_eq!(aq_elastic_destroy(elastic), OK);
    assert_eq!(aq_sim_stream_wait(runtime, 0, other, NONE), OK);
    assert_eq!(aq_sim_touch(runtime, 0, other, address, PAGE, AQ_WRITE), OK);
    trim_to(runtime, 1);
    // SAFETY: 1. Once, and it is not used afterwards.
    unsafe { ((*tensor).deleter)(tensor) };
    trim_to(runtime, 0);
    assert_eq!(aq_runtime_destroy(runtime), OK);
}

/// A `DLManagedTensor`.
#[repr(C)]
struct Managed {
    data: u64,
    device: [i32; 2],
    dimensions: i32,
    element: [u8; 4],
    shape: *const i64,
    zeros: [u64; 3],
    deleter: unsafe extern "C" fn(*mut Managed),
}

#[test]
fn invalid_calls_are_refused_and_change_nothing() {
    let (with, mut page) = (runtime(0), 0);
    let (elastic, _) = reserve(with, 3 * PAGE + 1, &mut page).unwrap();
    assert_eq!(page, PAGE, "the pool's");
    assert_eq!(reserve(with, 0, &mut page), Err(Status::ZeroSize as i32));
    assert_eq!(reserve(with, u64::MAX, &mut page), Err(Status::TooLarge as i32));
    assert_eq!(reserve(999, PAGE, &mut page), Err(Status::BadRuntime as i32));
    assert_eq!(reserve(runtime(AQ_SIM_PLAIN), PAGE, &mut page), Err(Status::Unsupported as i32));
    let (null, mut count) = (Status::Null as i32, 7);
    // SAFETY: 1. 2. Null is refused, and all else are locals.
    unsafe {
        let (no, to) = (ptr::null_mut(), &raw mut page);
        for (page, elastic, address) in [(no, to, to), (to, no, to), (to, to, no)] {
            assert_eq!(aq_elastic_reserve(with, 0, PAGE, page, NONE, elastic, address), null);
        }
        assert_eq!(aq_elastic_committed(elastic, no, 1, &mut count, no), null);
        assert_eq!(aq_elastic_committed(elastic, no, 0, ptr::null_mut(), no), null);
        assert_eq!(aq_elastic_dlpack(elastic, ptr::null_mut()), null);
    }
    assert_eq!((count, page, aq_elastic_commit(elastic, 0, PAGE)), (7, PAGE, OK));
    for (offset, bytes) in [(0, 4 * PAGE), (3 * PAGE + 2, 0), (u64::MAX, 9), (PAGE, u64::MAX)] {
        // SAFETY: 1. The default stream.
        let released =
            [0, 1].map(|i| unsafe { aq_elastic_release(elastic, offset, bytes, NONE, i) });
        let others = [aq_elastic_commit, aq_elastic_check].map(|call| call(elastic, offset, bytes));
        assert_eq!(
            (released, others),
            ([Status::OutOfBounds as i32; 2], [Status::OutOfBounds as i32; 2])
        );
    }
    let unknown = ptr::without_provenance_mut(0x1234);
    assert_eq!(release(elastic, 0, 1, unknown, 1), Status::UnknownStream as i32);
    assert_eq!(pages(with, elastic), ([0, 1, 0, 0], 1, 0, 1));
    assert_eq!(aq_elastic_destroy(elastic), OK);
    for (gone, status) in
        [(elastic, Status::Closed), (0, Status::BadArgument), (!0, Status::BadArgument)]
    {
        // SAFETY: 1. 2. Null is allowed, or locals.
        let (listed, tensor) = unsafe {
            let listed =
                aq_elastic_committed(gone, ptr::null_mut(), 0, &mut count, ptr::null_mut());
            (listed, aq_elastic_dlpack(gone, &mut ptr::null_mut()))
        };
        let commit = aq_elastic_commit(gone, 0, 1);
        let all =
            [commit, aq_elastic_check(gone, 0, 1), release(gone, 0, 1, NONE, 1), listed, tensor];
        assert_eq!((all, aq_elastic_destroy(gone)), ([status as i32; 5], status as i32));
    }
    // A reservation outlives its runtime.
    let (elastic, _) = reserve(with, PAGE, &mut page).unwrap();
    assert_eq!(aq_runtime_destroy(with), OK);
    assert_eq!(aq_elastic_commit(elastic, 0, 1), Status::Closed as i32);
    assert_eq!(aq_elastic_destroy(elastic), OK);
}
