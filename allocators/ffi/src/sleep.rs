//! What a process of PyTorch gives back while it sleeps: the memory of regions, by their tags.
//! Several tags, on all devices, are parked or resumed together: all of them, or none.
#![expect(unsafe_code, reason = "exports functions to C, and parks what PyTorch holds")]

use crate::{
    backup::BackupMemory,
    entry::{CallResult, enter, lock, null, write_out_if_set},
    process::default_runtime,
    region::read_tag,
    status::{Failure, Status, aq_status},
    table::SharedRuntime,
    thread_state,
};
use aquifer::{MemoryError, Park, Tag};
use std::{
    env,
    ffi::{CStr, OsStr, c_char, c_int},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    slice,
    sync::Mutex,
};

/// The contents are dropped.
pub const AQ_KEEP_NONE: u32 = 0;
/// The contents are kept in pageable host memory.
pub const AQ_KEEP_PAGEABLE: u32 = 1;
/// The contents are kept in pinned host memory, or in pageable memory where that is refused.
pub const AQ_KEEP_PINNED: u32 = 2;
/// The contents are kept in files.
pub const AQ_KEEP_DISK: u32 = 3;

/// Held while memory is parked or resumed.
static SLEEP_LOCK: Mutex<()> = Mutex::new(());

/// Reads a list of names.
///
/// # Safety
/// 1. `tags` is null, or points to `count` pointers, each as for [`read_tag`].
unsafe fn read_tags(tags: *const *const c_char, count: usize) -> CallResult<Vec<Tag>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if tags.is_null() {
        return Err(null("tags"));
    }
    // SAFETY: 1. Guaranteed by the caller.
    let names = unsafe { slice::from_raw_parts(tags, count) };
    let tag = |&name: &*const c_char| {
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { read_tag(name) }?.ok_or_else(|| null("a tag"))
    };
    names.iter().map(tag).collect()
}

/// Returns how memory is parked, and where its contents go.
fn how(
    shared: &SharedRuntime,
    device: usize,
    keep: u32,
    folder: &Path,
) -> CallResult<(Park, Option<BackupMemory>)> {
    let memory = match keep {
        AQ_KEEP_NONE => None,
        AQ_KEEP_PAGEABLE => Some(BackupMemory::new(None, None)),
        AQ_KEEP_PINNED => {
            let pinned = shared.runtime.pinned_near(device).allocator();
            Some(BackupMemory::new(Some(pinned), None))
        }
        AQ_KEEP_DISK => Some(BackupMemory::new(None, Some(folder.to_owned()))),
        other => {
            let text = format!(
                "keep is {other}; it can be AQ_KEEP_NONE (0), AQ_KEEP_PAGEABLE (1), \
                 AQ_KEEP_PINNED (2) or AQ_KEEP_DISK (3)"
            );
            return Err(Failure::new(Status::BadArgument, text));
        }
    };
    let how = memory.clone().map_or_else(Park::discard, Park::save_in);
    // PyTorch does not report on which streams a live tensor is used.
    Ok((how.after_all_work(), memory))
}

/// Returns why a tag is not parked.
#[cold]
fn refusal(error: MemoryError) -> Failure {
    match error {
        // Of no stream in particular.
        MemoryError::Capturing { stream: 0 } => {
            let text = "a graph is captured, or a pool is open: nothing is parked until its end";
            Failure::new(Status::Capturing, text)
        }
        other => other.into(),
    }
}

/// Parks the memory of tags on all devices.
///
/// # Safety
/// 1. `tags` is null, or points to `count` texts that each end with a zero byte.
/// 2. `keep` is null, or points to `count` numbers.
/// 3. `folder` is null, or points to a text that ends with a zero byte.
/// 4. `released` is null, or points to a `uint64_t` that the caller may write.
/// 5. No work that uses the memory is queued from this call on, until it is resumed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pause(
    tags: *const *const c_char,
    keep: *const u32,
    count: usize,
    folder: *const c_char,
    released: *mut u64,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let tags = unsafe { read_tags(tags, count) }?;
        if keep.is_null() && count > 0 {
            return Err(null("keep"));
        }
        // SAFETY: 2. Guaranteed by the caller.
        let keep = if count == 0 { &[] } else { unsafe { slice::from_raw_parts(keep, count) } };
        let folder: PathBuf = match folder.is_null() {
            true => env::temp_dir(),
            // SAFETY: 3. Guaranteed by the caller.
            false => OsStr::from_bytes(unsafe { CStr::from_ptr(folder) }.to_bytes()).into(),
        };
        let _sleep = lock(&SLEEP_LOCK);
        let bytes = thread_state::with(default_runtime()?, |shared| {
            let mut pending = Vec::new();
            for (device, pool) in shared.runtime.devices().iter().enumerate() {
                for (&tag, &keep) in tags.iter().zip(keep) {
                    let (how, memory) = how(shared, device, keep, &folder)?;
                    if !pool.is_parked(tag) {
                        // SAFETY: 1. and 2. of `DevicePool::begin_park`: 5. Guaranteed by the
                        // caller.
                        let begun = unsafe { pool.begin_park(tag, how) };
                        pending.push(begun.map_err(refusal)?);
                        memory.map_or(Ok(()), |memory| memory.sync())?;
                    }
                }
            }
            Ok(pending.into_iter().map(|pending| pending.commit().released).sum::<u64>())
        })?;
        // SAFETY: 4. Guaranteed by the caller.
        unsafe { write_out_if_set(released, bytes) };
        Ok(())
    })
}

/// Resumes the memory of tags on all devices.
///
/// # Safety
/// 1. `tags` is null, or points to `count` texts that each end with a zero byte.
/// 2. `taken` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_resume(
    tags: *const *const c_char,
    count: usize,
    retain: c_int,
    taken: *mut u64,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let tags = unsafe { read_tags(tags, count) }?;
        let _sleep = lock(&SLEEP_LOCK);
        let bytes = thread_state::with(default_runtime()?, |shared| {
            let mut pending = Vec::new();
            for pool in shared.runtime.devices() {
                for &tag in &tags {
                    let begun = pool.begin_resume(tag, None)?;
                    pending.push(if retain == 0 { begun } else { begun.keep_saved() });
                }
            }
            Ok(pending.into_iter().map(|pending| pending.commit().taken).sum::<u64>())
        })?;
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out_if_set(taken, bytes) };
        Ok(())
    })
}

/// Returns the physical memory that a tag's regions hold on all devices, and whether any of it is
/// parked.
///
/// # Safety
/// 1. `tag` is null, or points to a text that ends with a zero byte.
/// 2. `held` and `paused` are null, or point to a `uint64_t` and an `int` that the caller may
///    write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_tag(
    tag: *const c_char,
    held: *mut u64,
    paused: *mut c_int,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let tag = unsafe { read_tag(tag) }?.ok_or_else(|| null("tag"))?;
        thread_state::with(default_runtime()?, |shared| {
            let pools = shared.runtime.devices();
            let bytes = pools.iter().map(|pool| pool.parkable_bytes(tag)).sum::<u64>();
            // SAFETY: 2. Guaranteed by the caller.
            unsafe {
                write_out_if_set(held, bytes);
                write_out_if_set(paused, c_int::from(pools.iter().any(|pool| pool.is_parked(tag))));
            }
            Ok(())
        })
    })
}
