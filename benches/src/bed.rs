//! The device with a stager, and its two references: the driver's own copy, and pinned memory.
#![expect(unsafe_code, reason = "times the driver's own copies")]

use crate::console::place::Session;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::{DeviceBuffer, DevicePool, PoolConfig};
use aquifer_driver::{Driver, Operand};
use aquifer_host::{
    PinnedBuf, PinnedConfig, PinnedPool, Source, StageError, Stager, StagerConfig, kernel::Kernel,
    region::Host, topology::Topology,
};
use aquifer_stream::Stream;
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use std::{ptr::NonNull, sync::Arc, time::Instant};

/// A duration in nanoseconds.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(crate) struct Took {
    /// Elapsed time.
    pub(crate) wall: f64,
    /// Processor time of all threads, including the kernel's share.
    pub(crate) cpu: f64,
}

impl Took {
    /// Converts a duration for `bytes` to one for `of` bytes.
    pub(crate) fn per(self, bytes: u64, of: u64) -> Self {
        let factor = of as f64 / bytes.max(1) as f64;
        Self { wall: self.wall * factor, cpu: self.cpu * factor }
    }
}

/// Returns the processor time of this process in nanoseconds, or 0 if the kernel does not report
/// it.
fn cpu() -> f64 {
    let used = getrusage(UsageWho::RUSAGE_SELF);
    let micros = used.map_or(0, |used| {
        used.user_time().num_microseconds() + used.system_time().num_microseconds()
    });
    micros as f64 * 1e3
}

/// Times `work`.
pub(crate) fn timed<E>(work: impl FnOnce() -> Result<(), E>) -> Result<Took, E> {
    let (cpu_before, begun) = (cpu(), Instant::now());
    work()?;
    let wall = begun.elapsed().as_nanos() as f64;
    Ok(Took { wall, cpu: cpu() - cpu_before })
}

/// Converts any staging error to a memory error.
pub(crate) fn words(error: &StageError) -> MemoryError {
    match error {
        StageError::Memory(error) => error.clone(),
        other => MemoryError::BadSetting {
            name: "what is staged",
            value: other.to_string(),
            expected: "memory or a file that can be read",
        },
    }
}

/// A device, pinned memory near it, and a stager between them.
#[derive(Debug)]
pub(crate) struct Bed {
    driver: Arc<dyn Driver>,
    pool: DevicePool,
    /// The owner stream of all buffers. The driver's own copies are queued on it.
    stream: Stream,
    /// The stream for the other direction.
    other: Stream,
    pinned: PinnedPool,
    pub(crate) stager: Stager,
}

/// Maximum bytes of pinned memory for the reference. Longer copies reuse it repeatedly.
const PINNED: usize = 256 << 20;

impl Bed {
    /// Opens the device. Allocates the slots at once, so that no transfer pays for them.
    pub(crate) fn open(session: &Session, config: StagerConfig) -> Result<Self> {
        let topology = Topology::read().map_err(|e| MemoryError::BadSetting {
            name: "the machine's topology",
            value: e.to_string(),
            expected: "what the kernel tells under /sys and /proc",
        })?;
        let (driver, device) = (session.driver.clone(), session.device);
        let pool = DevicePool::open(driver.clone(), device, PoolConfig::default())?;
        let topology = topology.with_devices([pool.info()]);
        let mut near = PinnedConfig::default();
        near.node = topology.memory_near_device(pool.info()).ok().flatten();
        let host = Host::new(topology, Kernel::new()).with_driver(driver.clone(), device);
        let pinned = PinnedPool::new(&host, &Budget::unlimited("pinned"), near)?;
        let stager = Stager::new(&host, &pinned, pool.streams(), config)?;
        stager.warm()?;
        let (stream, other) = (pool.stream()?, pool.stream()?);
        Ok(Self { driver, pool, stream, other, pinned, stager })
    }

    /// Allocates device memory.
    pub(crate) fn buffer(&self, bytes: u64) -> Result<DeviceBuffer<u8>> {
        self.pool.buffer(&self.stream, bytes as usize)
    }

    /// Returns how many bytes of device memory are available.
    pub(crate) fn room(&self) -> u64 {
        self.pool.budget().remaining()
    }

    /// Allocates pinned memory for the reference copy.
    pub(crate) fn limit(&self, bytes: u64) -> Result<PinnedBuf<u8>> {
        self.pinned.buffer((bytes as usize).min(PINNED))
    }

    /// Uploads through the stager.
    pub(crate) fn upload(&self, from: &[u8], to: &mut DeviceBuffer<u8>) -> Result<Took> {
        let staged =
            timed(|| self.stager.scope(|s| s.upload(from, to).map(drop)).and_then(|taken| taken));
        staged.map_err(|e| words(&e))
    }

    /// Downloads through the stager.
    pub(crate) fn download(&self, from: &DeviceBuffer<u8>, to: &mut [u8]) -> Result<Took> {
        let staged =
            timed(|| self.stager.scope(|s| s.download(from, to).map(drop)).and_then(|taken| taken));
        staged.map_err(|e| words(&e))
    }

    /// Uploads and downloads at the same time through the stager.
    pub(crate) fn both(
        &self,
        up: (&[u8], &mut DeviceBuffer<u8>),
        down: (&DeviceBuffer<u8>, &mut [u8]),
    ) -> Result<Took> {
        let staged = timed(|| {
            let taken = self.stager.scope(|s| {
                s.upload(up.0, up.1)?;
                s.download(down.0, down.1).map(drop)
            });
            taken.and_then(|taken| taken)
        });
        staged.map_err(|e| words(&e))
    }

    /// Reads a file or another source to the device through the stager.
    pub(crate) fn read(
        &self,
        from: &dyn Source,
        offset: u64,
        to: &mut DeviceBuffer<u8>,
    ) -> Result<Took> {
        let staged = timed(|| {
            self.stager.scope(|s| s.read(from, offset, to).map(drop)).and_then(|taken| taken)
        });
        staged.map_err(|e| words(&e))
    }

    /// Uploads through the driver in one call, or in several calls over `from` if it is shorter.
    pub(crate) fn driver_upload(&self, from: &[u8], to: &mut DeviceBuffer<u8>) -> Result<Took> {
        timed(|| {
            self.queue_up(&self.stream, from, to)?;
            self.finish(&self.stream)
        })
    }

    /// Downloads through the driver in one call, or in several calls into `to` if it is shorter.
    pub(crate) fn driver_download(&self, from: &DeviceBuffer<u8>, to: &mut [u8]) -> Result<Took> {
        timed(|| {
            self.queue_down(&self.stream, from, to)?;
            self.finish(&self.stream)
        })
    }

    /// Uploads and downloads at the same time through the driver, with pinned memory.
    pub(crate) fn driver_both(
        &self,
        up: (&[u8], &mut DeviceBuffer<u8>),
        down: (&DeviceBuffer<u8>, &mut [u8]),
    ) -> Result<Took> {
        timed(|| {
            self.queue_up(&self.stream, up.0, up.1)?;
            self.queue_down(&self.other, down.0, down.1)?;
            self.finish(&self.stream)?;
            self.finish(&self.other)
        })
    }

    fn queue_up(&self, on: &Stream, from: &[u8], to: &mut DeviceBuffer<u8>) -> Result<()> {
        let range = to.range();
        let mut done = 0;
        while done < range.bytes {
            let part = &from[..from.len().min((range.bytes - done) as usize)];
            // SAFETY: 1. both are borrowed by the caller, which waits for the stream. 2. no other
            // copy is pending on this device.
            let copied = unsafe {
                self.driver.copy_to_device(
                    on.raw(),
                    range.address + done,
                    NonNull::from(part).cast(),
                    part.len(),
                )
            };
            copied.map_err(|e| MemoryError::driver(range.device, e))?;
            done += part.len() as u64;
        }
        Ok(())
    }

    fn queue_down(&self, on: &Stream, from: &DeviceBuffer<u8>, to: &mut [u8]) -> Result<()> {
        let range = from.range();
        let mut done = 0;
        while done < range.bytes {
            let bytes = to.len().min((range.bytes - done) as usize);
            let part = NonNull::from(&mut to[..bytes]).cast();
            // SAFETY: 1. both are borrowed by the caller, which waits for the stream. 2. no other
            // copy is pending on this device; copies into the same bytes follow each other in the
            // stream's order.
            let copied =
                unsafe { self.driver.copy_to_host(on.raw(), part, range.address + done, bytes) };
            copied.map_err(|e| MemoryError::driver(range.device, e))?;
            done += bytes as u64;
        }
        Ok(())
    }

    fn finish(&self, stream: &Stream) -> Result<()> {
        self.driver
            .stream_synchronize(stream.raw())
            .map_err(|e| MemoryError::driver(stream.device(), e))
    }
}
