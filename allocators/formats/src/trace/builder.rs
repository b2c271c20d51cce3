//! Converts rows to steps and rejects impossible ones.

use super::{
    Fault, MAX_BLOCK, MAX_STREAMS, Trace, TraceAccount, TraceAction, TraceBlock, TraceFormat,
    TraceStep,
    error::Name,
    named_blocks::{NamedBlocks, short},
};
use aquifer_core::event::BlockKind;
use std::collections::{BTreeMap, HashMap};

/// A trace under construction.
pub(super) struct Builder {
    lives: NamedBlocks,
    blocks: Vec<TraceBlock>,
    /// The account of each block.
    account_of: Vec<u32>,
    steps: Vec<TraceStep>,
    /// Streams by their name in the rows. Renumbered at the end: small numbers in their own order,
    /// handles in the order of appearance.
    streams: BTreeMap<u64, u32>,
    live: u64,
    peak_live: u64,
    frees: u64,
    skipped: u64,
    /// Totals by kind and tag, and the index of the last one used.
    accounts: Vec<TraceAccount>,
    account_numbers: HashMap<BlockKind, HashMap<String, usize>>,
    last: usize,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            lives: NamedBlocks::default(),
            blocks: Vec::new(),
            account_of: Vec::new(),
            steps: Vec::new(),
            streams: BTreeMap::new(),
            live: 0,
            peak_live: 0,
            frees: 0,
            skipped: 0,
            accounts: Vec::new(),
            account_numbers: HashMap::new(),
            last: 0,
        }
    }

    /// Returns the number of steps.
    pub(super) fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Returns the number of allocated blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the totals by kind and tag.
    pub(super) fn accounts(&self) -> &[TraceAccount] {
        &self.accounts
    }

    fn account(&mut self, kind: BlockKind, tag: &str) -> usize {
        let fits = |account: &TraceAccount| account.kind == kind && account.tag == tag;
        if !self.accounts.get(self.last).is_some_and(fits) {
            let numbers = self.account_numbers.entry(kind).or_default();
            self.last = numbers.get(tag).copied().unwrap_or_else(|| {
                let tag = tag.to_owned();
                numbers.insert(tag.clone(), self.accounts.len());
                self.accounts.push(TraceAccount {
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
        self.lives.check_new(id)?;
        let Ok(block) = u32::try_from(self.blocks.len()) else { return Err(Fault::TooManyBlocks) };
        let Some(live) = self.live.checked_add(bytes) else {
            return Err(Fault::AbsurdSize { found: bytes.to_string() });
        };
        let stream = self.stream(stream)?;
        self.live = live;
        self.peak_live = self.peak_live.max(live);
        self.blocks.push(TraceBlock { bytes, stream, freed_on: None, lingers: false });
        self.steps.push(TraceStep { action: TraceAction::Allocate, block, row: short(row) });
        // There are as many as tags, which are fewer than blocks.
        let account = self.account(kind, tag);
        self.accounts[account].allocate(bytes);
        self.account_of.push(account as u32);
        self.lives.allocate(id, block, bytes, row);
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
        let number = self.lives.free(id, bytes, row)?;
        let block = &mut self.blocks[number as usize];
        // Another stream may use the block until its completion is seen.
        block.lingers = true;
        block.freed_on = Some(stream);
        self.steps.push(TraceStep { action: TraceAction::Free, block: number, row: short(row) });
        self.accounts[self.account_of[number as usize] as usize].free(bytes);
        debug_assert!(self.live >= bytes, "the block is counted as live");
        self.live -= bytes;
        self.frees += 1;
        debug_assert!(self.frees <= self.blocks.len() as u64, "a block is freed once");
        Ok(())
    }

    pub(super) fn complete(
        &mut self,
        row: u64,
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        self.stream(stream)?;
        let block = self.lives.complete(id, bytes)?;
        debug_assert!(self.blocks[block as usize].lingers, "it was freed before");
        match self.steps.last() {
            // The completion directly follows the free: no other stream used it.
            Some(last) if last.block == block && last.action == TraceAction::Free => {
                self.blocks[block as usize].lingers = false;
            }
            _ => {
                let row = short(row);
                self.steps.push(TraceStep { action: TraceAction::Complete, block, row });
            }
        }
        Ok(())
    }

    /// Returns the number of a stream, in order of appearance.
    fn stream(&mut self, name: u64) -> Result<u32, Fault> {
        let next = self.streams.len();
        if next >= MAX_STREAMS && !self.streams.contains_key(&name) {
            return Err(Fault::TooManyStreams);
        }
        debug_assert!(next <= MAX_STREAMS);
        // Below MAX_STREAMS, so it fits.
        Ok(*self.streams.entry(name).or_insert(next as u32))
    }

    pub(super) fn finish(mut self, format: TraceFormat) -> Result<Trace, Fault> {
        if self.blocks.is_empty() {
            return Err(Fault::NoAllocation);
        }
        if matches!(format, TraceFormat::Events | TraceFormat::Made) {
            // Small numbers are the program's own: stream 0 stays the first.
            let mut rank = vec![0_u32; self.streams.len()];
            for (place, appeared) in (0_u32..).zip(self.streams.values()) {
                rank[*appeared as usize] = place;
            }
            for block in &mut self.blocks {
                block.stream = rank[block.stream as usize];
                block.freed_on = block.freed_on.map(|stream| rank[stream as usize]);
            }
        }
        debug_assert!(self.peak_live >= self.live);
        debug_assert!(self.steps.len() as u64 >= self.blocks.len() as u64 + self.frees);
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
            devices: Vec::new(),
            notes: Vec::new(),
            unreadable: 0,
            snapshot: None,
        })
    }
}

impl TraceAccount {
    fn allocate(&mut self, bytes: u64) {
        self.allocations += 1;
        self.blocks += 1;
        self.bytes += bytes;
        self.peak = self.peak.max(self.bytes);
    }

    fn free(&mut self, bytes: u64) {
        debug_assert!(self.blocks > 0 && self.bytes >= bytes && self.peak >= self.bytes);
        self.blocks -= 1;
        self.bytes -= bytes;
    }
}

/// Parses an unsigned whole number.
pub(crate) fn whole(name: &'static str, text: &str, expected: &'static str) -> Result<u64, Fault> {
    decimal(text).ok_or_else(|| Fault::Field { name, found: text.to_owned(), expected })
}

/// Parses the size of a block.
pub(crate) fn size(text: &str) -> Result<u64, Fault> {
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
        // Digits that exceed 64 bits are still a size.
        _ if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
            Err(Fault::AbsurdSize { found: found() })
        }
        _ => Err(Fault::Field { name: "bytes", found: found(), expected: "a whole number" }),
    }
}

/// Parses like the standard library, without the plus sign that it allows.
fn decimal(text: &str) -> Option<u64> {
    if text.starts_with('+') { None } else { text.parse().ok() }
}
