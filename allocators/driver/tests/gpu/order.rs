//! Tests of devices, streams and events, and of the order that they establish.

use super::support::{DEVICE, OwnStream, cuda, driver, read_back, write};
use aquifer_driver::{Call, CaptureMode, Driver, Relaxed};
use std::sync::Arc;

#[test]
fn a_device_tells_what_it_is_without_taking_a_context() {
    let Some(cuda) = cuda() else { return };
    let driver: Arc<dyn Driver> = cuda.clone();
    assert!(driver.device_count().unwrap() >= 1);
    assert!(driver.driver_version().unwrap() >= 12_000);
    let info = driver.device_info(DEVICE).unwrap();
    assert!(!info.name.is_empty() && !info.name.contains('\0'), "{info:?}");
    assert!(info.memory > 1 << 30 && info.compute_capability.0 >= 5, "{info:?}");
    let pci = info.pci_address.clone().unwrap();
    assert!(pci.len() >= 12 && pci == pci.to_lowercase() && pci.ends_with(".0"), "{pci}");
    if info.virtual_memory {
        assert!(info.granularity.is_power_of_two() && info.granularity >= 4096, "{info:?}");
    }
    assert!(!cuda.holds_context(DEVICE));

    let memory = driver.memory_info(DEVICE).unwrap();
    assert!(memory.free <= memory.total && memory.total <= info.memory);
    assert!(cuda.holds_context(DEVICE));
    driver.device_synchronize(DEVICE).unwrap();
    assert_eq!(driver.name(), "cuda");
    assert!(driver.observer().is_none());
    println!("{info:?}");
}

#[test]
fn streams_have_ids_that_never_come_back() {
    let Some(driver) = driver() else { return };
    let mut ids = Vec::new();
    for priority in [0, -1, i32::MIN, i32::MAX] {
        let stream = driver.stream_create(DEVICE, priority).unwrap();
        ids.push(driver.stream_id(stream).unwrap());
        driver.stream_synchronize(stream).unwrap();
        assert!(driver.stream_query(stream).unwrap());
        // SAFETY: 1. the handle was private to this loop.
        unsafe { driver.stream_destroy(stream) }.unwrap();
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[test]
fn not_ready_is_an_answer() {
    const BYTES: u64 = 1 << 30;
    let Some(driver) = driver() else { return };
    let stream = OwnStream::new(&driver);
    let block = driver.mem_alloc(DEVICE, BYTES).unwrap();
    let event = driver.event_create(DEVICE).unwrap();
    assert!(driver.event_query(event).unwrap(), "an event never recorded has passed");
    for byte in 0..32 {
        // SAFETY: 1. the block lives until the stream is idle. 2. one stream only.
        unsafe { driver.fill(stream.raw, block, byte, BYTES) }.unwrap();
    }
    driver.event_record(event, stream.raw).unwrap();
    // 32 GiB of fills take milliseconds, and the two queries a microsecond.
    assert!(!driver.event_query(event).unwrap());
    assert!(!driver.stream_query(stream.raw).unwrap());
    stream.synchronize();
    assert!(driver.event_query(event).unwrap() && driver.stream_query(stream.raw).unwrap());
    // SAFETY: 1. both are this test's own, and the stream is idle.
    unsafe {
        driver.event_destroy(event).unwrap();
        driver.mem_free(DEVICE, block).unwrap();
    }
}

#[test]
fn the_capture_mode_is_exchanged_per_thread() {
    let Some(driver) = driver() else { return };
    assert_eq!(
        driver.exchange_capture_mode(CaptureMode::ThreadLocal).unwrap(),
        CaptureMode::Global
    );
    {
        let _relaxed = Relaxed::enter(&*driver);
        let elsewhere = std::thread::scope(|scope| {
            scope
                .spawn(|| driver.exchange_capture_mode(CaptureMode::Global).unwrap())
                .join()
                .unwrap()
        });
        assert_eq!(elsewhere, CaptureMode::Global);
        assert_eq!(
            driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap(),
            CaptureMode::Relaxed
        );
    }
    assert_eq!(
        driver.exchange_capture_mode(CaptureMode::Global).unwrap(),
        CaptureMode::ThreadLocal
    );
}

#[test]
fn each_call_is_counted_once_and_made_from_any_thread() {
    let Some(driver) = driver() else { return };
    const THREADS: u64 = 4;
    std::thread::scope(|scope| {
        for byte in 1..=THREADS as u8 {
            let driver = &driver;
            scope.spawn(move || {
                let stream = OwnStream::new(driver);
                let block = driver.mem_alloc(DEVICE, 4096).unwrap();
                write(driver, stream.raw, block, &[byte; 4096]);
                assert_eq!(read_back(driver, stream.raw, block, 4096), vec![byte; 4096]);
                // SAFETY: 1. the block is this thread's own, and its stream idle.
                unsafe { driver.mem_free(DEVICE, block) }.unwrap();
            });
        }
    });
    for call in
        [Call::StreamCreate, Call::StreamDestroy, Call::MemAlloc, Call::MemFree, Call::CopyToDevice]
    {
        assert_eq!(driver.calls().get(call), THREADS, "{}", call.name());
    }
    assert_eq!(driver.calls().get(Call::EventCreate), 0);
}

#[test]
fn a_context_that_another_library_made_current_stays_current() {
    use cudarc::driver::{CudaContext, result, sys};
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> u32;
    let Some(driver) = driver() else { return };
    // A thread without a context keeps the one that it is given.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(result::ctx::get_current().unwrap().is_none());
            driver.memory_info(DEVICE).unwrap();
            assert!(result::ctx::get_current().unwrap().is_some());
        });
        scope.spawn(|| {
            let primary = CudaContext::new(0).unwrap();
            let mut context = std::ptr::null_mut();
            // SAFETY: 1. the type is the one that cuda.h declares for this symbol. 2. `context` is
            // writable. 3. this thread may release it.
            let other = unsafe {
                let create = *sys::culib().get::<Create>(b"cuCtxCreate_v2\0").unwrap();
                assert_eq!(create(&raw mut context, 0, primary.cu_device()), 0);
                CudaContext::from_raw_context(0, primary.cu_device(), context).unwrap()
            };
            driver.memory_info(DEVICE).unwrap();
            assert_eq!(result::ctx::get_current().unwrap(), Some(other.cu_ctx()));
            assert_ne!(primary.cu_ctx(), other.cu_ctx());
            primary.bind_to_thread().unwrap();
        });
    });
}
