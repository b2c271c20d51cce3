//! Device addresses whose pages get memory, and lose it again.
//!
//! A reservation is a number, as a runtime is. It ends with its destruction, or with the last
//! tensor over its addresses if that is later. Calls for one reservation run one after another: its
//! lock is held by a commit that waits for room. Nothing that gives room takes this lock.
#![expect(unsafe_code, reason = "exports functions to C, and tensors in DLPack's form")]

use crate::{
    device::handle,
    entry::{CallResult, enter, lock, require, write_out, write_out_if_set},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::{Access, DevicePool, Reserved, Stream};
use std::{
    collections::BTreeMap,
    ffi::c_void,
    ops::Range,
    ptr::{self, with_exposed_provenance_mut},
    slice,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The number of a reservation.
pub type aq_elastic = u64;

/// A reservation of addresses.
struct Elastic {
    runtime: aq_runtime,
    /// The index in the runtime.
    device: u32,
    reserved: Mutex<Reserved<u8>>,
}

impl Elastic {
    fn lock(&self) -> MutexGuard<'_, Reserved<u8>> {
        lock(&self.reserved)
    }
}

impl Drop for Elastic {
    fn drop(&mut self) {
        // Work on its tensors is recorded nowhere.
        self.lock().outlive_device_work();
    }
}

/// Live reservations.
static ALL: Mutex<BTreeMap<aq_elastic, Arc<Elastic>>> = Mutex::new(BTreeMap::new());
/// The number of the next one.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn all() -> MutexGuard<'static, BTreeMap<aq_elastic, Arc<Elastic>>> {
    lock(&ALL)
}

fn find(elastic: aq_elastic) -> CallResult<Arc<Elastic>> {
    all().get(&elastic).cloned().ok_or_else(|| none(elastic))
}

#[cold]
fn none(elastic: aq_elastic) -> Failure {
    if elastic == 0 || elastic >= NEXT.load(Ordering::Relaxed) {
        return Failure::new(Status::BadArgument, format!("{elastic} is not a reservation"));
    }
    Failure::new(Status::Closed, format!("reservation {elastic} has been destroyed"))
}

/// Returns a range of bytes. One that overflows ends beyond every reservation.
fn range(offset: u64, bytes: u64) -> Range<usize> {
    offset as usize..offset.saturating_add(bytes) as usize
}

/// Gives idle pages of a device back until its pool holds at most `keep` bytes, as far as their
/// work is done and no other thread uses their reservation. Returns the bytes.
pub(crate) fn release_idle(runtime: aq_runtime, device: u32, pool: &DevicePool, keep: u64) -> u64 {
    let all: Vec<_> = all().values().cloned().collect();
    let these = all.iter().filter(|each| each.runtime == runtime && each.device == device);
    let release = |elastic: &Arc<Elastic>| {
        let excess = pool.stats().physical.saturating_sub(keep);
        let reserved = elastic.reserved.try_lock();
        reserved.map_or(0, |reserved| reserved.release_idle(excess, Some(Instant::now())))
    };
    these.map(release).sum()
}

/// Reserves addresses.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `page`, `elastic` and `address` are null, or point to `uint64_t`s that the caller may read
///    and write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_elastic_reserve(
    runtime: aq_runtime,
    device: u32,
    bytes: u64,
    page: *mut u64,
    stream: *mut c_void,
    elastic: *mut aq_elastic,
    address: *mut u64,
) -> aq_status {
    enter(|| {
        require(page, "page")?;
        require(elastic, "elastic")?;
        require(address, "address")?;
        // SAFETY: 1. Not null, and guaranteed by the caller.
        let step = unsafe { page.read() };
        let reserve = |pool: &DevicePool, stream: &Stream| match step {
            0 => pool.reserve::<u8>(stream, bytes as usize),
            step => pool.reserve_in_steps(stream, bytes as usize, step),
        };
        // SAFETY: 1. Guaranteed by the caller.
        let reserved = unsafe {
            thread_state::with_stream(runtime, device, handle(stream), |_, pool, stream| {
                Ok(reserve(pool, stream)?)
            })
        }?;
        let (step, start) = (reserved.step(), reserved.address());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        all().insert(number, Arc::new(Elastic { runtime, device, reserved: reserved.into() }));
        // SAFETY: 2. Guaranteed by the caller.
        unsafe {
            write_out(page, step, "page")?;
            write_out(elastic, number, "elastic")?;
            write_out(address, start, "address")
        }
    })
}

/// Gives pages memory.
#[unsafe(no_mangle)]
pub extern "C" fn aq_elastic_commit(elastic: aq_elastic, offset: u64, bytes: u64) -> aq_status {
    enter(|| Ok(find(elastic)?.lock().commit(range(offset, bytes))?))
}

/// Takes pages out of use after the work queued on a stream so far: gives their memory back, or
/// makes them idle.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_elastic_release(
    elastic: aq_elastic,
    offset: u64,
    bytes: u64,
    stream: *mut c_void,
    idle: u32,
) -> aq_status {
    enter(|| {
        let elastic = find(elastic)?;
        let (runtime, device, stream) = (elastic.runtime, elastic.device, handle(stream));
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(runtime, device, stream, |_, pool, stream| {
                let mut reserved = elastic.lock();
                reserved.record_use(stream, Access::ReadWrite)?;
                if idle != 0 {
                    reserved.idle(range(offset, bytes))?;
                } else if reserved.decommit(range(offset, bytes))? > 0 {
                    drop(reserved);
                    // What is not found done now goes back later.
                    let _polled = pool.poll();
                }
                Ok(())
            })
        }
    })
}

/// Returns whether a range has memory.
#[unsafe(no_mangle)]
pub extern "C" fn aq_elastic_check(elastic: aq_elastic, offset: u64, bytes: u64) -> aq_status {
    enter(|| Ok(find(elastic)?.lock().slice(range(offset, bytes)).map(drop)?))
}

/// Returns the committed ranges, and the bytes of idle pages.
///
/// # Safety
/// 1. `ranges` is null, or points to twice `capacity` `uint64_t`s that the caller may write.
/// 2. `count` and `idle` are null, or point to a `size_t` and a `uint64_t` that the caller may
///    write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_elastic_committed(
    elastic: aq_elastic,
    ranges: *mut u64,
    capacity: usize,
    count: *mut usize,
    idle: *mut u64,
) -> aq_status {
    enter(|| {
        require(count, "count")?;
        let elastic = find(elastic)?;
        let (found, idle_bytes) = {
            let reserved = elastic.lock();
            (reserved.committed(), reserved.idle_bytes())
        };
        if capacity > 0 {
            require(ranges, "ranges")?;
            // SAFETY: 1. Guaranteed by the caller.
            let to = unsafe { slice::from_raw_parts_mut(ranges.cast::<[u64; 2]>(), capacity) };
            for (to, range) in to.iter_mut().zip(&found) {
                *to = [range.start as u64, range.end as u64];
            }
        }
        // SAFETY: 2. Guaranteed by the caller.
        unsafe {
            write_out_if_set(idle, idle_bytes);
            write_out(count, found.len(), "count")
        }
    })
}

/// A `DLManagedTensor`, and behind it what it keeps.
#[repr(C)]
struct ManagedTensor {
    data: *mut c_void,
    /// `kDLCUDA`, and the ordinal.
    device: [i32; 2],
    dimensions: i32,
    /// `kDLUInt` and 8 bits.
    element: [u8; 2],
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut ManagedTensor),
    bytes: i64,
    elastic: Arc<Elastic>,
}

/// Ends a tensor.
///
/// # Safety
/// 1. `tensor` comes from [`aq_elastic_dlpack`], and this is called once for it.
unsafe extern "C" fn delete(tensor: *mut ManagedTensor) {
    // SAFETY: 1. Guaranteed by the caller: it comes from `Box::into_raw`.
    let tensor = unsafe { Box::from_raw(tensor) };
    let _status = enter(|| {
        drop(tensor);
        Ok(())
    });
}

/// Makes a tensor over all addresses.
///
/// # Safety
/// 1. `tensor` is null, or points to a `void *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_elastic_dlpack(
    elastic: aq_elastic,
    tensor: *mut *mut c_void,
) -> aq_status {
    enter(|| {
        require(tensor, "tensor")?;
        let elastic = find(elastic)?;
        let (address, device, bytes) = {
            let reserved = elastic.lock();
            (reserved.address(), reserved.device(), reserved.max_len())
        };
        let made = Box::into_raw(Box::new(ManagedTensor {
            data: with_exposed_provenance_mut(address as usize),
            device: [2, device.0 as i32],
            dimensions: 1,
            element: [1, 8],
            lanes: 1,
            shape: ptr::null(),
            strides: ptr::null(),
            byte_offset: 0,
            context: ptr::null_mut(),
            deleter: delete,
            bytes: bytes as i64,
            elastic,
        }));
        // SAFETY: 1. It was allocated above, and no reference to it exists. 2. Guaranteed by the
        // caller.
        unsafe {
            (*made).shape = &raw const (*made).bytes;
            write_out(tensor, made.cast(), "tensor")
        }
    })
}

/// Destroys a reservation.
#[unsafe(no_mangle)]
pub extern "C" fn aq_elastic_destroy(elastic: aq_elastic) -> aq_status {
    enter(|| {
        let removed = all().remove(&elastic);
        // It may be the last reference: not under the lock.
        removed.map(drop).ok_or_else(|| none(elastic))
    })
}
