//! The names of ledgers: which memory each is for.
//!
//! Processes meet in a ledger by its name alone, so a name is formed and parsed here only.

use std::fmt;

const GPU: &str = "GPU-";
const SIMULATED: &str = "simulated-";
const PINNED: &str = "pinned-memory";

/// The memory that a ledger is for. Its text is the name of the ledger.
///
/// ```
/// use aquifer_status::ledger::LedgerMemory;
/// let gpu = LedgerMemory::Address("0000:1b:00.0".to_owned());
/// assert_eq!(gpu.to_string(), "GPU-0000-1b-00.0");
/// assert_eq!(LedgerMemory::of("GPU-0000-1b-00.0"), gpu);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LedgerMemory {
    /// The GPU with this UUID.
    Uuid([u8; 16]),
    /// The GPU at this PCI address, of a driver that says no UUID.
    Address(String),
    /// The GPU with this ordinal, of a driver that says neither.
    Ordinal(u32),
    /// The simulated GPU with this ordinal, which is not one of the machine's.
    Simulated(u32),
    /// Pinned memory.
    Pinned,
    /// A memory that a program has named.
    Other(String),
}

impl LedgerMemory {
    /// Returns the memory of a GPU, by the first of these that its driver tells.
    ///
    /// ```
    /// use aquifer_status::ledger::LedgerMemory;
    /// let told = LedgerMemory::gpu(None, Some("0000:1b:00.0".to_owned()), 0);
    /// assert_eq!(told.address(), Some("0000:1b:00.0"));
    /// assert_eq!(LedgerMemory::gpu(None, None, 2).ordinal(), Some(2));
    /// ```
    pub fn gpu(uuid: Option<[u8; 16]>, address: Option<String>, ordinal: u32) -> Self {
        match (uuid, address) {
            (Some(uuid), _) => Self::Uuid(uuid),
            (None, Some(address)) => Self::Address(address),
            (None, None) => Self::Ordinal(ordinal),
        }
    }

    /// Returns the memory that the ledger of this name is for.
    pub fn of(name: &str) -> Self {
        let gpu = |device: &str| {
            let uuid = uuid_of(device).map(Self::Uuid);
            let address = || address_of(device).map(Self::Address);
            uuid.or_else(address).or_else(|| ordinal_of(device).map(Self::Ordinal))
        };
        let simulated = |device| ordinal_of(device).map(Self::Simulated);
        let memory = match (name.strip_prefix(GPU), name.strip_prefix(SIMULATED)) {
            (Some(device), _) => gpu(device),
            (_, Some(device)) => simulated(device),
            _ => (name == PINNED).then_some(Self::Pinned),
        };
        memory.unwrap_or_else(|| Self::Other(name.to_owned()))
    }

    /// Returns `device` or `pinned`, as pools of such memory say, or `None` if it is not known.
    pub fn kind(&self) -> Option<&'static str> {
        match self {
            Self::Uuid(_) | Self::Address(_) | Self::Ordinal(_) | Self::Simulated(_) => {
                Some("device")
            }
            Self::Pinned => Some("pinned"),
            Self::Other(_) => None,
        }
    }

    /// Returns the UUID of the GPU with hyphens, or `None` if another memory is meant.
    pub fn uuid(&self) -> Option<String> {
        let Self::Uuid(uuid) = self else { return None };
        let digits = hex(uuid);
        let parts = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)];
        Some(parts.map(|(from, to)| &digits[from..to]).join("-"))
    }

    /// Returns the PCI address of the GPU, if the ledger is named by that.
    pub fn address(&self) -> Option<&str> {
        if let Self::Address(address) = self { Some(address) } else { None }
    }

    /// Returns the ordinal of the GPU, if the ledger is named by that.
    pub fn ordinal(&self) -> Option<u32> {
        if let Self::Ordinal(ordinal) | Self::Simulated(ordinal) = self {
            Some(*ordinal)
        } else {
            None
        }
    }
}

impl fmt::Display for LedgerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(uuid) => write!(f, "{GPU}{}", hex(uuid)),
            // The name of a ledger has no colons.
            Self::Address(address) => write!(f, "{GPU}{}", address.replace(':', "-")),
            Self::Ordinal(ordinal) => write!(f, "{GPU}{ordinal}"),
            Self::Simulated(ordinal) => write!(f, "{SIMULATED}{ordinal}"),
            Self::Pinned => f.write_str(PINNED),
            Self::Other(name) => f.write_str(name),
        }
    }
}

fn hex(uuid: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*uuid))
}

fn is_lower_hex(text: &str) -> bool {
    text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

fn uuid_of(device: &str) -> Option<[u8; 16]> {
    let is_uuid = device.len() == 32 && is_lower_hex(device);
    is_uuid.then(|| u128::from_str_radix(device, 16).ok()).flatten().map(u128::to_be_bytes)
}

fn address_of(device: &str) -> Option<String> {
    let [domain, bus, slot] = device.split('-').collect::<Vec<_>>()[..] else { return None };
    let is_hex = |text: &str| text.bytes().all(|c| c.is_ascii_hexdigit());
    let is_address = is_hex(domain) && is_hex(bus) && slot.contains('.');
    is_address.then(|| format!("{domain}:{bus}:{slot}"))
}

/// Returns the number, if it is written as a ledger's name has it.
fn ordinal_of(device: &str) -> Option<u32> {
    device.parse().ok().filter(|ordinal: &u32| ordinal.to_string() == device)
}

#[cfg(test)]
mod tests {
    use super::LedgerMemory;

    #[test]
    fn the_name_of_a_ledger_says_which_memory_it_is_for() {
        let uuid = LedgerMemory::of("GPU-0123456789abcdef0123456789abcdef");
        let with_hyphens = "01234567-89ab-cdef-0123-456789abcdef";
        assert_eq!(uuid.uuid().as_deref(), Some(with_hyphens));
        let address = LedgerMemory::of("GPU-0000-1b-00.0");
        assert_eq!(address, LedgerMemory::Address("0000:1b:00.0".to_owned()));
        assert_eq!(LedgerMemory::of("GPU-3"), LedgerMemory::Ordinal(3));
        assert_eq!(LedgerMemory::of("simulated-1"), LedgerMemory::Simulated(1));
        assert_eq!(LedgerMemory::of("pinned-memory"), LedgerMemory::Pinned);
        let others =
            ["", "GPU-", "GPU-x", "pinned", "GPU-é", "simulated--1", "simulated-+1", "GPU-0-1-2"];
        for other in others {
            assert_eq!(LedgerMemory::of(other), LedgerMemory::Other(other.to_owned()));
        }
    }

    #[test]
    fn a_memory_is_found_again_by_the_name_of_its_ledger() {
        let memories = [
            LedgerMemory::Uuid([0; 16]),
            LedgerMemory::Uuid(*b"0123456789abcde\xff"),
            LedgerMemory::Address("0000:1b:00.0".to_owned()),
            LedgerMemory::Ordinal(0),
            LedgerMemory::Simulated(u32::MAX),
            LedgerMemory::Pinned,
            LedgerMemory::Other("the-cache".to_owned()),
        ];
        for memory in memories {
            assert_eq!(LedgerMemory::of(&memory.to_string()), memory);
        }
    }
}
