//! Asynchronous copies and fills in safe code.
//!
//! A copy is queued and runs later, while Rust would allow the host side to be freed or written. So
//! the host side is either *owned* by the copy or *borrowed in a scope* that waits:
//!
//! - [`Stream::upload`] and [`Stream::download`] take it by value and return an [`InFlight`] that
//!   returns it later. Its allocator guarantees ([`DeferReuse`](aquifer_core::DeferReuse)) that the
//!   block is not reused until the copy is complete. So the `InFlight` may be dropped, and the
//!   block returns to its allocator by itself. If it is forgotten, the block leaks. Neither is a
//!   race.
//! - [`Stream::scope`] lets copies borrow, and waits for them before it returns, also on unwind. A
//!   guard that waits in `drop` would be unsound, because it can be forgotten.
//!
//! The device side needs neither, because its pool tracks which streams use it. A destination is
//! borrowed by `&mut` and is an [`OperandMut`](aquifer_driver::OperandMut), which a shared part is
//! not.
//!
//! | copy | method |
//! |---|---|
//! | host → device, owned | [`Stream::upload`] |
//! | host → device, borrowed | [`CopyScope::upload`] |
//! | device → host, owned | [`Stream::download`] |
//! | device → host, borrowed | [`CopyScope::download`] |
//! | within a device | [`Stream::copy`], by rows [`Stream::copy_2d`] |
//! | to another device | [`Stream::copy_to_peer`] |
//! | fill | [`Stream::fill`], [`Stream::fill_bytes`] |
//!
//! A stream that captures a graph refuses copies between host and device. They would run again at
//! every launch of the graph, after the host side has been released. Fills and copies on a device
//! may be captured.
//!
//! An `InFlight` may be awaited, and so may a [`Point`](crate::Point) in a stream. A thread of
//! [`aquifer_core::wake`] then polls the driver. The first future that has to wait starts it.
//! [`InFlight::is_done`] never blocks and needs no thread.
#![expect(unsafe_code, reason = "calls the driver's asynchronous copies")]

mod device;
mod fill;
mod in_flight;
mod scope;

pub use device::Grid;
pub use in_flight::{HostOwned, InFlight, Landing, RefusedCopy};
pub use scope::CopyScope;

use crate::Stream;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{DeviceRange, Operand};
use std::ptr::NonNull;

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Upload,
    Download,
}

/// A copy between host and device that lies within both sides.
#[derive(Clone, Copy)]
struct CopyPlan {
    direction: Direction,
    /// In bytes.
    bytes: u64,
}

impl CopyPlan {
    /// Plans a copy between `host` elements and all of `range`. Refused while the stream captures:
    /// the copy would run at each launch of the graph, after its host side has been released.
    fn new<T>(
        stream: &Stream,
        direction: Direction,
        host: usize,
        (range, machine): (DeviceRange, Option<u64>),
    ) -> Result<Self> {
        stream.check_range(range, machine)?;
        if stream.timeline().is_capturing()? {
            return Err(MemoryError::Capturing { stream: stream.raw().handle() });
        }
        let element = size_of::<T>() as u64;
        let host = element * host as u64;
        let (from, to) =
            if direction == Direction::Upload { (host, range.bytes) } else { (range.bytes, host) };
        if from == to {
            Ok(Self { direction, bytes: from })
        } else {
            Err(MemoryError::LengthMismatch { from, to })
        }
    }

    /// # Safety
    /// 1. `host` and `device` have the planned lengths and stay valid until the copy is complete.
    /// 2. The operand has been ordered for the copy.
    unsafe fn queue(self, stream: &Stream, host: NonNull<u8>, device: u64) -> Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        let (driver, raw) = (stream.driver(), stream.raw());
        let _calling = stream.timeline().calling()?;
        let bytes = self.bytes as usize;
        // SAFETY: 1. and 2. the caller guarantees them.
        let queued = unsafe {
            match self.direction {
                Direction::Upload => driver.copy_to_device(raw, device, host, bytes),
                Direction::Download => driver.copy_to_host(raw, host, device, bytes),
            }
        };
        queued.map_err(|e| MemoryError::driver(stream.device(), e))
    }
}

impl Stream {
    /// Returns an error for an operand of another device or machine.
    fn check_operand<D: Operand + ?Sized>(&self, operand: &D) -> Result<()> {
        self.check_range(operand.range(), operand.machine())
    }

    fn check_range(&self, range: DeviceRange, machine: Option<u64>) -> Result<()> {
        if range.device != self.device() {
            return Err(MemoryError::WrongDevice { expected: self.device(), actual: range.device });
        }
        let expected = self.driver().machine();
        match machine.filter(|&actual| actual != expected) {
            Some(actual) => Err(MemoryError::OtherMachine { expected, actual }),
            None => Ok(()),
        }
    }
}
