//! The memories that processes share: all ledgers of this user, and which memory each is for.
//!
//! To read a ledger claims nothing, creates no file, joins none, and waits for no lock.

use aquifer_ledger::{Ledger, LedgerError, LedgerFigures, MemberFigures, folder_of_environment};
use serde_json::{Value, json};
use std::path::Path;

/// One ledger by its name, or why it cannot be read.
pub(crate) type SharedMemory = (String, Result<LedgerFigures, LedgerError>);

/// Reads all ledgers of this user, sorted by name. A ledger that cannot be read hides no other.
///
/// # Errors
/// [`LedgerError`] if the folder cannot be listed.
pub(crate) fn read() -> Result<Vec<SharedMemory>, LedgerError> {
    folder_of_environment()?.map_or_else(|| Ok(Vec::new()), |folder| read_folder(&folder))
}

/// Reads all ledgers of a folder.
///
/// # Errors
/// As of [`read`].
pub(crate) fn read_folder(folder: &Path) -> Result<Vec<SharedMemory>, LedgerError> {
    let read = |name: String| {
        let figures = Ledger::existing(folder, &name).map(|ledger| ledger.figures());
        (name, figures)
    };
    Ok(Ledger::names(folder)?.into_iter().map(read).collect())
}

/// Returns a member as JSON, with its process under the name that the command uses.
pub(crate) fn json_of_member(member: &MemberFigures, process: &str) -> Value {
    json!({
        process: member.process,
        "command": member.command,
        "claimed": member.claimed,
        "guarantee": member.guarantee,
        "reserved": member.is_reserved,
        "limit": member.limit,
        "priority": member.priority,
        "reclaimable": member.reclaimable,
        "wanted": member.wanted,
    })
}

/// Which memory a ledger is for. Its name says so: `Sharing` of the runtime forms it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LedgerMemory {
    /// The GPU with this UUID, with hyphens.
    Uuid(String),
    /// The GPU at this PCI address.
    Address(String),
    /// The GPU, or the simulated one, with this ordinal.
    Ordinal(u32),
    /// Pinned memory.
    Pinned,
    /// A memory that a program has named.
    Other,
}

impl LedgerMemory {
    pub(crate) fn of(name: &str) -> Self {
        if name == "pinned-memory" {
            return Self::Pinned;
        }
        let device = name.strip_prefix("GPU-").or_else(|| name.strip_prefix("simulated-"));
        let Some(device) = device else { return Self::Other };
        let is_hex = |text: &str| text.bytes().all(|c| c.is_ascii_hexdigit());
        if device.len() == 32 && is_hex(device) {
            let part = |from: usize, to: usize| &device[from..to];
            let parts = [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)];
            return Self::Uuid(parts.join("-"));
        }
        if let [domain, bus, slot] = device.split('-').collect::<Vec<_>>()[..]
            && is_hex(domain)
            && is_hex(bus)
            && slot.contains('.')
        {
            return Self::Address(format!("{domain}:{bus}:{slot}"));
        }
        device.parse().map_or(Self::Other, Self::Ordinal)
    }

    /// Returns `device` or `pinned`, as pools of such memory say, or nothing if it is not known.
    pub(crate) fn kind(&self) -> Option<&'static str> {
        match self {
            Self::Uuid(_) | Self::Address(_) | Self::Ordinal(_) => Some("device"),
            Self::Pinned => Some("pinned"),
            Self::Other => None,
        }
    }

    pub(crate) fn uuid(&self) -> Option<&str> {
        if let Self::Uuid(uuid) = self { Some(uuid) } else { None }
    }

    pub(crate) fn address(&self) -> Option<&str> {
        if let Self::Address(address) = self { Some(address) } else { None }
    }

    pub(crate) fn ordinal(&self) -> Option<u32> {
        if let Self::Ordinal(ordinal) = self { Some(*ordinal) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_ledger_says_which_memory_it_is_for() {
        let uuid = LedgerMemory::of("GPU-0123456789abcdef0123456789abcdef");
        assert_eq!(uuid, LedgerMemory::Uuid("01234567-89ab-cdef-0123-456789abcdef".to_owned()));
        let address = LedgerMemory::of("GPU-0000-1b-00.0");
        assert_eq!(address, LedgerMemory::Address("0000:1b:00.0".to_owned()));
        assert_eq!(LedgerMemory::of("GPU-3"), LedgerMemory::Ordinal(3));
        assert_eq!(LedgerMemory::of("simulated-1"), LedgerMemory::Ordinal(1));
        assert_eq!(LedgerMemory::of("pinned-memory"), LedgerMemory::Pinned);
        for other in ["", "GPU-", "GPU-x", "pinned", "GPU-é", "simulated--1", "GPU-0-1-2"] {
            assert_eq!(LedgerMemory::of(other), LedgerMemory::Other, "{other}");
        }
    }
}
