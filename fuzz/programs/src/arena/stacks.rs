//! Stacks of wrappers, including arenas.

use super::{books::Books, shadow::Shadow};
use crate::program::{Bytes, MAX_OPS};
use allocator_api2::alloc::Allocator;
use aquifer_adapters::{
    Arena, ArenaSettings, CountingAllocator, Fallback, Limit, Segregate, Tagged,
};
use aquifer_core::{Budget, Tag};

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &mut Bytes<'_>) {
    let books = Books::default();
    let depth = 1 + usize::from(bytes.choice(4));
    let layers: Vec<u8> = (0..depth).map(|_| bytes.u8()).collect();
    stack(&layers, &books, &mut |top| {
        let mut shadow = Shadow::default();
        bytes.steps(MAX_OPS, |bytes| {
            if bytes.choice(20) == 0 {
                books.refuse(u32::from(bytes.choice(5)));
            }
            shadow.step(top, bytes);
        });
        books.refuse(0);
        shadow.drain(top, bytes);
    });
    assert_eq!(books.reap(), (0, 0), "something was not given back");
}

/// Stacks the layers over `below`, the first one innermost, and runs `work` on the outermost. Each
/// layer's account is checked when those above it are dropped.
fn stack(layers: &[u8], below: &dyn Allocator, work: &mut dyn FnMut(&dyn Allocator)) {
    let Some((layer, above)) = layers.split_first() else { return work(below) };
    let setting = usize::from(layer / 7);
    match layer % 7 {
        0 => {
            let budget = Budget::new("fuzz", 4000 << (setting % 4));
            stack(above, &Limit::new(below, budget.clone()), work);
            assert_eq!(budget.used(), 0);
        }
        1 => {
            let counted = CountingAllocator::new(below);
            stack(above, &counted, work);
            let stats = counted.stats();
            assert_eq!((stats.live, stats.blocks), (0, 0));
        }
        2 => stack(above, &Tagged::new(below, Tag::named("fuzz")), work),
        3 => {
            let first = Arena::with_settings_in(ArenaSettings::new().limit(2000), below);
            let second = Books::default();
            stack(above, &Fallback::new(&first, &second), work);
            assert_eq!(second.reap(), (0, 0));
        }
        4 => {
            let other = Books::default();
            stack(above, &Segregate::new(1 << (setting % 12), below, &other), work);
            assert_eq!(other.reap(), (0, 0));
        }
        5 => {
            let other = Books::default();
            stack(above, &Segregate::new(1 << (setting % 12), &other, below), work);
            assert_eq!(other.reap(), (0, 0));
        }
        _ => {
            let settings =
                ArenaSettings::new().first_chunk(100 << (setting % 8)).max_chunk(4 << 10);
            let arena = Arena::with_settings_in(settings, below);
            stack(above, &&arena, work);
        }
    }
}
