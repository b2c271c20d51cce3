//! The memories that processes share, of one reading.

use super::words::{bytes, fit};
use crate::ledgers::{self, SharedMemory};
use aquifer_benches::console::foreign::printable;
use aquifer_status::ledger::{LedgerError, LedgerFigures, LedgerMemory, MemberFigures};
use serde_json::{Value, json};

/// All ledgers that can be read, and why others cannot.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct SharedMemories {
    ledgers: Vec<LedgerFigures>,
    /// The errors, each in one harmless line.
    pub(super) errors: Vec<String>,
}

/// The columns of a member, without its command, with their widths.
const COLUMNS: [(&str, usize); 6] = [
    ("CLAIMED", 8),
    ("GUARANTEE", 9),
    ("RESERVED", 8),
    ("LIMIT", 8),
    ("PRIORITY", 8),
    ("WAITS FOR", 9),
];
const PROCESS_WIDTH: usize = 7;
/// The least width of the column of commands.
const LEAST_COMMAND: usize = 8;

impl SharedMemories {
    /// Reads all ledgers. An unusable folder is an error like that of a ledger.
    pub(super) fn read() -> Self {
        Self::of(ledgers::read())
    }

    fn of(read: Result<Vec<SharedMemory>, LedgerError>) -> Self {
        let mut shared = Self::default();
        match read {
            Err(error) => shared.errors.push(printable(&format!("shared memory: {error}"))),
            Ok(all) => {
                for (name, read) in all {
                    match read {
                        Ok(figures) => shared.ledgers.push(figures),
                        Err(error) => shared.errors.push(printable(&format!("{name}: {error}"))),
                    }
                }
            }
        }
        shared
    }

    /// Returns the lines: each memory with its members.
    pub(super) fn lines(&self, width: usize) -> Vec<String> {
        let titles = self.ledgers.iter().any(|ledger| !ledger.members.is_empty()).then(|| {
            member_line("PID", "MEMBER", COLUMNS.map(|(title, _)| title.to_owned()), width)
        });
        let memories = self.ledgers.iter().flat_map(|ledger| {
            let members = ledger.members.iter().map(|member| line_of_member(member, width));
            std::iter::once(line_of_memory(ledger)).chain(members)
        });
        titles.into_iter().chain(memories).collect()
    }

    /// Returns the ledgers as JSON.
    pub(super) fn as_json(&self) -> Value {
        self.ledgers.iter().map(json_of_memory).collect()
    }
}

/// Returns the name in few columns. The first eight digits of a UUID are enough for
/// `CUDA_VISIBLE_DEVICES` too.
fn short_name(name: &str) -> String {
    match LedgerMemory::of(name) {
        LedgerMemory::Uuid([a, b, c, d, ..]) => format!("GPU-{a:02x}{b:02x}{c:02x}{d:02x}"),
        LedgerMemory::Address(address) => printable(&address),
        LedgerMemory::Pinned => "pinned".to_owned(),
        LedgerMemory::Ordinal(_) | LedgerMemory::Simulated(_) | LedgerMemory::Other(_) => {
            printable(name)
        }
    }
}

fn line_of_memory(ledger: &LedgerFigures) -> String {
    let mut line = format!(
        "shared {}: {} of {} claimed, {} free",
        short_name(&ledger.name),
        bytes(ledger.claimed()),
        bytes(ledger.capacity),
        bytes(ledger.free()),
    );
    if ledger.unaccounted > 0 {
        line.push_str(&format!(", {} other", bytes(ledger.unaccounted)));
    }
    line
}

fn line_of_member(member: &MemberFigures, width: usize) -> String {
    let cells = [
        bytes(member.claimed),
        bytes(member.guarantee),
        if member.is_reserved { "yes" } else { "no" }.to_owned(),
        bytes(member.limit),
        member.priority.to_string(),
        if member.wanted > 0 { bytes(member.wanted) } else { "-".to_owned() },
    ];
    member_line(&member.process.to_string(), &printable(&member.command), cells, width)
}

/// Returns a line of cells. The command has what the others leave of the width.
fn member_line(process: &str, command: &str, cells: [String; 6], width: usize) -> String {
    let others: usize = COLUMNS.iter().map(|(_, width)| width + 1).sum();
    let command_width = width.saturating_sub(PROCESS_WIDTH + 1 + others).max(LEAST_COMMAND);
    let mut line = fit(process, PROCESS_WIDTH, true);
    line.push(' ');
    line.push_str(&fit(command, command_width, false));
    for (cell, (_, width)) in cells.iter().zip(COLUMNS) {
        line.push(' ');
        line.push_str(&fit(cell, width, true));
    }
    line
}

fn json_of_memory(ledger: &LedgerFigures) -> Value {
    let memory = LedgerMemory::of(&ledger.name);
    json!({
        "name": ledger.name,
        "kind": memory.kind(),
        "device": memory.ordinal(),
        "address": memory.address(),
        "uuid": memory.uuid(),
        "capacity": ledger.capacity,
        "claimed": ledger.claimed(),
        "free": ledger.free(),
        "unaccounted": ledger.unaccounted,
        "members": ledger.members.iter().map(json_of_member).collect::<Vec<_>>(),
    })
}

fn json_of_member(member: &MemberFigures) -> Value {
    json!({
        "pid": member.process,
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

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_status::ledger::{Ledger, Share};
    use console::measure_text_width as columns_of;
    use std::{env, fs, process};

    #[test]
    fn members_of_shared_memory_fit_80_columns() {
        let folder = env::temp_dir().join(format!("aquifer-top-shared-{}", process::id()));
        let open = |name: &str| Ledger::open(&folder, name, 96 << 20).unwrap();
        let name = "GPU-0123456789abcdef0123456789abcdef";
        let share = Share::new().guarantee(8 << 20).reserve().limit(80 << 20).priority(-3);
        let member = share.join(open(name)).unwrap();
        member.claim(64 << 20).unwrap();
        member.measure(|| Some(65 << 20));
        drop(open("pinned-memory"));
        fs::write(folder.join("broken.ledger"), "noise").unwrap();
        let shared = SharedMemories::of(ledgers::read_folder(&folder));
        let lines = shared.lines(80);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines.iter().all(|line| columns_of(line) <= 80), "{lines:?}");
        let memory =
            "shared GPU-01234567: 64.0 MiB of 96.0 MiB claimed, 31.0 MiB free, 1.00 MiB other";
        assert_eq!(lines[1], memory);
        let end = "64.0 MiB  8.00 MiB      yes 80.0 MiB       -3         -";
        assert!(lines[2].ends_with(end), "{lines:?}");
        assert_eq!(lines[3], "shared pinned: 0 B of 96.0 MiB claimed, 96.0 MiB free");
        assert!(shared.errors[0].starts_with("broken: the ledger cannot be used"), "{shared:?}");
        drop(member);
        fs::remove_dir_all(&folder).unwrap();
    }
}
