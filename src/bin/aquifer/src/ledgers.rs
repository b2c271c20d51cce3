//! The memories that processes share: all ledgers of this user.
//!
//! To read a ledger claims nothing, creates no file, joins none, and waits for no lock.

use aquifer_core::Bytes;
use aquifer_status::ledger::{
    Ledger, LedgerError, LedgerFigures, MemberFigures, folder_of_environment,
};
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

/// Returns the lines on shared memory. A ledger without a member has none.
pub(crate) fn lines(shared: &Result<Vec<SharedMemory>, LedgerError>) -> Vec<String> {
    let all = match shared {
        Ok(all) => all,
        Err(error) => return vec![format!("unknown: {error}")],
    };
    let mut lines = Vec::new();
    for (name, read) in all {
        match read {
            Err(error) => lines.push(format!("{name}: {error}")),
            Ok(figures) if figures.members.is_empty() => {}
            Ok(figures) => {
                lines.push(format!(
                    "{name}: {} of {} claimed by {}, {} unaccounted",
                    Bytes(figures.claimed()),
                    Bytes(figures.capacity),
                    match figures.members.len() {
                        1 => "1 process".to_owned(),
                        several => format!("{several} processes"),
                    },
                    Bytes(figures.unaccounted),
                ));
                lines.extend(figures.members.iter().map(|member| {
                    let waits = match member.wanted {
                        0 => String::new(),
                        wanted => format!(", waits for {}", Bytes(wanted)),
                    };
                    format!(
                        "process {} {}: {}, guaranteed {}{}, priority {}{waits}",
                        member.process,
                        member.command,
                        Bytes(member.claimed),
                        Bytes(member.guarantee),
                        if member.is_reserved { " (reserved)" } else { "" },
                        member.priority,
                    )
                }));
            }
        }
    }
    lines
}

/// Returns what [`lines`] says as JSON.
pub(crate) fn as_json(shared: &Result<Vec<SharedMemory>, LedgerError>) -> Value {
    let one = |(name, read): &SharedMemory| match read {
        Ok(figures) => json!({
            "name": name,
            "capacity": figures.capacity,
            "claimed": figures.claimed(),
            "unaccounted": figures.unaccounted,
            "members": figures.members.iter().map(|m| json_of_member(m, "process")).collect::<Vec<_>>(),
        }),
        Err(error) => json!({ "name": name, "error": error.to_string() }),
    };
    match shared {
        Ok(all) => Value::Array(all.iter().map(one).collect()),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_status::ledger::{Ledger, Share};
    use std::{env, fs, process};

    #[test]
    fn a_ledger_is_shown_with_its_members_and_a_damaged_one_with_its_damage() {
        let folder = env::temp_dir().join(format!("aquifer-doctor-ledgers-{}", process::id()));
        let ledger = Ledger::open(&folder, "GPU-1", 96 << 20).unwrap();
        let share = Share::new().guarantee(8 << 20).reserve().priority(3);
        let member = share.join(ledger).unwrap();
        member.claim(64 << 20).unwrap();
        member.measure(|| Some(65 << 20));
        fs::write(folder.join("broken.ledger"), "noise").unwrap();
        let lines = lines(&read_folder(&folder));
        assert_eq!(
            lines[0],
            "GPU-1: 64.00 MiB of 96.00 MiB claimed by 1 process, 1.00 MiB unaccounted"
        );
        assert!(lines[1].starts_with(&format!("process {} ", process::id())), "{lines:?}");
        assert!(
            lines[1].ends_with("64.00 MiB, guaranteed 8.00 MiB (reserved), priority 3"),
            "{lines:?}"
        );
        assert!(lines[2].starts_with("broken: the ledger cannot be used"), "{lines:?}");
        drop(member);
        fs::remove_dir_all(&folder).unwrap();
    }
}
