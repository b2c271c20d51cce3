//! Who holds memory at an instant, by tag, size class, stream, thread, kind, call stack and the
//! text that the program attached.

use aquifer_core::Bytes;
use aquifer_formats::history::MemoryHistory;
use serde_json::{Map, Value, json};
use std::{cmp::Reverse, collections::HashMap};

/// The most holders that a list names. The others are its last entry.
const MOST: usize = 50;
/// The name of the entry for all others.
const REST: &str = "rest";
/// The smallest size class, as a power of two.
const LEAST_CLASS: u32 = 9;
/// Frames of a stack in a name.
const FRAMES: usize = 6;

/// What blocks are grouped by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HolderGroup {
    /// By tag.
    Tag,
    /// By power of two of the requested size.
    Size,
    /// By stream.
    Stream,
    /// By thread.
    Thread,
    /// By kind.
    Kind,
    /// By call stack.
    Stack,
    /// By the text that the program attached.
    Metadata,
}

impl HolderGroup {
    /// Every grouping.
    pub(crate) const ALL: [Self; 7] = [
        Self::Tag,
        Self::Size,
        Self::Stream,
        Self::Thread,
        Self::Kind,
        Self::Stack,
        Self::Metadata,
    ];

    /// Returns the name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tag => "tag",
            Self::Size => "size",
            Self::Stream => "stream",
            Self::Thread => "thread",
            Self::Kind => "kind",
            Self::Stack => "stack",
            Self::Metadata => "metadata",
        }
    }

    fn key(self, history: &MemoryHistory, block: usize) -> u32 {
        let blocks = &history.blocks;
        match self {
            Self::Tag => blocks.tag[block],
            Self::Size => size_class(blocks.requested[block]),
            Self::Stream => blocks.stream[block],
            Self::Thread => blocks.thread[block],
            Self::Kind => blocks.kind[block].map_or(0, |kind| kind as u32 + 1),
            Self::Stack => blocks.stack[block],
            Self::Metadata => blocks.metadata[block],
        }
    }

    fn title(self, history: &MemoryHistory, key: u32, block: usize) -> String {
        match self {
            Self::Tag | Self::Stream | Self::Thread | Self::Metadata => {
                history.names.get(key).to_owned()
            }
            Self::Size => format!("≤ {}", whole_unit(key)),
            Self::Kind => history.blocks.kind[block].map_or("", |kind| kind.name()).to_owned(),
            Self::Stack => {
                let frames = history.stacks.get(key).iter().take(FRAMES);
                let frames: Vec<_> = frames.map(|frame| history.names.get(*frame)).collect();
                frames.join(" < ")
            }
        }
    }
}

/// Returns the power of two that is at least `bytes`.
fn size_class(bytes: u64) -> u32 {
    bytes.max(1).checked_next_power_of_two().map_or(64, u64::trailing_zeros).max(LEAST_CLASS)
}

/// Formats a power of two: `512 B`, `1 KiB`.
fn whole_unit(class: u32) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (class / 10).min(6);
    format!("{} {}", 1_u64 << (class - unit * 10), UNITS[unit as usize])
}

/// The memory of one group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Holder {
    /// The number of the stack, if the group is one.
    pub(crate) stack: Option<u32>,
    /// The name of the group. Empty for blocks that have none.
    pub(crate) name: String,
    /// Requested bytes.
    pub(crate) bytes: u64,
    /// Blocks.
    pub(crate) blocks: u64,
}

impl Holder {
    /// Formats the holder for a sentence: `kv cache 1.00 GiB in 3 blocks`.
    pub(crate) fn phrase(&self) -> String {
        let name = if self.name.is_empty() { "unnamed" } else { &self.name };
        let plural = if self.blocks == 1 { "" } else { "s" };
        format!("{name} {} in {} block{plural}", Bytes(self.bytes), self.blocks)
    }
}

/// All holders at an instant, the largest first, for each grouping.
#[derive(Clone, Debug)]
pub(crate) struct Holders(Vec<(HolderGroup, Vec<Holder>)>);

impl Holders {
    /// Groups these blocks.
    pub(crate) fn of(history: &MemoryHistory, blocks: &[u32]) -> Self {
        Self(HolderGroup::ALL.map(|by| (by, group(history, blocks, by))).into())
    }

    /// Returns the holders by one grouping.
    pub(crate) fn by(&self, by: HolderGroup) -> &[Holder] {
        self.0.iter().find(|(each, _)| *each == by).map_or(&[], |(_, holders)| holders)
    }

    /// Returns the JSON form. `stack` gives the form of a stack: its number or its frames.
    pub(crate) fn to_json(&self, mut stack: impl FnMut(u32) -> Value) -> Value {
        let list = |(by, holders): &(HolderGroup, Vec<Holder>)| {
            let (named, rest) = holders.split_at(holders.len().min(MOST));
            let mut rows: Vec<Value> = named
                .iter()
                .map(|holder| match holder.stack {
                    Some(number) => {
                        let (bytes, blocks) = (holder.bytes, holder.blocks);
                        json!({ "stack": stack(number), "bytes": bytes, "blocks": blocks })
                    }
                    None => json!({
                        "name": holder.name, "bytes": holder.bytes, "blocks": holder.blocks,
                    }),
                })
                .collect();
            if !rest.is_empty() {
                let bytes: u64 = rest.iter().map(|holder| holder.bytes).sum();
                let blocks: u64 = rest.iter().map(|holder| holder.blocks).sum();
                let mut row = json!({ "name": REST, "bytes": bytes, "blocks": blocks });
                if *by == HolderGroup::Stack {
                    row["stack"] = Value::Null;
                }
                rows.push(row);
            }
            (by.name().to_owned(), Value::from(rows))
        };
        Value::Object(self.0.iter().map(list).collect::<Map<_, _>>())
    }
}

/// Groups blocks, the largest group first.
pub(crate) fn group(history: &MemoryHistory, blocks: &[u32], by: HolderGroup) -> Vec<Holder> {
    // The bytes, the blocks, and one block of each group.
    let mut groups: HashMap<u32, (u64, u64, usize)> = HashMap::new();
    for &block in blocks {
        let block = block as usize;
        let group = groups.entry(by.key(history, block)).or_insert((0, 0, block));
        group.0 += history.blocks.requested[block];
        group.1 += 1;
    }
    let holder = |(key, (bytes, blocks, block)): (u32, (u64, u64, usize))| Holder {
        stack: (by == HolderGroup::Stack).then_some(key),
        name: by.title(history, key, block),
        bytes,
        blocks,
    };
    let mut holders: Vec<_> = groups.into_iter().map(holder).collect();
    holders.sort_unstable_by(|a, b| {
        (Reverse(a.bytes), &a.name, a.stack).cmp(&(Reverse(b.bytes), &b.name, b.stack))
    });
    holders
}

/// Compares two runs at their peaks, the largest differences first.
pub(crate) fn compare(peaks: [u64; 2], holders: [&Holders; 2]) -> Value {
    let mut fields = Map::new();
    fields.insert("peaks".to_owned(), json!(peaks));
    fields.insert("difference".to_owned(), json!(signed(peaks)));
    for by in HolderGroup::ALL {
        let mut bytes: HashMap<&str, [u64; 2]> = HashMap::new();
        for (run, holders) in holders.iter().enumerate() {
            for holder in holders.by(by) {
                bytes.entry(&holder.name).or_default()[run] += holder.bytes;
            }
        }
        let mut rows: Vec<_> = bytes.into_iter().collect();
        rows.sort_unstable_by_key(|&(name, bytes)| (Reverse(signed(bytes).unsigned_abs()), name));
        let rows = rows.into_iter().take(MOST).map(
            |(name, bytes)| json!({ "name": name, "bytes": bytes, "difference": signed(bytes) }),
        );
        fields.insert(by.name().to_owned(), rows.collect());
    }
    Value::Object(fields)
}

/// Returns the second less the first. Sums of live bytes are far below the limit.
pub(crate) fn signed([first, second]: [u64; 2]) -> i64 {
    second as i64 - first as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_class_is_the_power_of_two_that_holds_the_size() {
        let table =
            [(1, "512 B"), (512, "512 B"), (513, "1 KiB"), (3 << 20, "4 MiB"), (1 << 40, "1 TiB")];
        for (bytes, name) in table {
            assert_eq!(whole_unit(size_class(bytes)), name);
        }
    }

    #[test]
    fn holders_beyond_the_list_are_its_last_entry_and_sums_stay() {
        let rows: String =
            (0..80).map(|n| format!("0,a,{n},{},0,cached,0,t{n}\n", n + 1)).collect();
        let text = format!("t_us,op,id,bytes,stream,kind,device,tag\n{rows}");
        let history = MemoryHistory::from_reader(std::io::Cursor::new(text), None).unwrap();
        let blocks: Vec<u32> = (0..80).collect();
        let json = Holders::of(&history, &blocks).to_json(|_| Value::Null);
        let tags = json["tag"].as_array().unwrap();
        assert_eq!(
            (tags.len(), &tags[0]["name"], &tags[50]["name"]),
            (51, &json!("t79"), &json!("rest"))
        );
        for by in HolderGroup::ALL {
            let sum: u64 = json[by.name()]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| row["bytes"].as_u64().unwrap())
                .sum();
            assert_eq!(sum, 80 * 81 / 2, "{}", by.name());
        }
    }
}
