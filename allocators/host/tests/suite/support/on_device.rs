//! Device memory without a pool.
#![allow(unsafe_code, reason = "implements an operand, and frees by hand")]

use aquifer_driver::{
    Access, DeviceId, DeviceRange, Driver, KeepAlive, Operand, OperandMut, RawStream, Typed,
    sim::Sim,
};
use aquifer_stream::{Stream, StreamPool};
use std::sync::Arc;

/// The device of the machines with one.
pub(crate) const GPU: DeviceId = DeviceId(0);

/// Device memory that one stream uses.
pub(crate) struct OnDevice {
    driver: Arc<dyn Driver>,
    pub(crate) range: DeviceRange,
}

impl OnDevice {
    pub(crate) fn new(driver: Arc<dyn Driver>, bytes: u64) -> Self {
        let address = driver.mem_alloc(GPU, bytes).unwrap();
        Self { driver, range: DeviceRange { device: GPU, address, bytes } }
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        // The driver waits for the device, but the oracle requires a host wait.
        self.driver.device_synchronize(GPU).unwrap();
        // SAFETY: 1. allocated by this driver and freed once. 2. nothing is queued any more.
        unsafe { self.driver.mem_free(GPU, self.range.address).unwrap() };
    }
}

// SAFETY: 1. its own allocation. 2. the test uses it from one stream, whose order is enough, and
// keeps it until the device is idle.
unsafe impl Operand for OnDevice {
    fn range(&self) -> DeviceRange {
        self.range
    }
    fn order(
        &self,
        _stream: RawStream,
        _alive: Option<KeepAlive>,
        _access: Access,
    ) -> aquifer_core::Result<()> {
        Ok(())
    }
}

// SAFETY: 1. the allocation has no other owner.
unsafe impl OperandMut for OnDevice {}

impl Typed for OnDevice {
    type Item = u8;
    fn len(&self) -> usize {
        self.range.bytes as usize
    }
}

/// Returns a stream, and the pool to which it returns.
pub(crate) fn stream(sim: &Sim) -> (StreamPool, Stream) {
    let streams = StreamPool::new(sim.driver(), GPU, 4);
    let stream = streams.lease().unwrap();
    (streams, stream)
}
