//! The memories that processes share: all ledgers of this user.
//!
//! To read a ledger claims nothing, creates no file, joins none, and waits for no lock.

use aquifer_status::ledger::{Ledger, LedgerError, LedgerFigures, folder_of_environment};
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
