//! Lending memory to programs written against cudarc.
//!
//! cudarc's own slices free their memory through the driver, so memory of a pool must not become
//! one. It is *lent* instead: a [`Lent`] or [`LentMut`] borrows a buffer for one of the program's
//! streams. cudarc accepts it as a [`DevicePtr`], a [`DevicePtrMut`] or a kernel's argument.
//!
//! ```no_run
//! use aquifer::{OperandMut, Typed, cuda::Lend};
//! use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
//! use std::sync::Arc;
//!
//! fn scale<B: Typed<Item = f32> + OperandMut>(x: &mut B, by: f32, f: &CudaFunction, cu: &Arc<CudaStream>) -> Result<(), Error> {
//!     let n = x.len() as u32;
//!     let mut lent = x.on_mut(cu)?; // `cu` waits for earlier uses of `x`
//!     // SAFETY: 1. The kernel takes a float pointer, a float and a count.
//!     // It accesses `n` elements.
//!     unsafe { cu.launch_builder(f).arg(&mut lent).arg(&by).arg(&n).launch(LaunchConfig::for_num_elems(n)) }?;
//!     Ok(()) // the next use of `x` waits for the kernel
//! }
//! # #[derive(Debug)]
//! # enum Error { Memory(aquifer::MemoryError), Cudarc(cudarc::driver::DriverError) }
//! # impl From<aquifer::MemoryError> for Error { fn from(e: aquifer::MemoryError) -> Self { Self::Memory(e) } }
//! # impl From<cudarc::driver::DriverError> for Error { fn from(e: cudarc::driver::DriverError) -> Self { Self::Cudarc(e) } }
//! ```
//!
//! While memory is lent for writing, there is no other access to it:
//!
//! ```compile_fail,E0502
//! # use aquifer::{OperandMut, Typed, cuda::Lend, error::Result};
//! # use cudarc::driver::CudaStream;
//! # use std::sync::Arc;
//! fn twice<B: Typed<Item = f32> + OperandMut>(x: &mut B, cu: &Arc<CudaStream>) -> Result<usize> {
//!     let lent = x.on_mut(cu)?;
//!     let len = x.len(); // it is lent
//!     drop(lent);
//!     Ok(len)
//! }
//! ```
//!
//! Memory that is borrowed for reading cannot be lent for writing:
//!
//! ```compile_fail,E0277
//! # use aquifer::{Typed, cuda::Lend, error::Result};
//! # use cudarc::driver::CudaStream;
//! # use std::sync::Arc;
//! fn written<B: Typed<Item = f32>>(x: &mut B, cu: &Arc<CudaStream>) -> Result<()> {
//!     x.on_mut(cu).map(drop) // `B: OperandMut` is not known
//! }
//! ```
//!
//! # Ordering
//! ```text
//! host    x.on_mut(&cu)      launch              drop(lent)        s.copy(&x, …)
//!            │                  │                                      │
//! cu      ───┴─ waits for s ────┴─ kernel ────────────●                │
//!                                                     └─ event ─┐      │
//! s       ── work on x ──●                                      └ waits┴─ copy ──
//! ```
//! cudarc's launch passes an argument neither its stream nor the time at which the launch is
//! queued. So the stream is given when the argument is created, and the next user waits for *all*
//! work queued on it by then. The launch, which is already `unsafe` in cudarc, must be on that
//! stream.
//!
//! cudarc's copies do name their stream, but in a function that cannot return an error. If ordering
//! fails there (for example because the buffer's pool does not know the stream), the error is
//! recorded in cudarc's context, which returns it from its next safe call. The copy gets address 0,
//! which the driver refuses. So a copy that cannot be ordered does not run.
//!
//! # The opposite direction
//! A `CudaSlice` is [`Foreign`](crate::Foreign). It can be handed over by value and is then used
//! like other memory here, in stream order with cudarc's use of it, until it is returned or
//! dropped.

use super::codes;
use crate::{Access, KeepAlive, OperandMut, Typed};
use aquifer_core::{MemoryError, Result};
use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, DriverError, LaunchArgs, PushKernelArg,
    SyncOnDrop,
    sys::{CUdeviceptr, CUresult},
};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

mod stream;

use stream::raw_handle;
pub use stream::{keep_alive, raw_stream};

/// Memory that cudarc's kernels and copies may read while it is borrowed. Created by [`Lend::on`].
pub struct Lent<'a, B: Typed + ?Sized> {
    operand: &'a B,
    /// Kernels get a pointer to this field, and read it when they are launched.
    address: CUdeviceptr,
    stream: Arc<CudaStream>,
}

/// Memory that cudarc's kernels and copies may read and write while it is borrowed. Created by
/// [`Lend::on_mut`].
pub struct LentMut<'a, B: Typed + ?Sized> {
    operand: &'a mut B,
    /// As in [`Lent`].
    address: CUdeviceptr,
    stream: Arc<CudaStream>,
    /// A copy has used it, perhaps on another stream, for which a kernel must wait. Handles do not
    /// tell: that of a thread's default stream means another stream on every thread.
    copied: AtomicBool,
}

/// Lends typed memory to cudarc, on one of cudarc's streams.
pub trait Lend: Typed {
    /// Lends the memory for reading on `stream`, which waits for earlier writes. The host does not
    /// wait.
    ///
    /// # Errors
    /// Those of [`Operand::order`](crate::Operand::order).
    fn on(&self, stream: &Arc<CudaStream>) -> Result<Lent<'_, Self>> {
        order(self, stream, Some(keep_alive(stream)), Access::Read)?;
        Ok(Lent { address: self.range().address, operand: self, stream: stream.clone() })
    }

    /// Lends the memory for reading and writing on `stream`, which waits for all earlier uses. The
    /// host does not wait.
    ///
    /// # Errors
    /// Those of [`Operand::order`](crate::Operand::order).
    fn on_mut(&mut self, stream: &Arc<CudaStream>) -> Result<LentMut<'_, Self>>
    where
        Self: OperandMut,
    {
        self.order_mut(raw_handle(stream), Some(keep_alive(stream)), Access::ReadWrite)?;
        let address = self.range().address;
        Ok(LentMut {
            address,
            operand: self,
            stream: stream.clone(),
            copied: AtomicBool::new(false),
        })
    }
}

impl<B: Typed + ?Sized> Lend for B {}

fn order<B: Typed + ?Sized>(
    operand: &B,
    stream: &CudaStream,
    alive: Option<KeepAlive>,
    access: Access,
) -> Result<()> {
    operand.order(raw_handle(stream), alive, access)
}

/// Returns the address for a copy on `stream`, or 0 if it cannot be ordered.
fn address_on<B: Typed + ?Sized>(
    operand: &B,
    lent_on: &Arc<CudaStream>,
    stream: &CudaStream,
    access: Access,
) -> CUdeviceptr {
    let ordered = order(operand, stream, keep_alive_if_same(lent_on, stream), access);
    record_error(stream, ordered).map_or(0, |()| operand.range().address)
}

/// Returns a value that keeps `stream` alive if it has the handle of `lent_on`. cudarc passes other
/// streams without their `Arc`. Decides no order.
fn keep_alive_if_same(lent_on: &Arc<CudaStream>, stream: &CudaStream) -> Option<KeepAlive> {
    (**lent_on == *stream).then(|| keep_alive(lent_on))
}

/// Records an error in cudarc's context, which returns it from its next safe call.
fn record_error<T>(stream: &CudaStream, result: Result<T>) -> Option<T> {
    result.map_err(|e| stream.context().record_err::<()>(Err(DriverError(nearest_code(&e))))).ok()
}

/// Returns the nearest driver code, since cudarc's context can store nothing else.
fn nearest_code(error: &MemoryError) -> CUresult {
    match error {
        MemoryError::OutOfBudget(_) | MemoryError::OutOfMemory(_) => {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY
        }
        MemoryError::WrongDevice { .. } => CUresult::CUDA_ERROR_INVALID_DEVICE,
        MemoryError::UnknownId | MemoryError::OtherThread { .. } => {
            CUresult::CUDA_ERROR_INVALID_HANDLE
        }
        MemoryError::Busy { .. } => CUresult::CUDA_ERROR_NOT_PERMITTED,
        MemoryError::Unsupported { .. } => CUresult::CUDA_ERROR_NOT_SUPPORTED,
        MemoryError::TimedOut => CUresult::CUDA_ERROR_TIMEOUT,
        MemoryError::Driver(e) => match e.code {
            codes::INVALID_VALUE => CUresult::CUDA_ERROR_INVALID_VALUE,
            codes::OUT_OF_MEMORY => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            codes::DEINITIALIZED => CUresult::CUDA_ERROR_DEINITIALIZED,
            codes::INVALID_DEVICE => CUresult::CUDA_ERROR_INVALID_DEVICE,
            _ => CUresult::CUDA_ERROR_UNKNOWN,
        },
        _ => CUresult::CUDA_ERROR_UNKNOWN,
    }
}

/// Returns how many elements cudarc may access. Never more than the range holds, even if
/// [`Typed::len`] is wrong, since cudarc copies that many without another check.
fn element_count<B: Typed + ?Sized>(operand: &B) -> usize {
    let capacity = (operand.range().bytes as usize).checked_div(size_of::<B::Item>());
    capacity.map_or(0, |capacity| capacity.min(operand.len()))
}

impl<B: Typed + ?Sized> DeviceSlice<B::Item> for Lent<'_, B> {
    fn len(&self) -> usize {
        element_count(self.operand)
    }
    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<B: Typed + ?Sized> DevicePtr<B::Item> for Lent<'_, B> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        (address_on(self.operand, &self.stream, stream, Access::Read), SyncOnDrop::Record(None))
    }
}

impl<B: Typed + ?Sized> DeviceSlice<B::Item> for LentMut<'_, B> {
    fn len(&self) -> usize {
        element_count(self.operand)
    }
    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl<B: Typed + ?Sized> DevicePtr<B::Item> for LentMut<'_, B> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.copied.store(true, Ordering::Relaxed);
        (address_on(self.operand, &self.stream, stream, Access::Read), SyncOnDrop::Record(None))
    }
}

impl<B: Typed + OperandMut + ?Sized> DevicePtrMut<B::Item> for LentMut<'_, B> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.copied.store(true, Ordering::Relaxed);
        let alive = keep_alive_if_same(&self.stream, stream);
        let ordered = self.operand.order_mut(raw_handle(stream), alive, Access::ReadWrite);
        let address = record_error(stream, ordered).map_or(0, |()| self.operand.range().address);
        (address, SyncOnDrop::Record(None))
    }
}

#[expect(unsafe_code, reason = "cudarc's trait is unsafe to implement")]
// SAFETY: 1. A kernel's argument is a pointer to its value. This one is a `u64` that lives as long
// as the borrow, which covers the construction of the launch.
unsafe impl<'a, 'b: 'a, 'c: 'b, B: Typed + ?Sized> PushKernelArg<&'b Lent<'c, B>>
    for LaunchArgs<'a>
{
    #[inline(always)]
    fn arg(&mut self, lent: &'b Lent<'c, B>) -> &mut Self {
        self.arg(&lent.address)
    }
}

#[expect(unsafe_code, reason = "cudarc's trait is unsafe to implement")]
// SAFETY: 1. As for `Lent`.
unsafe impl<'a, 'b: 'a, 'c: 'b, B> PushKernelArg<&'b mut LentMut<'c, B>> for LaunchArgs<'a>
where
    B: Typed + OperandMut + ?Sized,
{
    #[inline(always)]
    fn arg(&mut self, lent: &'b mut LentMut<'c, B>) -> &mut Self {
        if std::mem::take(lent.copied.get_mut()) {
            // The kernel must run after a copy that has been recorded since.
            // If that order fails, the device is probably lost, and the kernel gets address 0.
            let (lent_on, alive) = (lent.stream.clone(), keep_alive(&lent.stream));
            let ordered =
                lent.operand.order_mut(raw_handle(&lent_on), Some(alive), Access::ReadWrite);
            if record_error(&lent_on, ordered).is_none() {
                lent.address = 0;
            }
        }
        self.arg(&lent.address)
    }
}

impl<B: Typed + ?Sized> fmt::Debug for Lent<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_lent("Lent", self.operand, &self.stream, f)
    }
}

impl<B: Typed + ?Sized> fmt::Debug for LentMut<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_lent("LentMut", self.operand, &self.stream, f)
    }
}

fn fmt_lent<B: Typed + ?Sized>(
    name: &str,
    operand: &B,
    lent_on: &CudaStream,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    f.debug_struct(name)
        .field("range", &operand.range())
        .field("stream", &lent_on.cu_stream())
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceId, DeviceRange, Operand, RawStream};

    /// An operand whose `len` is too large.
    struct OverstatedLen {
        bytes: u64,
        len: usize,
    }

    #[expect(unsafe_code, reason = "implements an unsafe trait for a range that no work accesses")]
    // SAFETY: 1. and 2. No work is ever queued with it.
    unsafe impl Operand for OverstatedLen {
        fn range(&self) -> DeviceRange {
            DeviceRange { device: DeviceId(0), address: 0x1000, bytes: self.bytes }
        }
        fn order(&self, _: RawStream, _: Option<KeepAlive>, _: Access) -> Result<()> {
            Ok(())
        }
    }

    impl Typed for OverstatedLen {
        type Item = f32;
        fn len(&self) -> usize {
            self.len
        }
    }

    #[test]
    fn lent_slice_is_never_longer_than_its_memory() {
        assert_eq!(element_count(&OverstatedLen { bytes: 4096, len: usize::MAX }), 1024);
        assert_eq!(element_count(&OverstatedLen { bytes: 4096, len: 10 }), 10);
        assert_eq!(element_count(&OverstatedLen { bytes: 3, len: 1 }), 0);
    }

    #[test]
    fn errors_map_to_the_nearest_code() {
        let driver = |code| MemoryError::Driver(codes::error("cuEventRecord", code));
        assert_eq!(nearest_code(&driver(2)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(nearest_code(&driver(31_337)), CUresult::CUDA_ERROR_UNKNOWN);
        assert_eq!(nearest_code(&MemoryError::UnknownId), CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(
            nearest_code(&MemoryError::Busy { address: 1 }),
            CUresult::CUDA_ERROR_NOT_PERMITTED
        );
    }
}
