//! Which memory can be registered, and names of ranges.
#![expect(unsafe_code, reason = "promises that memory stays in place")]

use crate::NixlError;
use aquifer_device::AddressRegistration;
use std::ffi::c_int;

/// Where memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryPlace {
    /// In host memory.
    Host,
    /// On the device of this number, as CUDA counts in this process.
    Device(u32),
}

impl MemoryPlace {
    /// Returns NIXL's number of the kind of memory.
    pub(crate) fn kind(self) -> c_int {
        match self {
            Self::Host => 0,
            Self::Device(_) => 1,
        }
    }

    /// Returns NIXL's number of the device.
    pub(crate) fn device(self) -> u64 {
        match self {
            Self::Host => 0,
            Self::Device(device) => u64::from(device),
        }
    }
}

/// A range of memory that does not move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FixedRange {
    /// Where it lies.
    pub place: MemoryPlace,
    /// The address of its first byte, for the host or the device.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

impl FixedRange {
    /// Returns a part of the range, which may be empty.
    pub(crate) fn part(self, offset: u64, bytes: u64) -> Result<Self, NixlError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => {
                Ok(Self { address: self.address + offset, bytes, ..self })
            }
            _ => Err(NixlError::OutOfBounds { offset, bytes, within: self.bytes }),
        }
    }
}

/// Memory that stays in place as long as the value lives, so that a transport can know it by its
/// address.
///
/// [`AddressRegistration`] is, of a [`StableBlock`](aquifer_device::StableBlock). Other blocks of a
/// pool are not: with [`Parkable`](aquifer_device::Parkable) memory the physical memory goes away
/// under the address, and no registration learns of it. So the compiler refuses them:
///
/// ```compile_fail,E0277
/// # fn register(agent: &aquifer_nixl::NixlAgent, memory: aquifer::Parkable) {
/// let refused = agent.register(std::sync::Arc::new(memory));
/// # }
/// ```
///
/// # Safety
/// The range is valid memory, for reads and writes by peers, until the value is dropped. It has the
/// same physical memory all that time. No Rust reference to its bytes exists while it is
/// registered.
#[diagnostic::on_unimplemented(
    message = "`{Self}` may move or be given back while it is registered",
    note = "register a `StableBlock`, by its `register()`, or take pinned memory from a `RegisteredPool`"
)]
pub unsafe trait FixedMemory: Send + Sync + 'static {
    /// Returns the range: always the same one.
    fn fixed_range(&self) -> FixedRange;
}

// SAFETY: 1. the registration keeps the address mapped to the same memory until it is dropped, also
// if the block is freed. 2. device memory has no Rust references.
unsafe impl FixedMemory for AddressRegistration {
    fn fixed_range(&self) -> FixedRange {
        let range = self.range();
        let place = MemoryPlace::Device(range.device.0);
        FixedRange { place, address: range.address, bytes: range.bytes }
    }
}

/// A range of registered memory, as a peer names it. It is valid for peers that have the metadata
/// of its agent, as long as the registration lives.
///
/// ```
/// use aquifer_nixl::{FixedRange, MemoryPlace, NixlError, RemoteRange};
/// let mut sent = [0; 24]; // as `RegisteredPart::location` and `RemoteRange::to_bytes` make it
/// sent[..8].copy_from_slice(&0x7f00_0000_0000_u64.to_le_bytes());
/// sent[8..16].copy_from_slice(&4096_u64.to_le_bytes());
/// let FixedRange { place, bytes, .. } = RemoteRange::from_bytes(sent)?.range();
/// assert_eq!((place, bytes), (MemoryPlace::Host, 4096));
/// assert!(matches!(RemoteRange::from_bytes([0xff; 24]), Err(NixlError::BadLocation)));
/// # Ok::<(), NixlError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteRange(pub(crate) FixedRange);

impl RemoteRange {
    /// Returns where it lies, for its agent.
    #[must_use]
    pub fn range(&self) -> FixedRange {
        self.0
    }

    /// Returns the range as bytes, to be sent: address, length, the device or 0, and the kind, as
    /// little-endian numbers of eight, eight, four and four bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 24] {
        let FixedRange { place, address, bytes } = self.0;
        let mut sent = [0; 24];
        sent[..8].copy_from_slice(&address.to_le_bytes());
        sent[8..16].copy_from_slice(&bytes.to_le_bytes());
        sent[16..20].copy_from_slice(&(place.device() as u32).to_le_bytes());
        sent[20..].copy_from_slice(&place.kind().to_le_bytes());
        sent
    }

    /// Returns the range that [`RemoteRange::to_bytes`] has encoded. A wrong range is refused by
    /// the transfer.
    ///
    /// # Errors
    /// [`NixlError::BadLocation`] for an empty range, one that wraps around, and an unknown kind.
    pub fn from_bytes(sent: [u8; 24]) -> Result<Self, NixlError> {
        let eight = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&sent[at..at + 8]);
            u64::from_le_bytes(number)
        };
        let (address, bytes, last) = (eight(0), eight(8), eight(16));
        let place = match (last >> 32, last as u32) {
            (0, 0) => MemoryPlace::Host,
            (1, device) => MemoryPlace::Device(device),
            _ => return Err(NixlError::BadLocation),
        };
        if bytes == 0 || address.checked_add(bytes).is_none() {
            return Err(NixlError::BadLocation);
        }
        Ok(Self(FixedRange { place, address, bytes }))
    }
}
