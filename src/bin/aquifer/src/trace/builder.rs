//! From rows to steps. What cannot have happened ends here.

use super::{Action, Block, Fault, Format, MAX_BLOCK, MAX_STREAMS, Step, Trace, error::Name};
use aquifer_core::event::BlockKind;
use std::collections::{BTreeMap, HashMap};

/// A trace in the making.
pub(super) struct Builder {
    /// What each name stands for now. Names of blocks that are done stay, so that a second free is
    /// told from a free of a block that never was.
    names: HashMap<u64, Known>,
    blocks: Vec<Block>,
    steps: Vec<Step>,
    /// Streams as the rows name them. Numbered at the end, in order of these names for small
    /// numbers and of appearance for handles.
    streams: BTreeMap<u64, u32>,
    live: u64,
    peak_live: u64,
    frees: u64,
    skipped: u64,
    /// What blocks of each kind and tag came to, and where the last one stands.
    accounts: Vec<Account>,
    last: usize,
}

/// What blocks of one kind and one tag came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Account {
    /// What they are.
    pub(crate) kind: BlockKind,
    /// Its tag; empty where the input has none.
    pub(crate) tag: String,
    /// How many were allocated.
    pub(crate) allocations: u64,
    /// How many of them are still allocated.
    pub(crate) blocks: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// The most bytes that were allocated at once.
    pub(crate) peak: u64,
}

/// What is known of a name.
struct Known {
    block: u32,
    account: u32,
    allocated: u64,
    state: State,
}

enum State {
    Live,
    /// Freed in row `row`, by the step at index `step`.
    Freed {
        row: u64,
        step: usize,
    },
    /// Completed; freed in row `row`.
    Done {
        row: u64,
    },
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            names: HashMap::new(),
            blocks: Vec::new(),
            steps: Vec::new(),
            streams: BTreeMap::new(),
            live: 0,
            peak_live: 0,
            frees: 0,
            skipped: 0,
            accounts: Vec::new(),
            last: 0,
        }
    }

    /// How many steps there are.
    pub(super) fn steps(&self) -> usize {
        self.steps.len()
    }

    /// How many blocks were allocated.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// What blocks came to.
    pub(super) fn accounts(&self) -> &[Account] {
        &self.accounts
    }

    fn account(&mut self, kind: BlockKind, tag: &str) -> usize {
        let fits = |account: &Account| account.kind == kind && account.tag == tag;
        if !self.accounts.get(self.last).is_some_and(fits) {
            self.last = self.accounts.iter().position(fits).unwrap_or_else(|| {
                let tag = tag.to_owned();
                self.accounts.push(Account {
                    kind,
                    tag,
                    allocations: 0,
                    blocks: 0,
                    bytes: 0,
                    peak: 0,
                });
                self.accounts.len() - 1
            });
        }
        self.last
    }

    /// Counts a row that a replay cannot repeat.
    pub(super) fn skip(&mut self) {
        self.skipped += 1;
    }

    pub(super) fn allocate(
        &mut self,
        row: u64,
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        self.allocate_as(row, id, bytes, stream, BlockKind::Cached, "")
    }

    pub(super) fn allocate_as(
        &mut self,
        row: u64,
        id: Name,
        bytes: u64,
        stream: u64,
        kind: BlockKind,
        tag: &str,
    ) -> Result<(), Fault> {
        if let Some(known) = self.names.get(&key(id)) {
            match known.state {
                State::Live => return Err(Fault::TwiceAllocated { id, first: known.allocated }),
                State::Freed { row, .. } => return Err(Fault::StillInUse { id, freed: row }),
                State::Done { .. } => {}
            }
        }
        let Ok(block) = u32::try_from(self.blocks.len()) else { return Err(Fault::TooManyBlocks) };
        let Some(live) = self.live.checked_add(bytes) else {
            return Err(Fault::AbsurdSize { found: bytes.to_string() });
        };
        let stream = self.stream(stream)?;
        self.live = live;
        self.peak_live = self.peak_live.max(live);
        self.blocks.push(Block { bytes, stream, freed_on: None, lingers: false });
        self.steps.push(Step { action: Action::Allocate, block, row: short(row) });
        // As many as there are tags, which are fewer than blocks.
        let account = self.account(kind, tag);
        self.accounts[account].allocate(bytes);
        let account = account as u32;
        self.names.insert(key(id), Known { block, account, allocated: row, state: State::Live });
        Ok(())
    }

    pub(super) fn free(
        &mut self,
        row: u64,
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        let stream = self.stream(stream)?;
        let known = self.names.get_mut(&key(id)).ok_or(Fault::Unknown { id, done: "freed" })?;
        match known.state {
            State::Live => {}
            State::Freed { row, .. } | State::Done { row } => {
                return Err(Fault::TwiceFreed { id, first: row });
            }
        }
        let block = &mut self.blocks[known.block as usize];
        if block.bytes != bytes {
            return Err(Fault::SizeChanged {
                id,
                allocated: (block.bytes, known.allocated),
                now: bytes,
            });
        }
        // Until its completion is seen, somebody else may have it.
        block.lingers = true;
        block.freed_on = Some(stream);
        known.state = State::Freed { row, step: self.steps.len() };
        self.steps.push(Step { action: Action::Free, block: known.block, row: short(row) });
        self.accounts[known.account as usize].free(bytes);
        self.live -= bytes;
        self.frees += 1;
        Ok(())
    }

    pub(super) fn complete(
        &mut self,
        row: u64,
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        let here = short(row);
        self.stream(stream)?;
        let known = self.names.get_mut(&key(id)).ok_or(Fault::Unknown { id, done: "completed" })?;
        let (row, step) = match known.state {
            State::Live => return Err(Fault::CompleteBeforeFree { id }),
            State::Freed { row, step } => (row, step),
            State::Done { .. } => return Err(Fault::TwiceCompleted { id }),
        };
        let block = &mut self.blocks[known.block as usize];
        if block.bytes != bytes {
            return Err(Fault::SizeChanged {
                id,
                allocated: (block.bytes, known.allocated),
                now: bytes,
            });
        }
        known.state = State::Done { row };
        if step + 1 == self.steps.len() {
            // The row right behind the free: nobody else had it.
            block.lingers = false;
        } else {
            self.steps.push(Step { action: Action::Complete, block: known.block, row: here });
        }
        Ok(())
    }

    /// The number of a stream, in order of appearance.
    fn stream(&mut self, name: u64) -> Result<u32, Fault> {
        let next = self.streams.len();
        if next >= MAX_STREAMS && !self.streams.contains_key(&name) {
            return Err(Fault::TooManyStreams);
        }
        // Below MAX_STREAMS, so it fits.
        Ok(*self.streams.entry(name).or_insert(next as u32))
    }

    pub(super) fn finish(mut self, format: Format) -> Result<Trace, Fault> {
        if self.blocks.is_empty() {
            return Err(Fault::NoAllocation);
        }
        if matches!(format, Format::Events | Format::Made) {
            // Small numbers mean something to whoever wrote them: stream 0 stays the first.
            let mut rank = vec![0_u32; self.streams.len()];
            for (place, appeared) in (0_u32..).zip(self.streams.values()) {
                rank[*appeared as usize] = place;
            }
            for block in &mut self.blocks {
                block.stream = rank[block.stream as usize];
                block.freed_on = block.freed_on.map(|stream| rank[stream as usize]);
            }
        }
        Ok(Trace {
            format,
            blocks: self.blocks,
            steps: self.steps,
            // At most MAX_STREAMS.
            streams: self.streams.len() as u32,
            peak_live: self.peak_live,
            frees: self.frees,
            live_at_end: self.live,
            skipped: self.skipped,
            memory: Vec::new(),
            device: None,
            notes: Vec::new(),
            snapshot: None,
        })
    }
}

impl Account {
    fn allocate(&mut self, bytes: u64) {
        self.allocations += 1;
        self.blocks += 1;
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
    }

    fn free(&mut self, bytes: u64) {
        self.blocks -= 1;
        self.bytes -= bytes;
    }
}

/// A row as steps have it: the last that fits for those beyond.
fn short(row: u64) -> u32 {
    u32::try_from(row).unwrap_or(u32::MAX)
}

/// Ids and pointers never meet in one trace.
fn key(id: Name) -> u64 {
    match id {
        Name::Id(id) | Name::Pointer(id) => id,
    }
}

/// A whole number without a sign.
pub(super) fn whole(name: &'static str, text: &str, expected: &'static str) -> Result<u64, Fault> {
    decimal(text).ok_or_else(|| Fault::Field { name, found: text.to_owned(), expected })
}

/// The size of a block.
pub(super) fn size(text: &str) -> Result<u64, Fault> {
    let found = || text.to_owned();
    if let Some(digits) = text.strip_prefix('-')
        && !digits.is_empty()
        && digits.bytes().all(|b| b.is_ascii_digit())
    {
        return Err(Fault::NoBytes { found: found() });
    }
    match decimal(text) {
        Some(0) => Err(Fault::NoBytes { found: found() }),
        Some(bytes) if bytes <= MAX_BLOCK => Ok(bytes),
        // Digits that do not fit in 64 bits are a size all the same.
        _ if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
            Err(Fault::AbsurdSize { found: found() })
        }
        _ => Err(Fault::Field { name: "bytes", found: found(), expected: "a whole number" }),
    }
}

/// The parser of the standard library without the sign that it allows.
fn decimal(text: &str) -> Option<u64> {
    if text.starts_with('+') { None } else { text.parse().ok() }
}
