//! Where the contents of paused memory are kept, and how they are read.
#![expect(unsafe_code, reason = "exports functions to C, and maps memory and files")]

use crate::{
    entry::{CallResult, enter, lock, require, write_out},
    process::default_runtime,
    status::aq_status,
    thread_state,
};
use allocator_api2::alloc::{AllocError, Allocator, Global};
use aquifer::{MemoryError, PinnedAllocator, error::SystemError};
use nix::{
    fcntl::posix_fallocate,
    sys::mman::{
        MapFlags, MmapAdvise, MsFlags, ProtFlags, madvise, mmap, mmap_anonymous, msync, munmap,
    },
};
use std::{
    alloc::Layout,
    collections::HashMap,
    ffi::{c_int, c_void},
    fs::{self, File},
    io::{self, ErrorKind},
    num::NonZeroUsize,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process,
    ptr::{self, NonNull},
    slice,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// Blocks of this many bytes or more are mapped alone, so that their free is the kernel's at once.
/// `malloc` keeps what is freed below its threshold, which it raises up to 32 MiB.
const MAPPED: usize = 128 << 10;

/// Host memory for contents: pinned, or pageable where that is refused, or mapped from files.
#[derive(Clone)]
pub(crate) struct BackupMemory {
    pinned: Option<PinnedAllocator>,
    /// Where the files of mapped blocks are. `None`: mapped blocks are anonymous memory.
    folder: Option<PathBuf>,
    /// The live blocks that are not pinned.
    unpinned: Arc<Mutex<HashMap<usize, Layout>>>,
}

impl BackupMemory {
    pub(crate) fn new(pinned: Option<PinnedAllocator>, folder: Option<PathBuf>) -> Self {
        Self { pinned, folder, unpinned: Arc::default() }
    }

    fn unpinned(&self) -> MutexGuard<'_, HashMap<usize, Layout>> {
        lock(&self.unpinned)
    }

    /// Writes blocks of files to the disk (`msync`), and takes them out of this process' resident
    /// memory (`madvise`). Blocks. The caller keeps all blocks alive meanwhile.
    ///
    /// # Errors
    /// The kernel's, as of a disk that fails.
    pub(crate) fn sync(&self) -> CallResult {
        if self.folder.is_none() {
            return Ok(());
        }
        let blocks: Vec<_> = self.unpinned().iter().map(|(&start, &size)| (start, size)).collect();
        for (start, layout) in blocks.into_iter().filter(|(_, layout)| is_mapped(*layout)) {
            let Some(start) = NonNull::new(ptr::with_exposed_provenance_mut(start)) else {
                continue;
            };
            // SAFETY: 1. the block is mapped, and lives as long as the caller keeps it. Its file
            // has the contents: pages of it that are dropped are read again.
            let synced = unsafe {
                msync(start, layout.size(), MsFlags::MS_SYNC)
                    .and_then(|()| madvise(start, layout.size(), MmapAdvise::MADV_DONTNEED))
            };
            synced.map_err(|errno| {
                MemoryError::System(SystemError { call: "msync", errno: errno as i32 })
            })?;
        }
        Ok(())
    }

    fn map(&self, bytes: usize) -> io::Result<NonNull<u8>> {
        let len = NonZeroUsize::new(bytes).ok_or(ErrorKind::InvalidInput)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let start = match &self.folder {
            // SAFETY: 1. no address is given, so no mapping is replaced.
            None => unsafe { mmap_anonymous(None, len, access, MapFlags::MAP_PRIVATE) }?,
            Some(folder) => {
                let file = unnamed_file(folder, bytes)?;
                // SAFETY: 1. no address is given, so no mapping is replaced. 2. nothing else has
                // the file, so it is not truncated.
                unsafe { mmap(None, len, access, MapFlags::MAP_SHARED, file, 0) }?
            }
        };
        Ok(start.cast())
    }
}

fn is_mapped(layout: Layout) -> bool {
    layout.size() >= MAPPED && layout.align() <= 4096
}

/// Creates a file without a name, whose disk space is freed with its last mapping, also if the
/// process is killed.
fn unnamed_file(folder: &Path, bytes: usize) -> io::Result<File> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let file = loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".aquifer-{}-{number}", process::id()));
        match File::options().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            // Of a process with the same number in another container.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => {
                let file = file?;
                fs::remove_file(path)?;
                break file;
            }
        }
    };
    // Otherwise a full disk would be a SIGBUS at the first write.
    posix_fallocate(&file, 0, i64::try_from(bytes).map_err(io::Error::other)?)?;
    Ok(file)
}

// SAFETY: 1. Each block comes from one of three allocators, and returns to that one: those that are
// not pinned are in the table as long as they live, so no pinned block has their address, and their
// layout says whether they are mapped. 2. Clones share all of it.
unsafe impl Allocator for BackupMemory {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if let Some(Ok(block)) = self.pinned.map(|pinned| pinned.allocate(layout)) {
            return Ok(block);
        }
        let start = match is_mapped(layout) {
            true => self.map(layout.size()).map_err(|_| AllocError)?,
            false => Global.allocate(layout)?.cast(),
        };
        self.unpinned().insert(start.as_ptr().expose_provenance(), layout);
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
        let unpinned = self.unpinned().remove(&start.addr().get()).is_some();
        // SAFETY: 1. The block comes from this allocator, with this layout. 2. Guaranteed by the
        // caller: nothing uses it any more.
        unsafe {
            match &self.pinned {
                Some(pinned) if !unpinned => pinned.deallocate(start, layout),
                // Of a whole mapping this cannot fail.
                _ if is_mapped(layout) => drop(munmap(start.cast(), layout.size())),
                _ => Global.deallocate(start, layout),
            }
        }
    }
}

/// Copies the contents that a pause has kept of a range.
///
/// # Safety
/// 1. `into` is null, or points to `bytes` bytes that the caller may write.
/// 2. `found` is null, or points to an `int` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_backup(
    memory: *const c_void,
    bytes: usize,
    into: *mut c_void,
    found: *mut c_int,
) -> aq_status {
    enter(|| {
        require(into, "into")?;
        require(found, "found")?;
        // SAFETY: 1. Not null, and guaranteed by the caller.
        let into = unsafe { slice::from_raw_parts_mut(into.cast::<u8>(), bytes) };
        let is_found = thread_state::with(default_runtime()?, |shared| {
            let mut pools = shared.runtime.devices().iter();
            Ok(pools.any(|pool| pool.read_saved(memory.addr() as u64, into)))
        })?;
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out(found, c_int::from(is_found), "found") }
    })
}
