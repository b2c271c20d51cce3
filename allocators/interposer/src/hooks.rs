//! The functions that this library has in place of the driver's. Each performs the driver's,
//! between the steps of the [session](crate::session).
#![expect(unsafe_code, reason = "exports functions under the names of the CUDA driver")]

use crate::{
    blocks::Memory,
    real::{
        Array3dDescriptor, ArrayDescriptor, Code, Location, NOT_INITIALIZED, OUT_OF_MEMORY, Opaque,
        Properties, Real, SUCCESS, real,
    },
    session::{Begun, By, Refused, Session, note_call, session, step},
};
use aquifer_core::{DeviceId, event::MemoryLocation};
use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong, c_void},
    sync::OnceLock,
};

/// Performs a call that takes memory. `begin` charges it, `call` performs it, `address` reads what
/// it has written, and `free` gives back what turns out not to fit.
fn take(
    begin: impl FnOnce(&'static Session) -> Option<Result<Begun, Refused>>,
    call: impl FnOnce(&Real) -> Code,
    address: impl FnOnce() -> u64,
    free: impl FnOnce(&Real, u64),
) -> Code {
    let Some(real) = real() else { return NOT_INITIALIZED };
    let Some(session) = session() else { return call(real) };
    let begun = match step(|| begin(session)).flatten() {
        Some(Ok(begun)) => begun,
        Some(Err(Refused)) => return OUT_OF_MEMORY,
        None => return call(real),
    };
    let code = call(real);
    let address = if code == SUCCESS { address() } else { 0 };
    step(|| session.finish(begun, code, address, || free(real, address))).unwrap_or(code)
}

/// Performs a call that frees a block.
fn give(address: u64, stream: Option<Opaque>, call: impl FnOnce(&Real) -> Code) -> Code {
    let Some(real) = real() else { return NOT_INITIALIZED };
    let Some(session) = session() else { return call(real) };
    let Some(block) = step(|| session.take(address, stream)).flatten() else { return call(real) };
    if matches!(block.memory, Memory::Served) {
        return step(|| crate::serve::free(session, block, address, stream)).unwrap_or(SUCCESS);
    }
    let code = call(real);
    step(
        || {
            if code == SUCCESS { session.release(block) } else { session.put_back(address, block) }
        },
    );
    code
}

/// Serves a stream-ordered request from this library's pool, if that was asked for. Returns `None`
/// if the driver is to serve it.
fn serve(address: *mut u64, bytes: usize, stream: Opaque) -> Option<Code> {
    let session = session().filter(|session| session.settings.serve)?;
    if address.is_null() || bytes == 0 {
        return None;
    }
    let served = step(|| crate::serve::allocate(session, bytes as u64, stream)).flatten()?;
    Some(match served {
        Ok(found) => {
            // SAFETY: 1. Not null, and the caller's to be written.
            unsafe { *address = found };
            SUCCESS
        }
        Err(code) => code,
    })
}

/// Performs a call and, if it has succeeded, a step.
fn after(call: impl FnOnce(&Real) -> Code, work: impl FnOnce(&'static Session)) -> Code {
    let Some(real) = real() else { return NOT_INITIALIZED };
    let code = call(real);
    if code == SUCCESS
        && let Some(session) = session()
    {
        step(|| work(session));
    }
    code
}

/// The functions that the program gets in place of the driver's, by the driver's addresses.
fn replaced() -> &'static [(usize, usize)] {
    static REPLACED: OnceLock<Vec<(usize, usize)>> = OnceLock::new();
    REPLACED.get_or_init(|| {
        let Some(real) = real() else { return Vec::new() };
        all().into_iter().filter_map(|(name, hook)| Some((real.address_of(name)?, hook))).collect()
    })
}

/// Performs a call by which the program asks for a function, and puts this library's in place of
/// one that it has, whatever name, version or flags it was asked by.
fn resolve(found: *mut *mut c_void, call: impl FnOnce(&Real) -> Code) -> Code {
    note_call();
    let Some(real) = real() else { return NOT_INITIALIZED };
    let code = call(real);
    // SAFETY: 1. Null, or the caller's to be written: the driver has written to it.
    if let (SUCCESS, Some(found)) = (code, unsafe { found.as_mut() }) {
        let address = *found as usize;
        let all = step(replaced).unwrap_or_default();
        if let Some((_, hook)) = all.iter().find(|(real, _)| *real == address) {
            *found = *hook as *mut c_void;
        }
    }
    code
}

/// Defines functions of the driver.
macro_rules! hooks {
    ($( fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block )+) => {
        /// Returns the names and the addresses of all of them.
        fn all() -> Vec<(&'static str, usize)> {
            vec![$( (stringify!($name), $name as *const () as usize) ),+]
        }
        $(
        /// # Safety
        /// 1. As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> Code $body
        )+
    };
}

/// Calls a function of the driver with the arguments of the caller.
macro_rules! call {
    ($real:ident.$name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: 1. The arguments are the caller's, who guarantees what the driver requires.
        unsafe { ($real.$name)($($argument),*) }
    }};
}

/// Reads what the driver has written for the caller.
macro_rules! read {
    ($pointer:expr) => {{
        // SAFETY: 1. The driver has just written to it.
        unsafe { *$pointer }
    }};
}

/// Frees memory that does not fit.
fn free_linear(real: &Real, address: u64) {
    call!(real.cuMemFree_v2(address));
}

/// Returns the bytes of an element of an array.
fn element_bytes(format: c_uint, channels: c_uint) -> u64 {
    let bytes = match format {
        // Unsigned and signed bytes.
        0x01 | 0x08 => 1,
        // 16 bits, and half floats.
        0x02 | 0x09 | 0x10 => 2,
        // Formats of textures are counted by what the driver takes.
        _ => 4,
    };
    bytes * u64::from(channels.max(1))
}

/// Returns the bytes of an array's elements.
fn array_bytes(width: usize, height: usize, depth: usize, format: c_uint, channels: c_uint) -> u64 {
    let sides = [width, height, depth].map(|side| side.max(1) as u64);
    sides.into_iter().fold(element_bytes(format, channels), u64::saturating_mul)
}

hooks! {
    fn cuInit(flags: c_uint) {
        note_call();
        real().map_or(NOT_INITIALIZED, |real| call!(real.cuInit(flags)))
    }

    fn cuGetProcAddress(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong,
    ) {
        resolve(found, |real| call!(real.cuGetProcAddress(name, found, version, flags)))
    }

    fn cuGetProcAddress_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong, how: *mut c_uint,
    ) {
        resolve(found, |real| call!(real.cuGetProcAddress_v2(name, found, version, flags, how)))
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        after(
            |real| call!(real.cuDeviceTotalMem_v2(bytes, device)),
            |session| {
                let total = session.total(device, read!(bytes));
                // SAFETY: 1. The driver has just written to it.
                unsafe { *bytes = total };
            },
        )
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (mut device_free, mut device_total) = (0, 0);
        let Some(real) = real() else { return NOT_INITIALIZED };
        let code = call!(real.cuMemGetInfo_v2(&raw mut device_free, &raw mut device_total));
        if code == SUCCESS
            && let Some(session) = session()
            && let Some(within) = step(|| session.info(device_free, device_total)).flatten()
        {
            (device_free, device_total) = within;
        }
        // SAFETY: 1. Each is null, or the caller's to be written. The driver takes one null,
        // but not two.
        unsafe {
            if let (SUCCESS, Some(free)) = (code, free.as_mut()) {
                *free = device_free;
            }
            if let (SUCCESS, Some(total)) = (code, total.as_mut()) {
                *total = device_total;
            }
        }
        code
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        take(
            |session| session.begin_linear(By::Alloc, bytes as u64),
            |real| call!(real.cuMemAlloc_v2(address, bytes)),
            || read!(address),
            free_linear,
        )
    }

    fn cuMemAllocPitch_v2(
        address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    ) {
        // The driver aligns rows to 512 bytes.
        let row = width.checked_next_multiple_of(512).unwrap_or(usize::MAX);
        take(
            |session| session.begin_linear(By::Pitch, (row as u64).saturating_mul(height as u64)),
            |real| call!(real.cuMemAllocPitch_v2(address, pitch, width, height, element)),
            || read!(address),
            free_linear,
        )
    }

    fn cuMemAllocManaged(address: *mut u64, bytes: usize, flags: c_uint) {
        take(
            |session| session.begin_linear(By::Managed, bytes as u64),
            |real| call!(real.cuMemAllocManaged(address, bytes, flags)),
            || read!(address),
            free_linear,
        )
    }

    fn cuMemFree_v2(address: u64) {
        give(address, None, |real| call!(real.cuMemFree_v2(address)))
    }

    fn cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Opaque) {
        if let Some(code) = serve(address, bytes, stream) {
            return code;
        }
        take(
            |session| session.begin_pooled(bytes as u64, None, stream),
            |real| call!(real.cuMemAllocAsync(address, bytes, stream)),
            || read!(address),
            |real, address| _ = call!(real.cuMemFreeAsync(address, stream)),
        )
    }

    fn cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: Opaque) {
        let stream = per_thread(stream);
        if let Some(code) = serve(address, bytes, stream) {
            return code;
        }
        take(
            |session| session.begin_pooled(bytes as u64, None, stream),
            |real| call!(real.cuMemAllocAsync_ptsz(address, bytes, stream)),
            || read!(address),
            |real, address| _ = call!(real.cuMemFreeAsync_ptsz(address, stream)),
        )
    }

    fn cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: Opaque, stream: Opaque) {
        take(
            |session| session.begin_pooled(bytes as u64, Some(pool), stream),
            |real| call!(real.cuMemAllocFromPoolAsync(address, bytes, pool, stream)),
            || read!(address),
            |real, address| _ = call!(real.cuMemFreeAsync(address, stream)),
        )
    }

    fn cuMemAllocFromPoolAsync_ptsz(address: *mut u64, bytes: usize, pool: Opaque, stream: Opaque) {
        let stream = per_thread(stream);
        take(
            |session| session.begin_pooled(bytes as u64, Some(pool), stream),
            |real| call!(real.cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream)),
            || read!(address),
            |real, address| _ = call!(real.cuMemFreeAsync_ptsz(address, stream)),
        )
    }

    fn cuMemFreeAsync(address: u64, stream: Opaque) {
        give(address, Some(stream), |real| call!(real.cuMemFreeAsync(address, stream)))
    }

    fn cuMemFreeAsync_ptsz(address: u64, stream: Opaque) {
        let stream = per_thread(stream);
        give(address, Some(stream), |real| call!(real.cuMemFreeAsync_ptsz(address, stream)))
    }

    fn cuMemPoolCreate(pool: *mut Opaque, properties: *const Properties) {
        after(
            |real| call!(real.cuMemPoolCreate(pool, properties)),
            |session| {
                // SAFETY: 1. The driver has read it.
                let location = unsafe { &*properties }.location;
                session.pools.add(read!(pool) as usize, place_of(location));
            },
        )
    }

    fn cuDeviceSetMemPool(device: c_int, pool: Opaque) {
        after(
            |real| call!(real.cuDeviceSetMemPool(device, pool)),
            |session| session.forget_pool(device),
        )
    }

    fn cuMemPoolDestroy(pool: Opaque) {
        let Some(real) = real() else { return NOT_INITIALIZED };
        if let Some(session) = session() {
            // It may have been that of a device.
            step(|| session.forget_pools());
            step(|| session.pools.remove(pool as usize));
        }
        call!(real.cuMemPoolDestroy(pool))
    }

    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) {
        take(
            |session| session.begin_linear(By::HostAlloc, bytes as u64),
            |real| call!(real.cuMemHostAlloc(address, bytes, flags)),
            || read!(address) as u64,
            |real, address| _ = call!(real.cuMemFreeHost(address as *mut c_void)),
        )
    }

    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize) {
        take(
            |session| session.begin_linear(By::HostAlloc, bytes as u64),
            |real| call!(real.cuMemAllocHost_v2(address, bytes)),
            || read!(address) as u64,
            |real, address| _ = call!(real.cuMemFreeHost(address as *mut c_void)),
        )
    }

    fn cuMemFreeHost(address: *mut c_void) {
        give(address as u64, None, |real| call!(real.cuMemFreeHost(address)))
    }

    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint) {
        take(
            |session| session.begin_linear(By::HostRegister, bytes as u64),
            |real| call!(real.cuMemHostRegister_v2(address, bytes, flags)),
            || address as u64,
            |real, address| _ = call!(real.cuMemHostUnregister(address as *mut c_void)),
        )
    }

    fn cuMemHostUnregister(address: *mut c_void) {
        give(address as u64, None, |real| call!(real.cuMemHostUnregister(address)))
    }

    fn cuArrayCreate_v2(array: *mut Opaque, descriptor: *const ArrayDescriptor) {
        // SAFETY: 1. Null, or the caller's descriptor.
        let bytes = unsafe { descriptor.as_ref() }
            .map_or(0, |it| array_bytes(it.width, it.height, 1, it.format, it.channels));
        take(
            |session| session.begin_linear(By::Array, bytes),
            |real| call!(real.cuArrayCreate_v2(array, descriptor)),
            || read!(array) as u64,
            |real, array| _ = call!(real.cuArrayDestroy(array as Opaque)),
        )
    }

    fn cuArray3DCreate_v2(array: *mut Opaque, descriptor: *const Array3dDescriptor) {
        // SAFETY: 1. Null, or the caller's descriptor.
        let bytes = unsafe { descriptor.as_ref() }.map_or(0, array3d_bytes);
        take(
            |session| session.begin_linear(By::Array, bytes),
            |real| call!(real.cuArray3DCreate_v2(array, descriptor)),
            || read!(array) as u64,
            |real, array| _ = call!(real.cuArrayDestroy(array as Opaque)),
        )
    }

    fn cuArrayDestroy(array: Opaque) {
        give(array as u64, None, |real| call!(real.cuArrayDestroy(array)))
    }

    fn cuMipmappedArrayCreate(
        array: *mut Opaque, descriptor: *const Array3dDescriptor, levels: c_uint,
    ) {
        // SAFETY: 1. Null, or the caller's descriptor.
        let first = unsafe { descriptor.as_ref() }.map_or(0, array3d_bytes);
        // Each further level has a quarter of the one before, or an eighth.
        let bytes = if levels > 1 { first.saturating_add(first / 3) } else { first };
        take(
            |session| session.begin_linear(By::Array, bytes),
            |real| call!(real.cuMipmappedArrayCreate(array, descriptor, levels)),
            || read!(array) as u64,
            |real, array| _ = call!(real.cuMipmappedArrayDestroy(array as Opaque)),
        )
    }

    fn cuMipmappedArrayDestroy(array: Opaque) {
        give(array as u64, None, |real| call!(real.cuMipmappedArrayDestroy(array)))
    }

    fn cuMemCreate(
        handle: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong,
    ) {
        let Some(real) = real() else { return NOT_INITIALIZED };
        let perform = || call!(real.cuMemCreate(handle, bytes, properties, flags));
        // SAFETY: 1. Null, or the caller's properties.
        let place = unsafe { properties.as_ref() }.map(|properties| place_of(properties.location));
        let (Some(session), Some(place)) = (session(), place) else { return perform() };
        let (charge, what) = match step(|| session.begin_handle(bytes as u64, place)).flatten() {
            Some(Ok(begun)) => begun,
            Some(Err(Refused)) => return OUT_OF_MEMORY,
            None => return perform(),
        };
        let code = perform();
        if code == SUCCESS {
            step(|| session.add_handle(read!(handle), charge, what));
        }
        code
    }

    fn cuMemRelease(handle: u64) {
        after(|real| call!(real.cuMemRelease(handle)), |session| session.release_handle(handle))
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        after(
            |real| call!(real.cuMemMap(address, bytes, offset, handle, flags)),
            |session| session.add_mapping(address, bytes as u64, handle),
        )
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        after(
            |real| call!(real.cuMemUnmap(address, bytes)),
            |session| session.remove_mappings(address, bytes as u64),
        )
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
        after(
            |real| call!(real.cuMemRetainAllocationHandle(handle, address)),
            |session| session.add_reference(read!(handle), Some(address as u64)),
        )
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint) {
        after(
            |real| call!(real.cuMemImportFromShareableHandle(handle, shareable, kind)),
            |session| session.add_reference(read!(handle), None),
        )
    }

    fn cuStreamDestroy_v2(stream: Opaque) {
        let Some(real) = real() else { return NOT_INITIALIZED };
        if session().is_some_and(|session| session.settings.serve) {
            step(|| crate::serve::end_stream(stream));
        }
        call!(real.cuStreamDestroy_v2(stream))
    }

    fn cuDevicePrimaryCtxRetain(context: *mut Opaque, device: c_int) {
        after(
            |real| call!(real.cuDevicePrimaryCtxRetain(context, device)),
            |session| session.note_primary(device, read!(context)),
        )
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        after(
            |real| call!(real.cuDevicePrimaryCtxRelease_v2(device)),
            |session| session.end_primary(device),
        )
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        after(
            |real| call!(real.cuDevicePrimaryCtxReset_v2(device)),
            |session| session.end_primary(device),
        )
    }

    fn cuCtxDestroy_v2(context: Opaque) {
        after(
            |real| call!(real.cuCtxDestroy_v2(context)),
            |session| session.end_context(context as usize),
        )
    }
}

fn array3d_bytes(it: &Array3dDescriptor) -> u64 {
    array_bytes(it.width, it.height, it.depth, it.format, it.channels)
}

/// Returns the memory that a location stands for: a device, or host memory in all its forms.
fn place_of(location: Location) -> MemoryLocation {
    match (location.kind, u32::try_from(location.number)) {
        (Location::DEVICE, Ok(device)) => MemoryLocation::Device(DeviceId(device)),
        _ => MemoryLocation::Host(None),
    }
}

/// Returns the stream that a call means whose null stream is that of the thread.
fn per_thread(stream: Opaque) -> Opaque {
    /// `CU_STREAM_PER_THREAD`.
    const PER_THREAD: usize = 2;
    if stream.is_null() { PER_THREAD as Opaque } else { stream }
}
