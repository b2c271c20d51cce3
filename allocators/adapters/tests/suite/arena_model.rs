//! Tests random programs against a model of an arena.
//!
//! The invariants after every operation are:
//!
//! - Live blocks do not overlap, are aligned, and hold what was written into them.
//! - No live block lies on bytes that a closed gate holds.
//! - Held bytes are unchanged since they were deferred, even after their arena is dropped.
//! - The statistics agree with the upstream allocator, and its bytes with the limit.

use crate::support::{Gated, Latch};
use allocator_api2::alloc::Allocator;
use aquifer_adapters::{Arena, ArenaMark, ArenaSettings, CountingAllocator};
use aquifer_core::DeferReuse;
use proptest::prelude::*;
use std::{alloc::Layout, ops::Range, ptr::NonNull, sync::Arc};

#[derive(Clone, Debug)]
enum Step {
    Allocate { size: usize, align: u32, zeroed: bool },
    Free { which: usize },
    Grow { which: usize, more: usize, align: u32, zeroed: bool },
    Shrink { which: usize, size: usize, align: u32 },
    Mark,
    Rewind { which: usize },
    Reset,
    Defer { which: usize },
    Open { which: usize },
    Replace,
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0..64usize;
    prop_oneof![
        8 => (0..200usize, 0..7u32, any::<bool>()).prop_map(|(size, align, zeroed)| Step::Allocate { size, align, zeroed }),
        3 => which.clone().prop_map(|which| Step::Free { which }),
        4 => (which.clone(), 0..300usize, 0..7u32, any::<bool>())
            .prop_map(|(which, more, align, zeroed)| Step::Grow { which, more, align, zeroed }),
        3 => (which.clone(), 0..200usize, 0..7u32).prop_map(|(which, size, align)| Step::Shrink { which, size, align }),
        2 => Just(Step::Mark),
        2 => which.clone().prop_map(|which| Step::Rewind { which }),
        1 => Just(Step::Reset),
        2 => which.clone().prop_map(|which| Step::Defer { which }),
        2 => which.prop_map(|which| Step::Open { which }),
        1 => Just(Step::Replace),
    ]
}

struct Block {
    start: NonNull<u8>,
    layout: Layout,
    fill: u8,
    /// The number of marks at its allocation: a rewind to one of them keeps the block.
    depth: usize,
}

impl Block {
    fn range(&self) -> Range<usize> {
        self.start.addr().get()..self.start.addr().get() + self.layout.size()
    }
}

struct Held {
    start: NonNull<u8>,
    bytes: usize,
    fill: u8,
    until: Arc<Latch>,
    opened: bool,
}

struct Model {
    pool: CountingAllocator<Gated>,
    arena: Arena<CountingAllocator<Gated>>,
    limit: usize,
    blocks: Vec<Block>,
    marks: Vec<ArenaMark>,
    held: Vec<Held>,
    fills: u8,
}

fn layout(size: usize, align: u32) -> Layout {
    Layout::from_size_align(size, 1 << align).unwrap_or(Layout::new::<u8>())
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
}

impl Model {
    fn new(pool: CountingAllocator<Gated>, limit: usize) -> Self {
        let arena = arena(&pool, limit);
        Self { pool, arena, limit, blocks: vec![], marks: vec![], held: vec![], fills: 0 }
    }

    fn keep(&mut self, start: NonNull<u8>, layout: Layout) {
        self.fills = self.fills % 250 + 1;
        fill(start, layout.size(), self.fills);
        self.blocks.push(Block { start, layout, fill: self.fills, depth: self.marks.len() });
    }

    /// Keeps the block that another one was resized to. Its earlier bytes are not written again,
    /// because a device may read them. A resized block does not outlive a mark that existed at the
    /// resize, even if it began before it.
    fn keep_changed(&mut self, start: NonNull<u8>, layout: Layout, old: &Block) {
        let had = old.layout.size().min(layout.size());
        assert!(bytes(start, had).iter().all(|&byte| byte == old.fill));
        fill(offset(start, had), layout.size() - had, old.fill);
        self.blocks.push(Block { start, layout, fill: old.fill, depth: self.marks.len() });
    }

    fn pick(&mut self, which: usize) -> Option<Block> {
        let at = which % self.blocks.len().max(1);
        (at < self.blocks.len()).then(|| self.blocks.remove(at))
    }

    #[expect(unsafe_code, reason = "calls the allocator's unsafe methods and `rewind`")]
    fn run(&mut self, step: &Step) {
        match *step {
            Step::Allocate { size, align, zeroed } => {
                let layout = layout(size, align);
                let arena = &self.arena;
                let block =
                    if zeroed { arena.allocate_zeroed(layout) } else { arena.allocate(layout) };
                let Ok(block) = block else { return };
                assert_eq!(block.len(), size);
                assert!(!zeroed || bytes(block.cast(), size).iter().all(|&byte| byte == 0));
                self.keep(block.cast(), layout);
            }
            Step::Free { which } => {
                if let Some(block) = self.pick(which) {
                    // SAFETY: a live block of this arena, forgotten here.
                    unsafe { (&self.arena).deallocate(block.start, block.layout) };
                }
            }
            Step::Grow { which, more, align, zeroed } => {
                let Some(block) = self.pick(which) else { return };
                let new = layout(block.layout.size() + more, align);
                let arena = &self.arena;
                // SAFETY: a live block of this arena; the new layout is no smaller.
                let grown = unsafe {
                    if zeroed {
                        arena.grow_zeroed(block.start, block.layout, new)
                    } else {
                        arena.grow(block.start, block.layout, new)
                    }
                };
                match grown {
                    Err(_) => self.blocks.push(block),
                    Ok(grown) => {
                        if zeroed {
                            let tail = &bytes(grown.cast(), new.size())[block.layout.size()..];
                            assert!(tail.iter().all(|&byte| byte == 0));
                        }
                        self.keep_changed(grown.cast(), new, &block);
                    }
                }
            }
            Step::Shrink { which, size, align } => {
                let Some(block) = self.pick(which) else { return };
                let new = layout(size.min(block.layout.size()), align);
                // SAFETY: a live block of this arena; the new layout is no larger.
                match unsafe { (&self.arena).shrink(block.start, block.layout, new) } {
                    Err(_) => self.blocks.push(block),
                    Ok(shrunk) => self.keep_changed(shrunk.cast(), new, &block),
                }
            }
            Step::Mark => self.marks.push(self.arena.mark()),
            Step::Rewind { which } => {
                if self.marks.is_empty() {
                    return;
                }
                let to = which % self.marks.len();
                self.blocks.retain(|block| block.depth <= to);
                let mark = self.marks[to];
                self.marks.truncate(to);
                // SAFETY: the mark is this arena's, later ones are gone, and so are the blocks
                // allocated since.
                unsafe { self.arena.rewind(mark) };
            }
            Step::Reset => {
                self.open_all();
                self.blocks.clear();
                self.marks.clear();
                assert_eq!(self.arena.reset(), Ok(()));
                assert!(self.arena.stats().chunks <= 1);
            }
            Step::Defer { which } => {
                let at = which % self.blocks.len().max(1);
                let Some(block) = self.blocks.get(at).filter(|block| block.layout.size() > 0)
                else {
                    return;
                };
                let until = Latch::closed();
                assert_eq!((&self.arena).defer(block.start, until.clone()), Ok(()));
                let start = block.start;
                self.held.push(Held {
                    start,
                    bytes: block.layout.size(),
                    fill: block.fill,
                    until,
                    opened: false,
                });
            }
            Step::Open { which } => {
                let at = which % self.held.len().max(1);
                if let Some(held) = self.held.get_mut(at) {
                    held.until.open();
                    held.opened = true;
                }
                self.held.retain(|held| !held.opened);
            }
            Step::Replace => {
                // Dropped with closed gates and live blocks.
                self.blocks.clear();
                self.marks.clear();
                self.arena = arena(&self.pool, self.limit);
            }
        }
    }

    fn open_all(&mut self) {
        for held in self.held.drain(..) {
            held.until.open();
        }
    }

    fn check(&self) {
        for (i, block) in self.blocks.iter().enumerate() {
            let range = block.range();
            assert!(range.start.is_multiple_of(block.layout.align()));
            assert!(bytes(block.start, block.layout.size()).iter().all(|&byte| byte == block.fill));
            for other in &self.blocks[..i] {
                assert!(!overlap(&range, &other.range()));
            }
        }
        for held in &self.held {
            assert!(
                bytes(held.start, held.bytes).iter().all(|&byte| byte == held.fill),
                "a held byte changed"
            );
        }
        let stats = self.arena.stats();
        assert!(stats.allocated <= stats.capacity && stats.allocated <= stats.high_water);
        assert!(stats.capacity <= self.limit);
        assert_eq!(stats.capacity as u64, self.pool.stats().live);
        let live: usize = self.blocks.iter().map(|block| block.layout.size()).sum();
        assert!(stats.allocated >= live);
    }
}

fn arena(pool: &CountingAllocator<Gated>, limit: usize) -> Arena<CountingAllocator<Gated>> {
    let settings = ArenaSettings::new().first_chunk(100).max_chunk(600).limit(limit);
    Arena::with_settings_in(settings, pool.clone())
}

#[expect(unsafe_code, reason = "reads blocks")]
fn bytes<'a>(start: NonNull<u8>, len: usize) -> &'a [u8] {
    // SAFETY: live or held blocks of at least as many bytes, which the model or zeroing has
    // written.
    unsafe { NonNull::slice_from_raw_parts(start, len).as_ref() }
}

#[expect(unsafe_code, reason = "points into blocks")]
fn offset(start: NonNull<u8>, by: usize) -> NonNull<u8> {
    // SAFETY: the block has at least as many bytes.
    unsafe { start.add(by) }
}

#[expect(unsafe_code, reason = "writes blocks")]
fn fill(start: NonNull<u8>, len: usize, value: u8) {
    // SAFETY: a live block of as many bytes.
    unsafe { start.write_bytes(value, len) };
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 700 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_arena_behaves_as_its_model(
        limit in prop_oneof![Just(2_000usize), Just(20_000)],
        steps in prop::collection::vec(step(), 1..if cfg!(miri) { 40 } else { 150 }),
    ) {
        let pool = CountingAllocator::new(Gated::default());
        let mut model = Model::new(pool.clone(), limit);
        for step in &steps {
            model.run(step);
            model.check();
        }
        model.open_all();
        drop(model);
        prop_assert_eq!(pool.inner().reap(), (0, 0));
        prop_assert_eq!(pool.stats().live, 0);
    }
}
