//! Work that a test queues: kernels, declared accesses, values, callbacks, and synchronous copies.
#![expect(unsafe_code, reason = "declares copies between raw addresses")]

use super::{
    Sim,
    access_history::ActionKind,
    address_space::DeviceUse,
    callback::{Callback, CallbackToken, QueuedCallback},
    codes::{self, ErrorCode},
    kernel::{DeclaredAccess, SimKernel},
    machine::{StateGuard, caller_site},
    machine_state::device_bit,
    queue::{HostUse, StreamKind, Task, Work, stream_handle},
};
use crate::{Access, DeviceId, DeviceRange, DriverError, HostAccess, Pattern, RawStream, Result};
use std::ptr::NonNull;

const LAUNCH: &str = "cuLaunchKernel";
const WRITE_VALUE: &str = "cuStreamWriteValue64";
const WAIT_VALUE: &str = "cuStreamWaitValue64";
const CALLBACK: &str = "cuLaunchHostFunc";
const COPY_TO_DEVICE: &str = "cuMemcpyHtoD";
const COPY_TO_HOST: &str = "cuMemcpyDtoH";
const COPY_ON_DEVICE: &str = "cuMemcpyDtoD";
const FILL: &str = "cuMemsetD8";

fn error_of_name(call: &'static str) -> impl Fn(ErrorCode) -> DriverError {
    move |code| codes::error(call, code)
}

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
        let site = caller_site();
        let (state, index) = self.enter_stream(LAUNCH, stream)?;
        let SimKernel { name, declared, body } = kernel;
        let uses = declared.iter().map(|declared| kernel_use(stream.device(), declared)).collect();
        let body = body.filter(|_| state.space.store.has_bytes());
        let task = Task::new(name, site, Work::Kernel { uses, body });
        let queued =
            self.machine.submit(state, index, task).map(drop).map_err(error_of_name(LAUNCH));
        self.machine.checkpoint();
        queued
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
        let site = caller_site();
        let (state, index) = self.enter_stream(LAUNCH, stream)?;
        let name = if access.writes() { "write" } else { "read" };
        let u = kernel_use(stream.device(), &DeclaredAccess { range, access, generation });
        let task = Task::new(name, site, Work::Access(u));
        let queued =
            self.machine.submit(state, index, task).map(drop).map_err(error_of_name(LAUNCH));
        self.machine.checkpoint();
        queued
    }

    /// Declares that the CPU reads pinned memory, as the agent that this thread acts as.
    #[track_caller]
    pub fn host_read(&self, address: u64, bytes: u64) {
        let site = caller_site();
        self.machine.lock().check_host_access(address, bytes, HostAccess::Read, Some(site), site);
        self.machine.checkpoint();
    }

    /// Declares that the CPU writes pinned memory, as the agent that this thread acts as.
    #[track_caller]
    pub fn host_write(&self, address: u64, bytes: u64) {
        let site = caller_site();
        self.machine.lock().check_host_access(address, bytes, HostAccess::Write, Some(site), site);
        self.machine.checkpoint();
    }

    /// Queues a write of a value that other streams may wait for (`cuStreamWriteValue64`).
    ///
    /// # Errors
    /// As [`Sim::launch`].
    #[track_caller]
    pub fn write_value(&self, stream: RawStream, address: u64, value: u64) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_stream(WRITE_VALUE, stream)?;
        let task = Task::new("write of a value", site, Work::WriteValue { address, value });
        self.machine.submit(state, index, task).map(drop).map_err(error_of_name(WRITE_VALUE))
    }

    /// Makes a stream wait until the value at an address is `value` or more
    /// (`cuStreamWaitValue64`). This orders the stream after the write that satisfies the wait, if
    /// that write was queued before. A wait for a value whose write has not been queued yet gives
    /// no order to the oracle.
    ///
    /// # Errors
    /// As [`Sim::launch`].
    #[track_caller]
    pub fn wait_value(&self, stream: RawStream, address: u64, value: u64) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_stream(WAIT_VALUE, stream)?;
        let task = Task::new("wait for a value", site, Work::WaitValue { address, value });
        self.machine.submit(state, index, task).map(drop).map_err(error_of_name(WAIT_VALUE))
    }

    /// Queues a host call (`cuLaunchHostFunc`). Its declared accesses are checked now. It runs when
    /// the item runs.
    ///
    /// # Errors
    /// As [`Sim::launch`].
    #[track_caller]
    #[doc(hidden)]
    pub fn host_callback(&self, stream: RawStream, callback: Callback) -> Result<CallbackToken> {
        let site = caller_site();
        let (state, index) = self.enter_stream(CALLBACK, stream)?;
        let Callback { name, accesses, call } = callback;
        let call = QueuedCallback::new(call);
        let token = call.token(self.clone());
        let host = accesses.into_iter().map(|(address, bytes, access)| {
            let kind = if access.writes() { ActionKind::Write } else { ActionKind::Read };
            HostUse { address, bytes, kind, by_device: false }
        });
        let task = Task { host: host.collect(), ..Task::new(name, site, Work::Callback(call)) };
        let queued =
            self.machine.submit(state, index, task).map(|_| token).map_err(error_of_name(CALLBACK));
        self.machine.checkpoint();
        queued
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

    /// Copies to the device on its legacy stream (`cuMemcpyHtoD`). From pinned memory the host
    /// waits until the bytes have arrived. From pageable memory it waits only until they are
    /// staged.
    ///
    /// # Safety
    /// 1. `from` is readable for `bytes`, and is not written during the call.
    ///
    /// # Errors
    /// Invalid value for a host range that spans two registrations.
    #[track_caller]
    pub unsafe fn copy_to_device_now(
        &self,
        device: DeviceId,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_legacy(COPY_TO_DEVICE, device)?;
        // SAFETY: 1. is promised by the caller. The copy is done, or staged, when this returns.
        let queued = unsafe { self.machine.queue_to_device(state, index, to, from, bytes, site) };
        let (state, pinned) = queued.map_err(error_of_name(COPY_TO_DEVICE))?;
        if pinned {
            self.synchronize(state, index, COPY_TO_DEVICE)?;
        } else {
            drop(state);
        }
        self.machine.checkpoint();
        Ok(())
    }

    /// Copies to the host on the legacy stream (`cuMemcpyDtoH`). The host waits until the bytes
    /// have arrived.
    ///
    /// # Safety
    /// 1. `to` is writable for `bytes`, and there is no other access to it during the call.
    ///
    /// # Errors
    /// Invalid value for a host range that spans two registrations.
    #[track_caller]
    pub unsafe fn copy_to_host_now(
        &self,
        device: DeviceId,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_legacy(COPY_TO_HOST, device)?;
        // SAFETY: 1. is promised by the caller. The copy is done when this returns.
        let queued = unsafe { self.machine.queue_to_host(state, index, to, from, bytes, site) };
        let (state, _) = queued.map_err(error_of_name(COPY_TO_HOST))?;
        self.synchronize(state, index, COPY_TO_HOST)?;
        self.machine.checkpoint();
        Ok(())
    }

    /// Copies on the device on its legacy stream (`cuMemcpyDtoD`). The driver calls this
    /// copy synchronous, but it gives the host no order.
    ///
    /// # Errors
    /// Errors of a lost device.
    #[track_caller]
    pub fn copy_on_device_now(
        &self,
        device: DeviceId,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_legacy(COPY_ON_DEVICE, device)?;
        let queued = self.machine.queue_on_device(state, index, to, from, bytes, site);
        queued.map(drop).map_err(error_of_name(COPY_ON_DEVICE))?;
        self.machine.checkpoint();
        Ok(())
    }

    /// Fills on the device's legacy stream (`cuMemsetD8`). It gives the host no order.
    ///
    /// # Errors
    /// Errors of a lost device.
    #[track_caller]
    pub fn fill_now(&self, device: DeviceId, to: u64, byte: u8, bytes: u64) -> Result<()> {
        let site = caller_site();
        let (state, index) = self.enter_legacy(FILL, device)?;
        let queued = self.machine.queue_fill(state, index, to, Pattern::Byte(byte), bytes, site);
        queued.map(drop).map_err(error_of_name(FILL))?;
        self.machine.checkpoint();
        Ok(())
    }

    fn enter_stream(
        &self,
        call: &'static str,
        stream: RawStream,
    ) -> Result<(StateGuard<'_>, usize)> {
        let mut state = self.machine.enter_named(call, stream.device())?;
        let index = state.stream(stream).map_err(error_of_name(call))?;
        Ok((state, index))
    }

    fn enter_legacy(
        &self,
        call: &'static str,
        device: DeviceId,
    ) -> Result<(StateGuard<'_>, usize)> {
        let mut state = self.machine.enter_named(call, device)?;
        let index = state.legacy_stream(device).map_err(error_of_name(call))?;
        Ok((state, index))
    }

    /// Waits for all work queued on a stream, and orders the host after it.
    fn synchronize(&self, state: StateGuard<'_>, index: usize, call: &'static str) -> Result<()> {
        let device = state.streams[index].device;
        let point = state.point(index);
        let mut state = self.machine.run_until(state, point.stream, point.count);
        state.device(device).map_err(error_of_name(call))?;
        state.order_host_after(&point.clock);
        Ok(())
    }
}
