//! Stream-ordered blocks from a pool of this library, in place of the driver's default pool.
//!
//! Served are requests without a pool, in the device's primary context, on a stream that does not
//! capture. The driver that the pool calls is opened by the name under which this library needs it,
//! so no call of the pool comes back here.
#![expect(unsafe_code, reason = "adopts streams of the program, and calls the CUDA driver")]

use crate::{
    blocks::{Block, Memory},
    guest::{self, NoSignals, lock},
    log::Subject,
    real::{Code, LIBRARY, OUT_OF_MEMORY, Opaque, SUCCESS},
    session::{By, Session},
};
use aquifer_core::{
    DeviceId, MemoryError, Request, Result,
    event::{BlockKind, MemoryLocation},
};
use aquifer_device::{DevicePool, PoolConfig};
use aquifer_driver::{Access, Driver, RawStream, cuda::CudaDriver};
use aquifer_stream::{Stream, StreamLifetime};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, OnceLock},
};

/// The pools, opened by the first request of each device.
#[derive(Default)]
struct Serving {
    driver: OnceLock<Option<Arc<CudaDriver>>>,
    pools: Mutex<HashMap<u32, Option<DevicePool>>>,
    /// Streams that were adopted, by device and handle.
    streams: Mutex<HashMap<(u32, usize), Stream>>,
}

static SERVING: LazyLock<Serving> = LazyLock::new(Serving::default);

impl Serving {
    /// Returns the pool of a device. One that cannot be opened is reported, and the driver serves.
    fn pool(&self, session: &'static Session, device: u32) -> Option<DevicePool> {
        let known = lock(&self.pools).get(&device).cloned();
        if let Some(known) = known {
            return known;
        }
        let opened = self.open(session, device);
        let mut pools = lock(&self.pools);
        pools.entry(device).or_insert(opened).clone()
    }

    fn open(&self, session: &'static Session, device: u32) -> Option<DevicePool> {
        let _blocked = NoSignals::new();
        let driver = self.driver.get_or_init(|| {
            let opened = CudaDriver::open_library(LIBRARY.to_str().ok()?);
            opened.inspect_err(|error| guest::report(&format!("nothing is served: {error}"))).ok()
        });
        let driver: Arc<dyn Driver> = driver.clone()?;
        let holder = session.holder(MemoryLocation::Device(DeviceId(device)))?;
        let config = PoolConfig::with_budget(holder.budget.clone());
        let opened = DevicePool::open(driver, DeviceId(device), config);
        opened.inspect_err(|error| guest::report(&format!("nothing is served: {error}"))).ok()
    }

    /// Returns the program's stream as one of the pool's.
    fn stream(&self, pool: &DevicePool, device: u32, stream: Opaque) -> Result<Stream> {
        let key = (device, stream as usize);
        let streams = || lock(&self.streams);
        if let Some(known) = streams().get(&key) {
            return Ok(known.clone());
        }
        // SAFETY: 1. A stream of the program's, of the current device. 2. `end_stream` retires it
        // before it is destroyed.
        let raw = unsafe { RawStream::from_raw(DeviceId(device), stream as u64) };
        // SAFETY: 1. 2. As above.
        let adopted = unsafe { pool.streams().adopt(raw, StreamLifetime::Retired) }?;
        // The default stream of a thread is another one on each thread.
        if stream as usize != 2 {
            streams().insert(key, adopted.clone());
        }
        Ok(adopted)
    }
}

/// Serves a request. Returns `None` if the driver is to serve it.
pub(crate) fn allocate(
    session: &'static Session,
    bytes: u64,
    stream: Opaque,
) -> Option<std::result::Result<u64, Code>> {
    if session.captures(stream) || !session.is_in_primary() {
        return None;
    }
    let device = session.current_device()?;
    let serving = &*SERVING;
    let pool = serving.pool(session, device)?;
    let adopted = serving.stream(&pool, device, stream).ok()?;
    let place = MemoryLocation::Device(DeviceId(device));
    let (tag, kind) = (session.tag(By::Served), BlockKind::Cached);
    let what = Subject { place, kind, stream: session.number_of(stream), bytes, tag };
    match pool.alloc_raw(&adopted, Request::bytes(bytes).align(512)) {
        Ok(address) => {
            session.add(address, Block { what, context: 0, memory: Memory::Served });
            Some(Ok(address))
        }
        Err(MemoryError::OutOfMemory(_)) => {
            session.note_failure(what);
            Some(Err(OUT_OF_MEMORY))
        }
        Err(_) => None,
    }
}

/// Frees a block, in the order of `stream` or, without one, after all work of the context.
pub(crate) fn free(
    session: &'static Session,
    block: Block,
    address: u64,
    stream: Option<Opaque>,
) -> Code {
    let MemoryLocation::Device(DeviceId(device)) = block.what.place else { return SUCCESS };
    session.release(block);
    let Some(pool) = SERVING.pool(session, device) else { return SUCCESS };
    if stream.is_none() {
        // SAFETY: 1. Waits for the calling thread's context.
        let code = unsafe { (session.real.cuCtxSynchronize)() };
        if code != SUCCESS {
            return code;
        }
    }
    let Ok(block) = pool.from_raw(address) else { return SUCCESS };
    if let Some(stream) = stream
        && let Ok(adopted) = SERVING.stream(&pool, device, stream)
    {
        // On the block's own stream this is no use. A use that cannot be recorded leaves the block
        // to the driver's order.
        let _recorded = block.record_use(&adopted, Access::Write);
    }
    drop(block);
    SUCCESS
}

/// Retires a stream that the program destroys.
pub(crate) fn end_stream(stream: Opaque) {
    let streams = &SERVING.streams;
    let of = |(_, handle): &(u32, usize)| *handle == stream as usize;
    let ended: Vec<_> = {
        let mut streams = lock(streams);
        streams.extract_if(|key, _| of(key)).collect()
    };
    for (_, stream) in ended {
        // A refusal means that its work cannot be waited for: its memory stays behind it.
        let _retired = stream.retire();
    }
}
