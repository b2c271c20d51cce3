//! A naive model of the heap, and the heap's promises stated over it.
//!
//! [`Shadow`] runs each operation on a real heap and on a model that keeps a cell for every unit
//! of four small windows of the address space: one among real device addresses, one right
//! below a border of the page map's largest nodes, the lowest addresses and the highest ones.
//! After every operation it asserts:
//!
//! * live blocks never overlap, lie in added memory, are aligned and as long as asked, and cross no
//!   border;
//! * live, free and slab-kept bytes add up to what was added, and nothing is kept by slabs when no
//!   small block lives;
//! * free extents are in order, hold no live byte, and are merged as far as borders allow;
//! * the stamp of a free byte is at least every stamp it was added or freed with;
//! * `None` and errors say what is true, and a refused call changes nothing;
//! * the heap's own self-check passes.
#![expect(clippy::panic, reason = "a model says what is wrong by panicking")]

use crate::program::Bytes;
use aquifer_heap::{Config, Extent, Heap, HeapBlock, HeapError, Range};
use std::{collections::BTreeMap, ops::ControlFlow};

/// Units of a window.
const WINDOW: u64 = 512;
/// How many windows there are.
const WINDOWS: usize = 4;

/// What the model knows of one unit.
#[derive(Clone, Copy, Default)]
struct Cell {
    managed: bool,
    /// The start of the live block.
    owner: Option<u64>,
    /// The largest stamp since the unit was added.
    stamp: u64,
    cut_before: bool,
    cut_after: bool,
}

/// A heap and its model.
pub(crate) struct Shadow {
    heap: Heap,
    windows: Vec<(u64, Vec<Cell>)>,
    live: BTreeMap<u64, HeapBlock>,
    freed: Vec<HeapBlock>,
    largest_stamp: u64,
}

/// All that a caller can see of a heap.
#[derive(Debug, PartialEq)]
struct Sight {
    managed: u64,
    live: u64,
    blocks: u64,
    extents: Vec<Extent>,
}

impl Shadow {
    /// The configurations that programs choose from.
    pub(crate) fn configs() -> [Config; 4] {
        let small = Config { unit: 16, page: 1024, grain: 4096, small_max: 512 };
        [Config::device(), Config::host(), small, Config { small_max: 0, ..small }]
    }

    pub(crate) fn new(config: Config) -> Self {
        let bytes = WINDOW * config.unit;
        let bases = [
            0x7f12_3440_0000,
            (config.page << 18) * 3 - bytes / 2,
            0,
            0u64.wrapping_sub(bytes + config.unit),
        ];
        let cells = vec![Cell::default(); WINDOW as usize];
        Self {
            heap: Heap::new(config),
            windows: bases.into_iter().map(|base| (base, cells.clone())).collect(),
            live: BTreeMap::new(),
            freed: Vec::new(),
            largest_stamp: 0,
        }
    }

    /// Performs one operation and checks everything. Numbers that are out of bounds wrap around.
    pub(crate) fn step(&mut self, bytes: &mut Bytes<'_>) {
        let before = self.sight();
        let changed = match bytes.choice(16) {
            0 => {
                let range = self.place(bytes);
                let (stamp, segment) = (bytes.u16(), bytes.flag());
                self.add(range, stamp.into(), segment)
            }
            1 => self.remove(self.place(bytes), &before),
            which @ 2..=7 => {
                let size = self.size(bytes);
                let align = if which == 7 { bytes.u8() } else { 0 };
                self.alloc(size, 1 << (align % 17), &before)
            }
            8 => self.alloc_at(self.place(bytes), &before),
            9..=12 => {
                let (which, stamp, by_note) = (bytes.u16(), bytes.u16(), bytes.flag());
                self.free(which, stamp.into(), by_note)
            }
            13 => {
                let start = self.range(bytes.u8(), bytes.u16(), 1).start;
                let address = start + u64::from(bytes.u8()) % self.unit();
                self.free_anywhere(address, self.largest_stamp)
            }
            14 => self.free_stale(bytes.u16()),
            _ => {
                let (which, size) = (bytes.u16(), self.size(bytes));
                self.resize(which, size, bytes.u16().into(), &before)
            }
        };
        let after = self.sight();
        assert!(
            changed || before == after,
            "a refused call changed something: {before:?}, {after:?}"
        );
        self.verify(&after);
    }

    /// Frees every block and takes everything out: nothing may be left.
    pub(crate) fn finish(mut self) {
        for address in self.live.keys().copied().collect::<Vec<_>>() {
            assert!(self.free_anywhere(address, 0));
        }
        let sight = self.sight();
        self.verify(&sight);
        assert_eq!(self.heap.free_bytes(), sight.managed);
        for extent in sight.extents {
            assert_eq!(self.heap.remove(extent.range), Ok(extent.stamp));
        }
        assert_eq!(self.heap.managed_bytes(), 0);
        debug_assert_eq!(self.heap.check(), Ok(()));
    }

    fn unit(&self) -> u64 {
        self.heap.config().unit
    }

    /// A range inside a window.
    pub(crate) fn range(&self, window: u8, at: u16, units: u16) -> Range {
        let at = u64::from(at) % WINDOW;
        let units = 1 + (u64::from(units).max(1) - 1) % (WINDOW - at);
        let (base, _) = self.windows[usize::from(window) % WINDOWS];
        Range::new(base + at * self.unit(), units * self.unit())
    }

    fn place(&self, bytes: &mut Bytes<'_>) -> Range {
        self.range(bytes.u8(), bytes.u16(), bytes.small())
    }

    fn size(&self, bytes: &mut Bytes<'_>) -> u64 {
        let (units, short) = (bytes.small(), bytes.u8());
        (1 + u64::from(units) % WINDOW) * self.unit() - u64::from(short) % self.unit()
    }

    /// The cells of a range, lowest first. It lies in one window.
    fn cells(&mut self, range: Range) -> &mut [Cell] {
        let unit = self.unit();
        for (base, cells) in &mut self.windows {
            if Range::new(*base, WINDOW * unit).covers(&range) {
                let from = ((range.start - *base) / unit) as usize;
                return &mut cells[from..from + (range.len / unit) as usize];
            }
        }
        panic!("{range} is in no window");
    }

    fn cell(&mut self, address: u64) -> Cell {
        let unit = self.unit();
        self.cells(Range::new(address & !(unit - 1), unit))[0]
    }

    fn sight(&self) -> Sight {
        let heap = &self.heap;
        let (extents, largest) = (heap.free_extents().collect::<Vec<_>>(), heap.largest_free());
        for least in [1, largest / 2 + 1, largest] {
            let mut long = Vec::new();
            let _ = heap.visit_free(least, |extent| {
                long.push(extent);
                ControlFlow::Continue(())
            });
            long.sort_by_key(|extent| extent.range.start);
            assert!(extents.iter().filter(|extent| extent.range.len >= least).eq(&long));
        }
        let (live, blocks) = (heap.live_bytes(), heap.live_blocks());
        Sight { managed: heap.managed_bytes(), live, blocks, extents }
    }

    pub(crate) fn add(&mut self, range: Range, stamp: u64, segment: bool) -> bool {
        let clash = self.cells(range).iter().any(|cell| cell.managed);
        let added =
            if segment { self.heap.add_segment(range, stamp) } else { self.heap.add(range, stamp) };
        if clash {
            let Err(HeapError::Overlap { range: given, with }) = added else {
                panic!("{added:?} for a clash")
            };
            assert!(given == range && with.overlaps(&range));
            return false;
        }
        assert_eq!(added, Ok(()));
        self.largest_stamp = self.largest_stamp.max(stamp);
        let cells = self.cells(range);
        let last = cells.len() - 1;
        for (n, cell) in cells.iter_mut().enumerate() {
            let (cut_before, cut_after) = (segment && n == 0, segment && n == last);
            *cell = Cell { managed: true, owner: None, stamp, cut_before, cut_after };
        }
        true
    }

    fn remove(&mut self, range: Range, before: &Sight) -> bool {
        let free = before.first_not_free(range);
        match self.heap.remove(range) {
            Ok(stamp) => {
                assert_eq!(free, None, "removed what is not free");
                let needed = self.cells(range).iter().map(|cell| cell.stamp).max();
                assert!(Some(stamp) >= needed && stamp <= self.largest_stamp);
                self.cells(range).fill(Cell::default());
                true
            }
            Err(why) => {
                assert!(
                    matches!(why, HeapError::NotFree { range: given, at } if given == range && Some(at) == free)
                );
                false
            }
        }
    }

    fn alloc(&mut self, bytes: u64, align: u64, before: &Sight) -> bool {
        let unit = self.unit();
        let len = bytes.next_multiple_of(unit);
        let Some(block) = self.heap.alloc(bytes, align) else {
            let fits = before.extents.iter().find(|extent| {
                let start = extent.range.start.checked_next_multiple_of(align.max(unit));
                start.is_some_and(|start| {
                    start < extent.range.end() && extent.range.end() - start >= len
                })
            });
            assert_eq!(fits, None, "None for {bytes} bytes aligned to {align}");
            return false;
        };
        assert_eq!(block.address % align, 0, "{block:?} is not aligned to {align}");
        assert!(block.bytes >= len);
        if bytes > self.heap.config().small_max {
            assert_eq!(block.bytes, len, "large blocks are exact");
        }
        self.adopt(block);
        true
    }

    fn alloc_at(&mut self, range: Range, before: &Sight) -> bool {
        match self.heap.alloc_at(range) {
            Ok(block) => {
                assert_eq!(block.range(), range);
                assert!(before.extents.iter().any(|extent| extent.range.covers(&range)));
                self.adopt(block);
                true
            }
            Err(HeapError::NotFree { range: given, at }) => {
                assert_eq!((given, Some(at)), (range, before.first_not_free(range)));
                false
            }
            Err(HeapError::Border { range: given, at }) => {
                assert!(given == range && before.first_not_free(range).is_none());
                assert!(before.extents.iter().any(|extent| extent.range.start == at));
                false
            }
            Err(why) => panic!("{why}"),
        }
    }

    /// Takes up a new block.
    fn adopt(&mut self, block: HeapBlock) {
        for cell in self.cells(block.range()) {
            assert!(cell.managed && cell.owner.is_none(), "{block:?} overlaps");
            cell.owner = Some(block.address);
        }
        let inner = self.cells(block.range()).to_vec();
        assert!(inner[1..].iter().all(|cell| !cell.cut_before), "{block:?} crosses a border");
        assert!(
            inner[..inner.len() - 1].iter().all(|cell| !cell.cut_after),
            "{block:?} crosses a border"
        );
        assert_eq!(self.heap.block_at(block.address), Ok(block));
        self.live.insert(block.address, block);
    }

    fn pick(&self, which: u16) -> Option<HeapBlock> {
        let nth = usize::from(which).checked_rem(self.live.len())?;
        self.live.values().nth(nth).copied()
    }

    fn free(&mut self, which: u16, stamp: u64, by_note: bool) -> bool {
        let Some(block) = self.pick(which) else { return false };
        if !by_note {
            return self.free_anywhere(block.address, stamp);
        }
        assert_eq!(self.heap.free_block(&block, stamp), Ok(()), "{block:?} was live");
        self.forget(block, stamp);
        true
    }

    fn free_anywhere(&mut self, address: u64, stamp: u64) -> bool {
        let cell = self.cell(address);
        let answer = self.heap.block_at(address);
        let expected = match cell.owner {
            _ if !cell.managed => HeapError::Foreign { address },
            None => HeapError::DoubleFree { address },
            Some(owner) if owner != address => {
                HeapError::Interior { address, block: self.live[&owner].range() }
            }
            Some(_) => {
                let Ok(block) = answer else { panic!("{address:#x} was live: {answer:?}") };
                assert_eq!(self.heap.free_block(&block, stamp), Ok(()));
                self.forget(block, stamp);
                return true;
            }
        };
        assert_eq!(answer, Err(expected));
        false
    }

    fn forget(&mut self, block: HeapBlock, stamp: u64) {
        self.release(block.range(), stamp);
        self.live.remove(&block.address);
        self.freed.push(block);
    }

    fn release(&mut self, range: Range, stamp: u64) {
        self.largest_stamp = self.largest_stamp.max(stamp);
        for cell in self.cells(range) {
            cell.owner = None;
            cell.stamp = cell.stamp.max(stamp);
        }
    }

    fn free_stale(&mut self, which: u16) -> bool {
        let Some(nth) = usize::from(which).checked_rem(self.freed.len()) else { return false };
        let block = self.freed[nth];
        let address = block.address;
        let cell = self.cell(address);
        let expected = match cell.owner {
            _ if !cell.managed => HeapError::Foreign { address },
            None => HeapError::DoubleFree { address },
            Some(owner) if owner != address => {
                HeapError::Interior { address, block: self.live[&owner].range() }
            }
            Some(_) => HeapError::Stale { address },
        };
        assert_eq!(self.heap.free_block(&block, 0), Err(expected));
        false
    }

    fn resize(&mut self, which: u16, bytes: u64, stamp: u64, before: &Sight) -> bool {
        let Some(block) = self.pick(which) else { return false };
        let old = block.range();
        // A border between the two would be seen as an extent that the block may not take.
        let above = before.extents.iter().find(|extent| extent.range.start == old.end());
        match self.heap.resize_in_place(block.address, bytes, stamp) {
            Ok(new) => {
                assert!(new.address == block.address && new.bytes >= bytes);
                if new.bytes > old.len {
                    let more = new.bytes - old.len;
                    assert!(above.is_some_and(|extent| extent.range.len >= more));
                    for cell in self.cells(Range::new(old.end(), more)) {
                        assert!(cell.owner.is_none());
                        cell.owner = Some(block.address);
                    }
                    self.live.remove(&block.address);
                    let cells = Range::new(new.address, new.bytes);
                    self.cells(cells).iter_mut().for_each(|cell| cell.owner = None);
                    self.adopt(new);
                } else if new.bytes < old.len {
                    self.release(Range::new(new.range().end(), old.len - new.bytes), stamp);
                    self.live.insert(new.address, new);
                }
                assert_eq!(self.heap.block_at(new.address), Ok(new));
                true
            }
            Err(HeapError::NoRoom { block: given, wanted, available }) => {
                assert_eq!(given, old);
                assert!(available < wanted && wanted >= bytes);
                let most = old.len + above.map_or(0, |extent| extent.range.len);
                assert!(available == most || available == old.len);
                false
            }
            Err(why) => panic!("{why}"),
        }
    }

    /// Every promise about the heap as it stands.
    fn verify(&mut self, sight: &Sight) {
        debug_assert_eq!(self.heap.check(), Ok(()));
        let unit = self.unit();
        let Sight { managed, live, blocks, extents } = sight;

        let own: u64 = self.live.values().map(|block| block.bytes).sum();
        assert_eq!((*live, *blocks), (own, self.live.len() as u64));
        let cells =
            self.windows.iter().flat_map(|(_, cells)| cells).filter(|cell| cell.managed).count();
        assert_eq!(*managed, cells as u64 * unit);
        let free: u64 = extents.iter().map(|extent| extent.range.len).sum();
        assert_eq!(self.heap.free_bytes(), free);
        let largest = extents.iter().map(|extent| extent.range.len).max().unwrap_or(0);
        assert_eq!(self.heap.largest_free(), largest);
        let small_max = self.heap.config().small_max;
        if self.live.values().all(|block| block.bytes > small_max) {
            assert_eq!(live + free, *managed, "slabs keep memory without a block in them");
        }

        let mut below: Option<(Range, Cell)> = None;
        for &Extent { range, stamp } in extents {
            let largest_stamp = self.largest_stamp;
            let cells = self.cells(range);
            for (n, cell) in cells.iter().enumerate() {
                assert!(cell.managed && cell.owner.is_none(), "{range} is not free");
                assert!(stamp >= cell.stamp, "{range} lost a stamp: {stamp} < {}", cell.stamp);
                assert!(n == 0 || !cell.cut_before, "{range} crosses a border");
                assert!(n == cells.len() - 1 || !cell.cut_after, "{range} crosses a border");
            }
            assert!(stamp <= largest_stamp);
            let (first, last) = (cells[0], cells[cells.len() - 1]);
            if let Some((lower, lower_last)) = below {
                assert!(lower.end() <= range.start);
                let cut = lower_last.cut_after || first.cut_before;
                assert!(lower.end() < range.start || cut, "{lower} and {range} are not merged");
            }
            below = Some((range, last));
        }
    }
}

impl Sight {
    /// The first address of `range` that no free extent covers.
    fn first_not_free(&self, range: Range) -> Option<u64> {
        let mut at = range.start;
        while at < range.end() {
            let covering = self.extents.iter().find(|extent| extent.range.contains(at));
            match covering {
                Some(extent) => at = extent.range.end(),
                None => return Some(at),
            }
        }
        None
    }
}
