//! Copies and fills in safe code.
//!
//! A copy is queued and runs later, while Rust would let the host side be freed or written. So the
//! host side is either *owned* by the copy or *borrowed in a scope* that waits:
//!
//! - [`Stream::upload`] and [`Stream::download`] take it by value and answer with an [`InFlight`]
//!   that gives it back. Its allocator has promised ([`DeferReuse`](aquifer_core::DeferReuse)) to
//!   hold the block back until the copy is done, so the flight may be dropped, and the block goes
//!   home by itself; or forgotten, and the block is leaked. Neither is a race.
//! - [`Stream::scope`] lets copies borrow, and waits for them before it returns, also on unwind. A
//!   guard that waits when it is dropped would not do: it can be forgotten.
//!
//! The device side needs neither: its pool knows which streams use it. What is written is held by
//! `&mut`, and is [`OperandMut`](aquifer_driver::OperandMut): a part that is only borrowed to be
//! read is not.
//!
//! | copy | whole | row by row |
//! |---|---|---|
//! | host → device | [`Stream::upload`], [`Scope::upload`] | [`Stream::upload_2d`], [`Scope::upload_2d`] |
//! | device → host | [`Stream::download`], [`Scope::download`] | [`Stream::download_2d`], [`Scope::download_2d`] |
//! | on a device | [`Stream::copy`] | [`Stream::copy_2d`] |
//! | to another device | [`Stream::copy_to_peer`] | – |
//! | fill | [`Stream::fill`], [`Stream::fill_bytes`] | [`Stream::fill_2d`] |
//!
//! A stream that captures a graph refuses copies between host and device: they would run again at
//! every launch of the graph, with a host side that has long gone back. Fills and copies on a
//! device may be captured.
//!
//! A flight may be awaited, and so may a [`Point`](crate::Point) in a stream. A thread of
//! [`aquifer_core::wake`] asks the driver meanwhile; it is started by the first future that has to
//! wait. [`InFlight::is_done`] never blocks either and needs no thread.
#![expect(unsafe_code, reason = "calls the driver's asynchronous copies")]

mod device;
mod fill;
mod flight;
mod grid;
mod scope;

pub use flight::{HostOwned, InFlight, Landing, Refused};
pub use grid::Grid;
pub use scope::Scope;

use crate::Stream;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{DeviceRange, Operand, Pitched};
use std::ptr::NonNull;

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Up,
    Down,
}

/// A copy between host and device that has been seen to lie within both.
#[derive(Clone, Copy)]
struct Plan {
    way: Direction,
    /// In bytes.
    whole: u64,
    rows: Option<grid::ByteGrid>,
}

impl Plan {
    /// A copy between `host` elements and all of `range`, or the rows of `grid` in them. Refused
    /// while the stream captures: it would run whenever the graph is launched, long after its host
    /// side has gone back.
    fn new<T>(
        stream: &Stream,
        way: Direction,
        host: usize,
        (range, machine): (DeviceRange, Option<u64>),
        grid: Option<Grid>,
    ) -> Result<Self> {
        stream.check_range(range, machine)?;
        if stream.timeline().is_capturing()? {
            return Err(MemoryError::Capturing { stream: stream.raw().handle() });
        }
        let element = size_of::<T>() as u64;
        let host = element * host as u64;
        let (from, to) =
            if way == Direction::Up { (host, range.bytes) } else { (range.bytes, host) };
        let Some(grid) = grid else {
            return if from == to {
                Ok(Self { way, whole: from, rows: None })
            } else {
                Err(MemoryError::LengthMismatch { from, to })
            };
        };
        let rows = grid.in_bytes(element, from, to)?;
        Ok(Self { way, whole: rows.bytes(), rows: Some(rows) })
    }

    /// # Safety
    /// 1. `host` and `device` are as long as was planned, and valid until the copy is done. 2. The
    ///    operand has been ordered for it.
    unsafe fn queue(self, stream: &Stream, host: NonNull<u8>, device: u64) -> Result<()> {
        if self.whole == 0 {
            return Ok(());
        }
        let (driver, raw) = (stream.driver(), stream.raw());
        let _calling = stream.timeline().calling()?;
        let whole = self.whole as usize;
        let queued = match (self.way, self.rows) {
            // SAFETY: 1. and 2. the caller's.
            (Direction::Up, None) => unsafe { driver.copy_to_device(raw, device, host, whole) },
            // SAFETY: 1. and 2. the caller's.
            (Direction::Down, None) => unsafe { driver.copy_to_host(raw, host, device, whole) },
            (Direction::Up, Some(grid)) => {
                let to = Pitched { start: device, pitch: grid.to_pitch };
                let from = Pitched { start: host, pitch: grid.from_pitch };
                // SAFETY: 1. and 2. the caller's: the rows lie in both.
                unsafe { driver.copy_2d_to_device(raw, to, from, grid.rows) }
            }
            (Direction::Down, Some(grid)) => {
                let to = Pitched { start: host, pitch: grid.to_pitch };
                let from = Pitched { start: device, pitch: grid.from_pitch };
                // SAFETY: 1. and 2. the caller's: the rows lie in both.
                unsafe { driver.copy_2d_to_host(raw, to, from, grid.rows) }
            }
        };
        queued.map_err(|e| MemoryError::driver(stream.device(), e))
    }
}

impl Stream {
    /// Refuses an operand of another device or machine.
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
