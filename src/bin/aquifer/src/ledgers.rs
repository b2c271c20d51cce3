//! The memories that processes share: all ledgers of this user.
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
