//! Copies within a device and between devices.
#![expect(unsafe_code, reason = "calls the driver's asynchronous copies")]

use crate::Stream;
use aquifer_core::{DriverError, MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, Operand, OperandMut, Rows, Typed, site};
use bytemuck::Pod;

/// The rows of [`Stream::copy_2d`], in elements.
///
/// The first row starts at the start of its side. For rows that start further on, pass a slice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grid {
    /// Elements in a row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Elements from the start of one row of the source to the start of the next. At least
    /// `width`.
    pub from_pitch: usize,
    /// The same for the destination.
    pub to_pitch: usize,
}

impl Stream {
    /// Copies the rows of `grid` between two operands of this device, in order on this stream
    /// (`cuMemcpy2DAsync`). The elements between the rows of the destination are unchanged.
    ///
    /// ```
    /// use aquifer::{OperandMut, Stream, Typed, error::Result, stream::Grid};
    ///
    /// /// Copies a tile of 64 × 16 from the upper left corner of an image 1920 wide.
    /// fn tile<T: Typed<Item = f32> + OperandMut>(s: &Stream, image: &T, tile: &mut T) -> Result<()> {
    ///     s.copy_2d(image, tile, Grid { width: 64, height: 16, from_pitch: 1920, to_pitch: 64 })
    /// }
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`] for rows outside one of the sides or a pitch less than the
    /// width, sides that overlap, a conflicting use, and driver errors. Nothing is queued then.
    #[track_caller]
    pub fn copy_2d<T, S, D>(&self, from: S, to: &mut D, grid: Grid) -> Result<()>
    where
        T: Pod,
        S: Typed<Item = T>,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        let (source, target) = (from.range(), to.range());
        self.check_operand(&from)?;
        self.check_operand(to)?;
        let bytes = |elements: usize| (elements as u64).saturating_mul(size_of::<T>() as u64);
        let rows = Rows {
            width: bytes(grid.width),
            height: grid.height as u64,
            from_pitch: bytes(grid.from_pitch),
            to_pitch: bytes(grid.to_pitch),
        };
        let within = |side: DeviceRange, pitch: u64| match rows.span(pitch) {
            Some(bytes) if bytes <= side.bytes => Ok(DeviceRange { bytes, ..side }),
            span => Err(MemoryError::OutOfBounds {
                offset: 0,
                len: span.unwrap_or(u64::MAX),
                bytes: side.bytes,
            }),
        };
        let parts = (within(source, rows.from_pitch)?, within(target, rows.to_pitch)?);
        self.queue_copy(&from, to, parts, |source, target| {
            // SAFETY: 1. the operands keep their ranges, the rows lie within them, and the ranges
            // do not overlap. 2. both were ordered for this access on this stream.
            unsafe { self.driver().copy_rows(self.raw(), target.address, source.address, rows) }
        })
    }

    /// Copies between two operands of this device, in order on this stream (`cuMemcpyDtoDAsync`).
    /// Earlier uses of the operands on other streams are waited for.
    ///
    /// # Errors
    /// Lengths that differ, ranges that overlap, a conflicting use, and driver errors. Nothing is
    /// queued then.
    #[track_caller]
    pub fn copy<T, S, D>(&self, from: S, to: &mut D) -> Result<()>
    where
        T: Pod,
        S: Typed<Item = T>,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        let (source, target) = (from.range(), to.range());
        self.check_operand(&from)?;
        self.check_operand(to)?;
        check_same_length(source, target)?;
        self.queue_copy(&from, to, (source, target), |source, target| {
            let (driver, bytes) = (self.driver(), source.bytes);
            // SAFETY: 1. and 2. the operands keep their ranges, and were ordered for this access on
            // this stream.
            unsafe { driver.copy_on_device(self.raw(), target.address, source.address, bytes) }
        })
    }

    /// Orders this stream for a copy between parts of two operands, and queues it by `copy`. An
    /// empty one is not queued.
    fn queue_copy(
        &self,
        from: &impl Operand,
        to: &mut impl OperandMut,
        (source, target): (DeviceRange, DeviceRange),
        copy: impl FnOnce(DeviceRange, DeviceRange) -> Result<(), DriverError>,
    ) -> Result<()> {
        check_disjoint(source, target)?;
        from.order(self.raw(), Some(self.timeline().keep_alive()), Access::Read)?;
        to.order_mut(self.raw(), Some(self.timeline().keep_alive()), Access::Write)?;
        if source.bytes == 0 {
            return Ok(());
        }
        let _calling = self.timeline().calling()?;
        copy(source, target).map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Copies to an operand of another device, in order on this stream and on `peer`, a stream of
    /// that device (`cuMemcpyPeerAsync`). The driver copies through the host if the devices have no
    /// peer access.
    ///
    /// The copy runs on this stream, after the work queued on `peer` so far. Later work on `peer`
    /// runs after the copy. The host does not wait.
    ///
    /// # Errors
    /// Lengths that differ, an operand that is not on its stream's device, a conflicting use, and
    /// driver errors. Nothing is queued then, with one exception: if the driver refuses to make
    /// `peer` wait, this call waits for the copy as at the end of a [scope](Stream::scope), and
    /// the copy is complete.
    #[track_caller]
    pub fn copy_to_peer<T, S, D>(&self, from: S, to: &mut D, peer: &Stream) -> Result<()>
    where
        T: Pod,
        S: Typed<Item = T>,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        let (source, target) = (from.range(), to.range());
        self.check_operand(&from)?;
        peer.check_operand(to)?;
        check_same_length(source, target)?;
        check_disjoint(source, target)?;
        from.order(self.raw(), Some(self.timeline().keep_alive()), Access::Read)?;
        to.order_mut(peer.raw(), Some(peer.timeline().keep_alive()), Access::Write)?;
        if source.bytes == 0 {
            return Ok(());
        }
        self.timeline().wait_for(peer.timeline(), peer.timeline().open())?;
        {
            let _calling = self.timeline().calling()?;
            // SAFETY: 1. the operands keep their ranges. 2. the source was ordered for this stream,
            // and the destination for `peer`. This stream has waited for `peer`, and `peer`
            // waits for this stream below, so the copy is ordered like work on `peer`.
            let copied = unsafe {
                self.driver().copy_on_device(
                    self.raw(),
                    target.address,
                    source.address,
                    source.bytes,
                )
            };
            copied.map_err(|e| MemoryError::driver(self.device(), e))?;
        }
        let waits = peer.timeline().wait_for(self.timeline(), self.timeline().open());
        if waits.is_err() {
            // Work on `peer` would not be ordered after the copy. A lost device, where this fails
            // too, runs nothing any more.
            self.timeline().settle_or_abort()?;
        }
        waits?;
        Ok(())
    }
}

fn check_same_length(from: DeviceRange, to: DeviceRange) -> Result<()> {
    if from.bytes == to.bytes {
        Ok(())
    } else {
        Err(MemoryError::LengthMismatch { from: from.bytes, to: to.bytes })
    }
}

/// Returns an error for ranges that overlap: the result of such a copy would be undefined.
fn check_disjoint(from: DeviceRange, to: DeviceRange) -> Result<()> {
    let before = |a: DeviceRange, b: DeviceRange| a.address.saturating_add(a.bytes) <= b.address;
    if from.bytes == 0 || to.bytes == 0 || before(from, to) || before(to, from) {
        return Ok(());
    }
    // All devices of a process share one address space.
    let bytes = from.bytes.max(to.bytes);
    Err(MemoryError::Overlap { from: from.address, to: to.address, bytes })
}
