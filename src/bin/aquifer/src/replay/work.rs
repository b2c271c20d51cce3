//! What a replay does with the memory it is given.

use super::report::Violations;
use aquifer_core::{MemoryError, Result};
use aquifer_device::Block;
use aquifer_driver::{Access, Call, DeviceRange, sim::Sim};
use aquifer_stream::Stream;
use std::fmt::Debug;

/// Violations that are put into words.
pub(crate) const TOLD: usize = 4;

/// Where a block is, on the device of the streams that use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// Its first address.
    pub(crate) address: u64,
    /// Its size as asked for.
    pub(crate) bytes: u64,
    /// What tells it from every other block at that address, where somebody checks.
    pub(crate) generation: u64,
}

impl Spot {
    /// Where `block` is.
    #[inline]
    pub(crate) fn of(block: &Block) -> Self {
        Self { address: block.address(), bytes: block.bytes(), generation: block.generation() }
    }
}

/// Work on blocks. Implementations queue it and return at once.
pub(crate) trait Work: Debug + Send + Sync + 'static {
    /// The block's own stream writes all of it.
    fn write(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// A stream reads all of it.
    fn read(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// Driver calls that it has made itself.
    fn driver_calls(&self) -> Vec<(Call, u64)> {
        Vec::new()
    }

    /// Waits for everything that was queued, and answers with what the checks found.
    ///
    /// # Errors
    /// The driver's, if the work itself failed.
    fn verdict(&self) -> Result<Verdict>;
}

/// What the checks found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Verdict {
    /// Reads and writes that were checked.
    pub(crate) checked: u64,
    /// What was wrong.
    pub(crate) violations: Violations,
}

/// No work: for passes that time the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle;

impl Work for Idle {
    #[inline]
    fn write(&self, _: u32, _: Spot, _: &Stream) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn read(&self, _: u32, _: Spot, _: &Stream) -> Result<()> {
        Ok(())
    }

    fn verdict(&self) -> Result<Verdict> {
        Ok(Verdict::default())
    }
}

/// Reads and writes that the simulator's oracle is told of.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    sim: Sim,
}

impl Declared {
    /// Tells `sim`.
    pub(crate) fn new(sim: &Sim) -> Self {
        Self { sim: sim.clone() }
    }

    #[track_caller]
    fn tell(&self, spot: Spot, stream: &Stream, access: Access) -> Result<()> {
        let device = stream.device();
        let range = DeviceRange { device, address: spot.address, bytes: spot.bytes };
        let told = self.sim.access(stream.raw(), range, access, Some(spot.generation));
        told.map_err(|e| MemoryError::driver(device, e))
    }
}

impl Work for Declared {
    fn write(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Write)
    }

    fn read(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Read)
    }

    fn verdict(&self) -> Result<Verdict> {
        let found = self.sim.violations();
        let count = found.iter().map(|violation| violation.count).sum();
        let first = found.iter().take(TOLD).map(ToString::to_string).collect();
        Ok(Verdict { checked: self.sim.accesses_checked(), violations: Violations { count, first } })
    }
}
