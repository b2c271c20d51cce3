//! A device as a policy sees it.

use aquifer_core::DeviceId;
use std::time::Duration;

/// A device as a policy sees it.
///
/// [`Policy`](super::Policy) has an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Candidate<'a> {
    /// The index among the runtime's devices.
    pub index: usize,
    /// The device.
    pub device: DeviceId,
    /// The generation: 1 at first, incremented each time the device was
    /// [restored](super::Placer::restore) after a loss.
    pub generation: u32,
    /// Bytes that its pool could provide: what its budget or the driver has left, whichever is
    /// less, plus what its caches hold.
    pub free: u64,
    /// The most bytes that its pool may have.
    pub total: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The devices whose memory its kernels can reach.
    pub peers: &'a [DeviceId],
    /// The distance from what the request is to be near, under
    /// [`Policy::Near`](super::Policy::Near), else 0. Comparable only within one request.
    pub far: u32,
    /// The age of the last sample of the driver's free memory and of the caches. The other figures
    /// are current.
    pub age: Duration,
}

impl Candidate<'_> {
    /// Creates a candidate with these figures and defaults for the rest.
    #[must_use]
    pub fn new(index: usize, device: DeviceId, free: u64, total: u64) -> Self {
        let (generation, compute_capability) = (1, (0, 0));
        let (peers, far, age): (&[_], _, _) = (&[], 0, Duration::ZERO);
        Self { index, device, generation, free, total, compute_capability, peers, far, age }
    }

    /// Returns whether its kernels can reach that device's memory.
    #[inline]
    #[must_use]
    pub fn reaches(&self, device: DeviceId) -> bool {
        self.device == device || self.peers.contains(&device)
    }
}
