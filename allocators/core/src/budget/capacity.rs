//! A capacity that other processes share.

use super::refusal::HeldElsewhere;

/// The refusal of a claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimShortage {
    /// Bytes that a claim could have taken.
    pub room: u64,
    /// What other processes hold.
    pub elsewhere: HeldElsewhere,
}

impl From<u64> for ClaimShortage {
    /// The refusal of a source that tells nothing of other processes.
    fn from(room: u64) -> Self {
        Self { room, elsewhere: HeldElsewhere::default() }
    }
}

/// Where a root budget claims the bytes that it grants.
///
/// Nothing here is called with a lock of the budget held.
pub trait CapacitySource: Send + Sync {
    /// Claims `bytes`, or nothing. Does not wait for other processes to release any.
    ///
    /// A claim comes before its charge. Of several threads that claim at once, some may then be
    /// refused by a limit of the tree, and release what they have claimed.
    ///
    /// # Errors
    /// [`ClaimShortage`].
    fn claim(&self, bytes: u64) -> Result<(), ClaimShortage>;

    /// Releases claimed bytes. Must not block.
    fn release(&self, bytes: u64);

    /// Returns the bytes that a claim could take now.
    fn room(&self) -> u64;

    /// Returns how many bytes a reclaimer has to obtain before a claim of `bytes` is granted, or 0
    /// if it would be granted now.
    fn shortfall(&self, bytes: u64) -> u64;

    /// Returns what a refused claim of `bytes` would return now.
    fn shortage(&self, _bytes: u64) -> ClaimShortage {
        self.room().into()
    }
}
