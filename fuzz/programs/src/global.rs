//! Programs over the global allocator, checked against a shadow of its blocks.
//!
//! Three allocators are tested: without counting, with counting, and with tags. They wrap an
//! allocator that tracks its blocks ([`below`]). The program allocates, zeroed or not, frees and
//! resizes, from its own thread and from others, in nested scopes of tags and routes, under caps,
//! and with failures of the wrapped allocator. Invariants after every operation:
//!
//! - a block keeps its contents when it is resized and freed, and zeroed memory is zero;
//! - the allocator that serves a block has it with the requested layout;
//! - totals, the bytes of each route and those of each tag equal the shadow's;
//! - a failed operation changes nothing; nothing beyond the cap is served, and nothing well below
//!   it fails.
//!
//! At the end everything is freed, and the wrapped allocator has no live block.
#![expect(unsafe_code, reason = "calls allocators by hand")]

pub(crate) mod below;

use crate::program::{Bytes, MAX_OPS, alone};
use aquifer_core::{Tag, tagged};
use aquifer_global::{
    Counted, Global, Tracked, Uncounted, allocated_under, capture, held_under, report, route,
    set_cap, stats, top, unrouted,
};
use below::{Books, routes};
use std::{
    alloc::{GlobalAlloc, Layout},
    slice,
    sync::LazyLock,
    thread,
};

/// Maximum depth of nested scopes.
const MAX_DEPTH: usize = 5;
/// Bytes that other threads of the process may hold as credit, with a margin.
const CHANGE: u64 = 4 << 20;

static UNCOUNTED: Global<Books, Uncounted> = Global::over(Books::new());
static COUNTED: Global<Books, Counted> = Global::over(Books::new());
static TRACKED: Global<Books, Tracked> = Global::over(Books::new());

/// More tags than a thread keeps counters for, so that some share one.
static TAGS: LazyLock<Vec<Tag>> = LazyLock::new(|| {
    let named = (0..11).map(|n| Tag::named(&format!("program {n}")));
    std::iter::once(Tag::NONE).chain(named).collect()
});

/// One of the three allocators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Uncounted,
    Counted,
    Tracked,
}

impl Kind {
    fn allocator(self) -> &'static dyn GlobalAlloc {
        match self {
            Self::Uncounted => &UNCOUNTED,
            Self::Counted => &COUNTED,
            Self::Tracked => &TRACKED,
        }
    }

    fn books(self) -> &'static Books {
        match self {
            Self::Uncounted => UNCOUNTED.inner(),
            Self::Counted => COUNTED.inner(),
            Self::Tracked => TRACKED.inner(),
        }
    }
}

/// A live block, as its user knows it.
#[derive(Debug)]
struct Block {
    at: *mut u8,
    layout: Layout,
    kind: Kind,
    tag: Tag,
    fill: u8,
}

// SAFETY: the block belongs to the owner of this value, as that of a `Box` does.
unsafe impl Send for Block {}

impl Block {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the block is live, has that many bytes, and all of them were written.
        unsafe { slice::from_raw_parts(self.at, self.layout.size()) }
    }

    fn is_whole(&self, bytes: usize) -> bool {
        self.bytes()[..bytes].iter().all(|&byte| byte == self.fill)
    }

    fn write(&mut self, fill: u8) {
        self.fill = fill;
        // SAFETY: the block is live and has that many bytes.
        unsafe { self.at.write_bytes(fill, self.layout.size()) };
    }

    fn size(&self) -> u64 {
        self.layout.size() as u64
    }

    fn is_routed(&self) -> bool {
        routes().iter().any(|(_, strip)| strip.window().contains(&self.at.addr()))
    }
}

/// The state of a running program.
struct Run {
    blocks: Vec<Block>,
    cap: u64,
    /// Bytes allocated under each tag before.
    allocated: Vec<u64>,
    ops: usize,
}

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &[u8]) {
    let _alone = alone();
    let mut bytes = Bytes::new(bytes);
    let allocated = TAGS.iter().map(|&tag| allocated_under(tag).bytes).collect();
    let mut run = Run { blocks: Vec::new(), cap: u64::MAX, allocated, ops: 0 };
    assert_eq!(stats().live, 0);
    while !bytes.is_empty() && run.ops < MAX_OPS {
        run.steps(&mut bytes, 0);
    }
    set_cap(u64::MAX);
    for kind in [Kind::Uncounted, Kind::Counted, Kind::Tracked] {
        kind.books().refuse(0);
    }
    while !run.blocks.is_empty() {
        run.free(0);
        run.check();
    }
    for kind in [Kind::Uncounted, Kind::Counted, Kind::Tracked] {
        assert_eq!(kind.books().blocks(), 0, "{kind:?}");
    }
    assert_eq!((stats().live, stats().routed), (0, 0));
}

impl Run {
    /// Runs steps until the innermost scope is left.
    fn steps(&mut self, bytes: &mut Bytes<'_>, depth: usize) {
        while !bytes.is_empty() && self.ops < MAX_OPS {
            self.ops += 1;
            match bytes.choice(24) {
                0..=6 => self.allocate(bytes),
                7..=10 => {
                    let at = usize::from(bytes.u8());
                    if !self.blocks.is_empty() {
                        self.free(at % self.blocks.len());
                    }
                }
                11..=14 => self.resize(bytes),
                15 | 16 if depth < MAX_DEPTH => {
                    let tag = TAGS[usize::from(bytes.u8()) % TAGS.len()];
                    tagged(tag, || self.steps(bytes, depth + 1));
                }
                17 | 18 if depth < MAX_DEPTH => {
                    let (to, _) = routes()[usize::from(bytes.u8()) % routes().len()];
                    let at_least = 1 << bytes.choice(14);
                    route(to, at_least, || self.steps(bytes, depth + 1));
                }
                19 if depth < MAX_DEPTH => unrouted(|| self.steps(bytes, depth + 1)),
                20 if depth < MAX_DEPTH => self.elsewhere(bytes, depth),
                21 => self.set_cap(bytes),
                22 => self.kind(bytes).books().refuse(u32::from(bytes.choice(3))),
                _ if depth > 0 => break,
                _ => self.tell(),
            }
            self.check();
        }
    }

    fn kind(&self, bytes: &mut Bytes<'_>) -> Kind {
        [Kind::Uncounted, Kind::Counted, Kind::Tracked, Kind::Tracked][usize::from(bytes.choice(4))]
    }

    /// Returns whether the account allows `more` bytes of this kind, or `None` if both results are
    /// valid.
    fn allowed(&self, kind: Kind, more: u64) -> Option<bool> {
        let live = self.charged() + more;
        if kind == Kind::Uncounted || live.saturating_add(CHANGE) <= self.cap {
            Some(true)
        } else if live > self.cap {
            Some(false)
        } else {
            None
        }
    }

    fn charged(&self) -> u64 {
        let counted = |block: &&Block| block.kind != Kind::Uncounted && !block.is_routed();
        self.blocks.iter().filter(counted).map(Block::size).sum()
    }

    fn allocate(&mut self, bytes: &mut Bytes<'_>) {
        let kind = self.kind(bytes);
        let size = usize::from(bytes.small()) + 1;
        let zeroed = bytes.flag();
        let Ok(layout) = Layout::from_size_align(size, 1 << bytes.choice(13)) else { return };
        let (allowed, refuses) = (self.allowed(kind, size as u64), kind.books().refuses());
        // SAFETY: the layout has a size.
        let at = unsafe {
            if zeroed {
                kind.allocator().alloc_zeroed(layout)
            } else {
                kind.allocator().alloc(layout)
            }
        };
        if at.is_null() {
            assert!(refuses || allowed != Some(true), "refused without a reason");
            return;
        }
        assert!(at.addr().is_multiple_of(layout.align()));
        let mut block = Block { at, layout, kind, tag: Tag::current(), fill: 0 };
        assert!(block.is_routed() || !refuses && allowed != Some(false), "served beyond the cap");
        assert!(!zeroed || block.is_whole(size), "dirt where zeros were asked for");
        block.write(bytes.u8());
        self.note_allocated(block.tag, kind, size);
        self.blocks.push(block);
    }

    fn free(&mut self, at: usize) {
        let block = self.blocks.swap_remove(at);
        assert!(block.is_whole(block.layout.size()));
        // SAFETY: the block is live, of this allocator, with this layout, and not used elsewhere.
        unsafe { block.kind.allocator().dealloc(block.at, block.layout) };
    }

    fn resize(&mut self, bytes: &mut Bytes<'_>) {
        let at = usize::from(bytes.u8());
        let size = usize::from(bytes.small()) + 1;
        let Some(index) = at.checked_rem(self.blocks.len()) else { return };
        let block = &self.blocks[index];
        let (kind, old, tag) = (block.kind, block.layout, block.tag);
        let (was_routed, refuses) = (block.is_routed(), kind.books().refuses());
        let growth = size.saturating_sub(old.size());
        // A block that leaves its route is charged in full.
        let more = if was_routed { size } else { growth };
        let allowed = self.allowed(kind, more as u64);
        // SAFETY: the block is live, of this allocator, with this layout; the size is not zero and
        // small.
        let moved = unsafe { kind.allocator().realloc(block.at, old, size) };
        let block = &mut self.blocks[index];
        if moved.is_null() {
            assert!(refuses || allowed != Some(true), "refused without a reason");
            assert!(block.is_whole(old.size()), "a refusal leaves the block");
            return;
        }
        block.at = moved;
        let Ok(new) = Layout::from_size_align(size, old.align()) else { return };
        block.layout = new;
        assert!(moved.addr().is_multiple_of(new.align()));
        assert!(block.is_whole(size.min(old.size())), "the common part is kept");
        if !block.is_routed() && more > 0 {
            assert!(allowed != Some(false), "served beyond the cap");
        }
        block.write(bytes.u8());
        // Growth counts for the block's tag, if it is known.
        let tag = if kind == Kind::Tracked { tag } else { Tag::current() };
        self.note_allocated(tag, kind, growth);
    }

    /// Records an allocation under a tag. Untagged bytes are counted only by the allocator with
    /// tags.
    fn note_allocated(&mut self, tag: Tag, kind: Kind, bytes: usize) {
        let counts = match kind {
            Kind::Uncounted => false,
            Kind::Counted => tag != Tag::NONE,
            Kind::Tracked => true,
        };
        if let (true, Some(place)) = (counts, TAGS.iter().position(|&other| other == tag)) {
            self.allocated[place] += bytes as u64;
        }
    }

    /// Continues on another thread, with or without the scopes of this one.
    fn elsewhere(&mut self, bytes: &mut Bytes<'_>, depth: usize) {
        let context = bytes.flag().then(capture);
        thread::scope(|threads| {
            let work = || match context {
                Some(context) => context.run(|| self.steps(bytes, depth + 1)),
                None => self.steps(bytes, depth + 1),
            };
            // An explicit join: the end of the scope alone does not wait for the thread's own end.
            if let Err(panic) = threads.spawn(work).join() {
                std::panic::resume_unwind(panic);
            }
        });
    }

    fn set_cap(&mut self, bytes: &mut Bytes<'_>) {
        let live = self.charged();
        self.cap = match bytes.choice(4) {
            0 => u64::MAX,
            1 => live,
            2 => live.saturating_sub(u64::from(bytes.small())),
            _ => live + u64::from(bytes.small()),
        };
        let over = set_cap(self.cap);
        assert_eq!(over, live.saturating_sub(self.cap));
    }

    fn tell(&self) {
        let told = report();
        assert_eq!(told.stats.live, self.charged());
        let largest = top(3);
        assert!(largest.is_sorted_by_key(|of| std::cmp::Reverse(of.held.map(|held| held.live))));
    }

    fn check(&self) {
        let now = stats();
        assert_eq!(now.live, self.charged());
        assert!(now.peak >= now.live);
        let routed =
            self.blocks.iter().filter(|block| block.is_routed()).map(Block::size).sum::<u64>();
        assert_eq!(now.routed, routed);
        for block in &self.blocks {
            let ours = if block.kind == Kind::Tracked { 2 } else { 0 };
            let strips = routes().iter().find_map(|(_, strip)| strip.layout(block.at));
            let below = strips.or_else(|| block.kind.books().layout(block.at));
            let whole = below.map(|below| (below.size() - ours, below.align()));
            assert_eq!(whole, Some((block.layout.size(), block.layout.align())));
        }
        for (&tag, &allocated) in TAGS.iter().zip(&self.allocated) {
            let of = |block: &&Block| block.kind == Kind::Tracked && block.tag == tag;
            let live = self.blocks.iter().filter(of).map(Block::size).sum::<u64>();
            let count = self.blocks.iter().filter(of).count() as u64;
            let held = held_under(tag).unwrap_or_default();
            assert_eq!((held.live, held.blocks), (live, count), "{tag}");
            assert!(held.peak >= held.live);
            assert_eq!(allocated_under(tag).bytes, allocated, "{tag}");
        }
    }
}
