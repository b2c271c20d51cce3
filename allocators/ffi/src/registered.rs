//! Registered memory for PyTorch's `MemPools`, over the process's runtime. PyTorch's functions have
//! no argument for a context, so each of 16 pools has two functions of its own.
#![expect(unsafe_code, reason = "exports functions to C, and calls those of a transport")]

use crate::{
    device::handle,
    entry::{CallResult, enter, lock, null, require, write_out, write_out_if_set},
    process::{default_runtime, device_of},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::{
    DeviceRange, MemoryError, Opaque, RegisteredDevicePool, Request,
    device::{AddressRegistration, Registrar},
    driver::ExportTypes,
};
use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Registers memory, and returns 0 or a code: `ncclCommRegister` is one.
pub type aq_register_memory =
    unsafe extern "C" fn(*mut c_void, *mut c_void, usize, *mut *mut c_void) -> c_int;
/// Ends a registration by its handle, and returns 0 or a code: `ncclCommDeregister` is one.
pub type aq_unregister_memory = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
/// What `aq_defer` calls later.
pub type aq_call = unsafe extern "C" fn(*mut c_void) -> c_int;
/// Has a function called later: `Py_AddPendingCall` is one.
pub type aq_defer = unsafe extern "C" fn(aq_call, *mut c_void) -> c_int;

/// Maximum number of pools at a time.
const POOLS: usize = 16;

type Slot = Mutex<Option<Arc<Pool>>>;
static SLOTS: [Slot; POOLS] = [const { Mutex::new(None) }; POOLS];
static NEXT: AtomicU64 = AtomicU64::new(1);

struct Pool {
    /// Its slot, and above it a number that is not reused.
    id: u64,
    runtime: aq_runtime,
    device: u32,
    memory: RegisteredDevicePool<Transport>,
    closed: AtomicBool,
}

/// The caller's functions, or the caller itself.
#[derive(Debug)]
struct Transport {
    register: Option<aq_register_memory>,
    unregister: Option<aq_unregister_memory>,
    /// The address of the functions' first argument.
    context: usize,
    export: ExportTypes,
    deferred: OnceLock<(aq_defer, aq_call, u64)>,
    /// Bytes and state by address.
    chunks: Mutex<BTreeMap<u64, (u64, ChunkState)>>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum ChunkState {
    Used,
    /// It has no part any more, and the caller has not unregistered it.
    Leaving,
    Unregistered,
}

impl Registrar for Transport {
    type Handle = usize;

    fn register(&self, memory: &AddressRegistration) -> Result<usize, i32> {
        let DeviceRange { address, bytes, .. } = memory.range();
        let (mut handle, context) = (null_mut(), with_exposed_provenance_mut(self.context));
        let start = with_exposed_provenance_mut(address as usize);
        // SAFETY: 1. Guaranteed by the caller of `aq_registered_create`. 2. The memory does not
        // move until `unregister`. 3. A local.
        let registered = self
            .register
            .map_or(0, |f| unsafe { f(context, start, bytes as usize, &raw mut handle) });
        match registered {
            0 => {
                lock(&self.chunks).insert(address, (bytes, ChunkState::Used));
                Ok(handle.expose_provenance())
            }
            code => Err(code),
        }
    }

    fn export(&self) -> ExportTypes {
        self.export
    }

    fn unregister(&self, memory: &AddressRegistration, handle: &usize) -> Result<(), i32> {
        let address = memory.range().address;
        if let Some(&(defer, call, id)) = self.deferred.get() {
            {
                let mut chunks = lock(&self.chunks);
                match chunks.get_mut(&address) {
                    Some((_, state)) if *state != ChunkState::Unregistered => {
                        *state = ChunkState::Leaving;
                    }
                    _ => {
                        chunks.remove(&address);
                        return Ok(());
                    }
                }
            }
            // What is refused is asked again at the next allocation or free.
            // SAFETY: 1. Guaranteed by the caller of `aq_registered_defer`.
            unsafe { defer(call, with_exposed_provenance_mut(id as usize)) };
            return Err(0);
        }
        let (context, handle) =
            (with_exposed_provenance_mut(self.context), with_exposed_provenance_mut(*handle));
        // SAFETY: 1. Guaranteed by the caller of `aq_registered_create`. 2. The handle is that of
        // this registration, which ends once.
        match self.unregister.map_or(0, |unregister| unsafe { unregister(context, handle) }) {
            0 => {
                lock(&self.chunks).remove(&address);
                Ok(())
            }
            code => Err(code),
        }
    }
}

/// Returns the pool of this number.
fn find(id: u64) -> CallResult<Arc<Pool>> {
    let found = lock(&SLOTS[id as usize % POOLS]).clone().filter(|pool| pool.id == id);
    found.ok_or_else(|| Failure::new(Status::Closed, format!("{id} is not a registered pool")))
}

impl Pool {
    /// Ends a closed pool without memory.
    fn end_if_unused(&self) {
        if self.closed.load(Ordering::Acquire)
            && self.memory.stats().blocks == 0
            && lock(&self.memory.registrar().chunks).is_empty()
        {
            // Dropped without the lock.
            let _ended = lock(&SLOTS[self.id as usize % POOLS]).take_if(|pool| pool.id == self.id);
        }
    }
}

/// The function by which PyTorch allocates from the pool in slot `N`.
unsafe extern "C" fn allocate<const N: usize>(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let mut memory = null_mut();
    enter(|| {
        let pool = lock(&SLOTS[N]).clone().ok_or(MemoryError::Closed)?;
        if pool.closed.load(Ordering::Acquire) {
            return Err(MemoryError::Closed.into());
        }
        if device_of(device)? != pool.device {
            let text = format!("the registered pool is on device {}, not {device}", pool.device);
            return Err(Failure::new(Status::WrongDevice, text));
        }
        let request = Request::bytes(size.max(0) as u64);
        // SAFETY: 1. PyTorch's streams live for ever.
        let block = unsafe {
            thread_state::with_stream(pool.runtime, pool.device, handle(stream), |_, _, stream| {
                Ok(pool.memory.allocate(stream, request)?)
            })
        }?;
        memory = with_exposed_provenance_mut(block.into_raw() as usize);
        Ok(())
    });
    memory
}

/// The function by which PyTorch frees memory of the pool in slot `N`.
unsafe extern "C" fn free<const N: usize>(
    memory: *mut c_void,
    _size: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    enter(|| {
        if memory.is_null() {
            return Ok(());
        }
        let pool = lock(&SLOTS[N]).clone().ok_or(MemoryError::Closed)?;
        let block = pool.memory.from_raw(memory.addr() as u64)?;
        // PyTorch frees segments as by `cudaFree`, which waits. No later call may come.
        let _ = block.home().synchronize();
        drop(block);
        pool.memory.trim(0)?;
        pool.end_if_unused();
        Ok(())
    });
}

macro_rules! functions {
    ($($slot:literal)*) => {
        [$((allocate::<$slot> as *const c_void, free::<$slot> as *const c_void)),*]
    };
}

/// Returns the addresses of the two functions of a slot.
fn functions(slot: usize) -> (*const c_void, *const c_void) {
    let all: [_; POOLS] = functions!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    all[slot]
}

/// Creates a pool of registered memory.
///
/// # Safety
/// 1. `register_memory` and `unregister_memory` are null, or functions that may be called from any
///    thread with `context` while the pool has memory.
/// 2. `pool` and `functions` are null, or point to a `uint64_t` and to two pointers that the caller
///    may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_registered_create(
    device: c_int,
    chunk_bytes: u64,
    exported: c_int,
    register_memory: Option<aq_register_memory>,
    unregister_memory: Option<aq_unregister_memory>,
    context: *mut c_void,
    pool: *mut u64,
    functions: *mut *const c_void,
) -> aq_status {
    enter(|| {
        require(pool, "pool")?;
        require(functions, "functions")?;
        let (runtime, device) = (default_runtime()?, device_of(device)?);
        let transport = Transport {
            register: register_memory,
            unregister: unregister_memory,
            context: context.expose_provenance(),
            export: match exported {
                0 => ExportTypes::NONE,
                _ => ExportTypes::POSIX_FD.with_rdma(),
            },
            deferred: OnceLock::new(),
            chunks: Mutex::default(),
        };
        let memory = thread_state::with(runtime, |shared| {
            Ok(RegisteredDevicePool::new(shared.pool(device)?, chunk_bytes, transport)?)
        })?;
        for (number, slot) in SLOTS.iter().enumerate() {
            let mut slot = lock(slot);
            if slot.is_none() {
                let id = NEXT.fetch_add(1, Ordering::Relaxed) * POOLS as u64 + number as u64;
                let closed = AtomicBool::new(false);
                *slot = Some(Arc::new(Pool { id, runtime, device, memory, closed }));
                let (allocate, free) = self::functions(number);
                // SAFETY: 1. Not null, and guaranteed by the caller.
                unsafe {
                    functions.write(allocate);
                    functions.add(1).write(free);
                    return write_out(pool, id, "pool");
                }
            }
        }
        let text = format!("all {POOLS} registered pools are in use; destroy one");
        Err(Failure::new(Status::Capacity, text))
    })
}

/// Leaves registrations to the caller, who is called when a chunk has no part any more.
///
/// # Safety
/// 1. `defer` may be called from any thread, with `call` and the number of the pool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_registered_defer(
    pool: u64,
    defer: Option<aq_defer>,
    call: Option<aq_call>,
) -> aq_status {
    enter(|| {
        let (Some(defer), Some(call)) = (defer, call) else { return Err(null("defer or call")) };
        let deferred = find(pool)?.memory.registrar().deferred.set((defer, call, pool));
        deferred.map_err(|_| Failure::new(Status::Busy, "the pool is deferred already"))
    })
}

/// Returns the first chunk above an address.
///
/// # Safety
/// 1. `address`, `bytes` and `leaving` are null, or point to a `uint64_t` each and an `int` that
///    the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_registered_chunk(
    pool: u64,
    above: u64,
    address: *mut u64,
    bytes: *mut u64,
    leaving: *mut c_int,
) -> aq_status {
    enter(|| {
        let pool = find(pool)?;
        let chunks = lock(&pool.memory.registrar().chunks);
        let next = chunks.range(above.saturating_add(1)..).next();
        let (at, (size, state)) =
            next.map_or((0, (0, ChunkState::Used)), |(&at, &chunk)| (at, chunk));
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            write_out_if_set(address, at);
            write_out_if_set(bytes, size);
            write_out_if_set(leaving, c_int::from(state == ChunkState::Leaving));
        }
        Ok(())
    })
}

/// Releases a chunk that the caller has unregistered.
#[unsafe(no_mangle)]
pub extern "C" fn aq_registered_release(pool: u64, address: u64) -> aq_status {
    enter(|| {
        let pool = find(pool)?;
        match lock(&pool.memory.registrar().chunks).get_mut(&address) {
            Some((_, state @ ChunkState::Leaving)) => *state = ChunkState::Unregistered,
            Some(_) => return Err(MemoryError::Busy { address }.into()),
            None => return Err(MemoryError::ForeignBlock { address }.into()),
        }
        pool.memory.trim(0)?;
        pool.end_if_unused();
        Ok(())
    })
}

/// Returns whether memory is a registered pool's, whose chunks are charged already.
#[unsafe(no_mangle)]
pub extern "C" fn aq_registered_has(memory: *const c_void) -> u32 {
    let (mut has, address) = (false, memory.addr() as u64);
    enter(|| {
        has = SLOTS.iter().filter_map(|slot| lock(slot).clone()).any(|pool| {
            let chunks = lock(&pool.memory.registrar().chunks);
            let below = chunks.range(..=address).next_back();
            below.is_some_and(|(start, (bytes, _))| address - start < *bytes)
        });
        Ok(())
    });
    u32::from(has)
}

/// Refuses further allocations, and ends the pool with its last block.
#[unsafe(no_mangle)]
pub extern "C" fn aq_registered_destroy(pool: u64) -> aq_status {
    enter(|| {
        let pool = find(pool)?;
        pool.closed.store(true, Ordering::Release);
        pool.end_if_unused();
        Ok(())
    })
}
