//! The text of the memories that processes share: one series for each ledger, and one for each
//! member, of each metric.

use super::{
    exposition::{UniqueLabels, escaped, heading, labels_of, line},
    families::MetricType,
};
use crate::ledgers;
use aquifer_status::ledger::{LedgerFigures, LedgerMemory, MemberFigures};
use std::cmp::Reverse;

/// A metric of a ledger.
type LedgerFamily = (&'static str, &'static str, fn(&LedgerFigures) -> u64);
/// A metric of a member.
type MemberFamily = (&'static str, &'static str, fn(&MemberFigures) -> i128);

const LEDGER_FAMILIES: [LedgerFamily; 5] = [
    ("aquifer_ledger_capacity_bytes", "Capacity of a shared memory.", |l| l.capacity),
    (
        "aquifer_ledger_claimed_bytes",
        "Bytes that its members have claimed.",
        LedgerFigures::claimed,
    ),
    ("aquifer_ledger_free_bytes", "Bytes neither claimed nor unaccounted.", LedgerFigures::free),
    ("aquifer_ledger_unaccounted_bytes", "Bytes in use that no member has claimed.", |l| {
        l.unaccounted
    }),
    ("aquifer_ledger_members", "Live members.", |l| l.members.len() as u64),
];

const MEMBER_FAMILIES: [MemberFamily; 7] = [
    ("aquifer_ledger_member_claimed_bytes", "Bytes that the member has claimed.", |m| {
        m.claimed.into()
    }),
    ("aquifer_ledger_member_guarantee_bytes", "Guarantee of the member.", |m| m.guarantee.into()),
    ("aquifer_ledger_member_reserved", "1 if its guarantee is kept free for it, else 0.", |m| {
        m.is_reserved.into()
    }),
    ("aquifer_ledger_member_limit_bytes", "Limit of the member's claims.", |m| m.limit.into()),
    ("aquifer_ledger_member_priority", "Priority of the member.", |m| m.priority.into()),
    ("aquifer_ledger_member_reclaimable_bytes", "Bytes that it could give back soon.", |m| {
        m.reclaimable.into()
    }),
    ("aquifer_ledger_member_wanted_bytes", "Bytes that it waits for, or 0.", |m| m.wanted.into()),
];

/// Reads all ledgers, and returns the text. At most so many ledgers, and so many members of all,
/// have series: those with the largest claims.
pub(super) fn text(most: usize) -> String {
    let read = ledgers::read();
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, value: usize| {
        heading(&mut text, name, MetricType::Gauge, help);
        line(&mut text, name, "", value);
    };
    let help = "1 if the folder of ledgers can be read, else 0.";
    gauge("aquifer_ledger_folder_readable", help, read.is_ok().into());
    let mut all = read.unwrap_or_default();
    let claimed = |read: &Result<LedgerFigures, _>| read.as_ref().map_or(0, LedgerFigures::claimed);
    all.sort_by_key(|(_, read)| Reverse(claimed(read)));
    let left_out = all.len().saturating_sub(most);
    let help = "Ledgers without series, since there are too many.";
    gauge("aquifer_ledgers_left_out", help, left_out);
    all.truncate(most);
    let mut unique = UniqueLabels::default();
    let labelled: Vec<_> = all
        .iter()
        .map(|(name, read)| (unique.add(|number| ledger_labels(name, number)), read.as_ref().ok()))
        .collect();
    let figures: Vec<_> = labelled
        .iter()
        .filter_map(|(labels, figures)| figures.map(|figures| (labels, figures)))
        .collect();
    let mut members: Vec<_> = figures
        .iter()
        .flat_map(|(labels, figures)| figures.members.iter().map(move |member| (labels, member)))
        .collect();
    members.sort_by_key(|(_, member)| Reverse(member.claimed));
    let help = "Members of these ledgers without series, since there are too many.";
    gauge("aquifer_ledger_members_left_out", help, members.len().saturating_sub(most));
    members.truncate(most);
    let mut unique = UniqueLabels::default();
    let members: Vec<_> = members
        .into_iter()
        .map(|(ledger, member)| {
            let process = labels_of(member.process, &member.command);
            let make = |number: &str| format!("{process},{ledger},member=\"{}\"", number.trim());
            (unique.add(make), member)
        })
        .collect();

    let mut family = |name: &str, help: &str, values: Vec<(&String, i128)>| {
        if !values.is_empty() {
            heading(&mut text, name, MetricType::Gauge, help);
        }
        for (labels, value) in values {
            line(&mut text, name, labels, value);
        }
    };
    let readable = labelled.iter().map(|(labels, read)| (labels, read.is_some().into()));
    family("aquifer_ledger_readable", "1 if the ledger can be read, else 0.", readable.collect());
    for (name, help, figure) in LEDGER_FAMILIES {
        let values = figures.iter().map(|(labels, figures)| (*labels, figure(figures).into()));
        family(name, help, values.collect());
    }
    for (name, help, figure) in MEMBER_FAMILIES {
        let values = members.iter().map(|(labels, member)| (labels, figure(member)));
        family(name, help, values.collect());
    }
    text
}

fn ledger_labels(name: &str, number: &str) -> String {
    let memory = LedgerMemory::of(name);
    let ordinal = || memory.ordinal().map(|ordinal| ordinal.to_string());
    let device = memory.address().map(str::to_owned).or_else(ordinal).unwrap_or_default();
    format!(
        "device=\"{device}\",uuid=\"{}\",kind=\"{}\",ledger=\"{}{number}\"",
        memory.uuid().unwrap_or_default(),
        memory.kind().unwrap_or_default(),
        escaped(name),
    )
}
