//! Work that a test queues: kernels and declared accesses.
#![expect(unsafe_code, reason = "creates handles")]

use super::{
    Sim,
    address_space::DeviceUse,
    codes,
    config::Mode,
    kernel::{DeclaredAccess, SimKernel},
    machine::caller_site,
    machine_state::device_bit,
    queue::{StreamKind, Task, Work, stream_handle},
};
use crate::{Access, DeviceId, DeviceRange, HostAccess, RawStream, Result};

const LAUNCH: &str = "cuLaunchKernel";

/// Creates the use of a kernel. The stream's own device must have access.
fn kernel_use(device: DeviceId, declared: &DeclaredAccess) -> DeviceUse {
    DeviceUse {
        range: declared.range,
        writes: declared.access.writes(),
        generation: declared.generation,
        devices: device_bit(device),
    }
}

impl Sim {
    /// Queues a kernel (`cuLaunchKernel`). Its declared accesses are checked now, and its closure
    /// runs when the item runs. If declared memory cannot be accessed, that is reported and the
    /// closure does not run.
    ///
    /// # Errors
    /// Invalid handle for a stream that does not exist. Errors of a capture or of a lost device.
    #[track_caller]
    pub fn launch(&self, stream: RawStream, kernel: SimKernel) -> Result<()> {
        let SimKernel { name, declared, body } = kernel;
        let uses = declared.iter().map(|declared| kernel_use(stream.device(), declared)).collect();
        let body = body.filter(|_| self.machine.config.mode == Mode::Bytes);
        self.queue(LAUNCH, stream, Task::new(name, caller_site(), Work::Kernel { uses, body }))
    }

    /// Queues a kernel that accesses one range and does nothing else: the simplest way to declare
    /// that a stream uses a block.
    ///
    /// # Errors
    /// As [`Sim::launch`].
    #[track_caller]
    pub fn access(
        &self,
        stream: RawStream,
        range: DeviceRange,
        access: Access,
        generation: Option<u64>,
    ) -> Result<()> {
        let name = if access.writes() { "write" } else { "read" };
        let u = kernel_use(stream.device(), &DeclaredAccess { range, access, generation });
        self.queue(LAUNCH, stream, Task::new(name, caller_site(), Work::Access(u)))
    }

    /// Declares that the CPU reads pinned memory.
    #[track_caller]
    pub fn host_read(&self, address: u64, bytes: u64) {
        self.host_access(address, bytes, HostAccess::Read);
    }

    /// Declares that the CPU writes pinned memory.
    #[track_caller]
    pub fn host_write(&self, address: u64, bytes: u64) {
        self.host_access(address, bytes, HostAccess::Write);
    }

    #[track_caller]
    fn host_access(&self, address: u64, bytes: u64, access: HostAccess) {
        let site = caller_site();
        self.machine.lock().check_host_access(address, bytes, access, Some(site), site);
    }

    /// Creates a stream that is ordered with the device's legacy default stream in both directions
    /// (`cuStreamCreate`, default flags). The stream handle 0 means that default stream.
    ///
    /// # Errors
    /// Invalid device, or the error of a lost device.
    pub fn blocking_stream(&self, device: DeviceId) -> Result<RawStream> {
        let mut state = self.machine.enter_named("cuStreamCreate", device)?;
        let index = state.create_stream(device, StreamKind::Blocking);
        // SAFETY: 1. The handle belongs to the stream that was just created.
        Ok(unsafe { RawStream::from_raw(device, stream_handle(self.machine.machine_id, index)) })
    }

    /// Returns the device's legacy default stream.
    #[must_use]
    pub fn legacy_stream(&self, device: DeviceId) -> RawStream {
        // SAFETY: 1. Every device has its default stream, with this number, for its whole lifetime.
        unsafe { RawStream::from_raw(device, 0) }
    }

    /// Queues a task, or refuses it in the name of a call.
    #[track_caller]
    fn queue(&self, call: &'static str, stream: RawStream, task: Task) -> Result<()> {
        let mut state = self.machine.enter_named(call, stream.device())?;
        let index = state.stream(stream);
        let queued = index.and_then(|index| self.machine.submit(state, index, task).map(drop));
        queued.map_err(|code| codes::error(call, code))
    }
}
