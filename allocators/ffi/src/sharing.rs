//! Blocks of PyTorch for other processes, by handles that PyTorch passes on as bytes.
//!
//! - A handle names the process that has shared the block, by an abstract Unix socket, and the
//!   block within it. It holds no descriptor: the receiver connects and asks for them.
//! - The socket and the one thread that serves it exist from the first share on. It answers
//!   processes of the same user only. The kernel removes the socket with the process.
//! - A block is shared until it is freed. PyTorch frees it when no process uses it any more.
//! - A forked child has a socket of its own as soon as it shares a block itself.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{CallResult, enter, lock, require, write_out},
    graphs::{aq_torch_block, live_blocks},
    process::{default_runtime, device_of},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::device::{ReceivedBlock, ShareError, ShareServer};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    fs::File,
    io::{self, Read},
    mem::ManuallyDrop,
    os::{linux::net::SocketAddrExt, unix::net::SocketAddr},
    process,
    ptr::with_exposed_provenance_mut,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Bytes of a handle.
pub const AQ_TORCH_SHARE_BYTES: u32 = 32;
const HANDLE: usize = AQ_TORCH_SHARE_BYTES as usize;
/// The first bytes of a handle. PyTorch's own allocator takes the first for a version from the
/// future, and refuses it with that text.
const MARK: [u8; 4] = [0xaf, b'a', b'q', 1];
/// How long a receiver waits for the server, which may be serving others.
const RECEIVER_PATIENCE: Duration = Duration::from_secs(30);

/// The blocks that this process shares.
static SHARED: Mutex<Option<Shares>> = Mutex::new(None);
/// The number of blocks in `SHARED`. Usually 0, which saves the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The process whose blocks are in `SHARED`. A forked child has a copy, whose lock may be held by a
/// thread that the child does not have.
static OWNER: AtomicU32 = AtomicU32::new(0);
/// The blocks of other processes that are mapped here, by address.
static RECEIVED: Mutex<Option<HashMap<u64, ReceivedBlock>>> = Mutex::new(None);

struct Shares {
    name: ServerName,
    /// Serves the blocks, each under its number.
    server: Arc<ShareServer>,
    /// The number of the next block. Numbers are not reused.
    next: u64,
    /// By address.
    numbers: HashMap<u64, u64>,
}

/// The name of a process's socket: its id, and random bytes that no earlier process of this id had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ServerName {
    process: u32,
    random: [u8; 16],
}

/// What a handle says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ShareHandle {
    server: ServerName,
    number: u64,
}

impl ServerName {
    fn address(&self) -> io::Result<SocketAddr> {
        let random: String = self.random.iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddr::from_abstract_name(format!("aquifer-share-{}-{random}", self.process))
    }

    /// Opens the socket of this process, and starts its thread.
    fn start() -> Result<(Self, ShareServer), ShareError> {
        let mut random = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let name = Self { process: process::id(), random };
        Ok((name, ShareServer::bind(&name.address()?)?))
    }
}

impl ShareHandle {
    fn encode(self) -> [u8; HANDLE] {
        let mut bytes = [0; HANDLE];
        bytes[..4].copy_from_slice(&MARK);
        bytes[4..8].copy_from_slice(&self.server.process.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.server.random);
        bytes[24..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MARK).filter(|_| bytes.len() == HANDLE)?;
        let (process, rest) = rest.split_first_chunk()?;
        let (random, rest) = rest.split_first_chunk()?;
        let (number, _) = rest.split_first_chunk()?;
        let server = ServerName { process: u32::from_le_bytes(*process), random: *random };
        Some(Self { server, number: u64::from_le_bytes(*number) })
    }
}

/// Returns whether any block is shared.
#[inline]
pub(crate) fn any() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Ends the share of a block that is about to be freed.
#[cold]
pub(crate) fn forget(address: u64) {
    if OWNER.load(Ordering::Relaxed) != process::id() {
        return;
    }
    let removed = lock(&SHARED).as_mut().and_then(|shares| {
        let number = shares.numbers.remove(&address)?;
        Some((shares.server.clone(), number))
    });
    if let Some((server, number)) = removed {
        COUNT.fetch_sub(1, Ordering::Release);
        // It may call the driver: not under the lock.
        let _withdrawn = server.withdraw(&number.to_string());
    }
}

/// Returns the device and the address of the live block that contains `address`.
fn block_around(runtime: aq_runtime, address: u64) -> CallResult<(u32, u64)> {
    let (exact, devices) = thread_state::with(runtime, |shared| {
        let pools = shared.runtime.devices();
        Ok((pools.iter().position(|pool| pool.share_raw(address).is_ok()), pools.len()))
    })?;
    if let Some(device) = exact {
        return Ok((device as u32, address));
    }
    for device in 0..devices as u32 {
        let blocks = live_blocks(runtime, device)?;
        let around = |block: &aq_torch_block| {
            address.checked_sub(block.address).is_some_and(|offset| offset < block.bytes)
        };
        if let Some(found) = blocks.into_iter().find(around) {
            return Ok((device, found.address));
        }
    }
    Err(aquifer::MemoryError::ForeignBlock { address }.into())
}

/// Shares the block at `address`, unless it is shared already, and returns its handle.
fn share(runtime: aq_runtime, device: u32, address: u64) -> CallResult<ShareHandle> {
    thread_state::with(runtime, |shared| {
        let pool = shared.pool(device)?;
        let block = pool.share_raw(address)?;
        let mut all = lock(&SHARED);
        // After a fork, the blocks are the parent's, and so is the thread.
        if all.as_ref().is_none_or(|shares| shares.name.process != process::id()) {
            let (name, server) = ServerName::start()?;
            let (server, numbers) = (Arc::new(server), HashMap::new());
            // The parent's handles are none here.
            let _inherited =
                ManuallyDrop::new(all.replace(Shares { name, server, next: 1, numbers }));
            COUNT.store(0, Ordering::Release);
            OWNER.store(process::id(), Ordering::Relaxed);
        }
        let Some(shares) = all.as_mut() else {
            return Err(Failure::new(Status::Other, "no table of shared blocks"));
        };
        let server = shares.name;
        if let Some(&number) = shares.numbers.get(&address) {
            return Ok(ShareHandle { server, number });
        }
        let number = shares.next;
        let prepared = pool.share(&block, &number.to_string())?;
        shares.next += 1;
        shares.numbers.insert(address, number);
        shares.server.serve(prepared);
        COUNT.fetch_add(1, Ordering::Release);
        Ok(ShareHandle { server, number })
    })
}

/// Returns the failure to open a block, in the terms of the process that has shared it.
fn refused(process: u32, error: ShareError) -> Failure {
    let (status, text) = match error {
        ShareError::NoServer(_) => {
            (Status::Closed, "has ended (or runs in another network namespace)")
        }
        ShareError::TimedOut => (Status::TimedOut, "does not answer"),
        ShareError::NotServed { .. } => {
            let text = format!("process {process} has freed the memory that it had shared");
            return Failure::new(Status::ForeignBlock, text);
        }
        error => return error.into(),
    };
    Failure::new(status, format!("process {process}, which has shared the memory, {text}"))
}

/// Shares the block around an address.
///
/// # Safety
/// 1. `handle` is null, or points to `AQ_TORCH_SHARE_BYTES` bytes that the caller may write.
/// 2. `offset` is null, or points to a `size_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_share(
    memory: *mut c_void,
    handle: *mut c_void,
    offset: *mut usize,
) -> aq_status {
    enter(|| {
        require(handle, "handle")?;
        require(offset, "offset")?;
        let (runtime, address) = (default_runtime()?, memory.addr() as u64);
        let (device, base) = block_around(runtime, address)?;
        let encoded = share(runtime, device, base)?.encode();
        // SAFETY: 1. Guaranteed by the caller. 2. `encoded` is a local, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(encoded.as_ptr(), handle.cast::<u8>(), HANDLE) };
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(offset, (address - base) as usize, "offset") }
    })
}

/// Maps a block that another process has shared.
///
/// # Safety
/// 1. `handle` is null, or points to `bytes` bytes.
/// 2. `memory` is null, or points to a `void *` that the caller may write.
/// 3. Work on the memory is ordered with that of the process that has shared it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_receive(
    device: c_int,
    handle: *const c_void,
    bytes: usize,
    memory: *mut *mut c_void,
) -> aq_status {
    enter(|| {
        require(handle.cast_mut(), "handle")?;
        require(memory, "memory")?;
        // SAFETY: 1. Guaranteed by the caller.
        let handle = unsafe { std::slice::from_raw_parts(handle.cast::<u8>(), bytes) };
        let handle = ShareHandle::decode(handle).ok_or_else(|| {
            let text = "the memory was not shared by aquifer: the process that sends it uses \
                        another allocator or another version";
            Failure::new(Status::BadArgument, text)
        })?;
        let (runtime, device) = (default_runtime()?, device_of(device)?);
        let ShareHandle { server, number } = handle;
        let (address, name) = (server.address().map_err(ShareError::Io)?, number.to_string());
        // SAFETY: 1. The legacy default stream always exists.
        let received = unsafe {
            thread_state::with_stream(runtime, device, 0, |_, pool, stream| {
                // SAFETY: 1. 2. Guaranteed by the caller. PyTorch frees a shared block when no
                // process uses it any more.
                let opened = pool.open_shared(stream, &address, &name, RECEIVER_PATIENCE);
                opened.map_err(|error| refused(server.process, error))
            })
        }?;
        let address = received.address();
        let before = lock(&RECEIVED).get_or_insert_default().insert(address, received);
        debug_assert!(before.is_none(), "two mappings at one address");
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(memory, with_exposed_provenance_mut(address as usize), "memory") }
    })
}

/// Unmaps a block that another process has shared.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_close(memory: *mut c_void) -> aq_status {
    enter(|| {
        let address = memory.addr() as u64;
        let received = lock(&RECEIVED).as_mut().and_then(|all| all.remove(&address));
        let received = received.ok_or(aquifer::MemoryError::ForeignBlock { address })?;
        match received.close() {
            // While a graph is captured it is unmapped later. The driver of a process that ends has
            // unmapped it already.
            Ok(_) => Ok(()),
            Err(aquifer::MemoryError::Driver(error)) if error.is_driver_gone() => Ok(()),
            Err(error) => Err(error.into()),
        }
    })
}
