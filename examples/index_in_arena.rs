//! A hash map whose table and keys are in an arena, so that all of it is freed in one step.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Arena, Bytes};
use hashbrown::HashMap;
use std::{error::Error, fs, hash::RandomState};

/// Counts the words of `text` and returns the most frequent one. The words are copied into the
/// arena, as if `text` were a buffer that is reused for each batch.
fn most_frequent<'a>(arena: &'a Arena, text: &str) -> Option<(&'a str, u32)> {
    let mut counts =
        HashMap::<&'a str, u32, RandomState, &'a Arena>::with_hasher_in(RandomState::new(), arena);
    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
        match counts.get_mut(word) {
            Some(count) => *count += 1,
            None => {
                counts.insert(arena.alloc_str(word), 1);
            }
        }
    }
    counts.into_iter().max_by_key(|&(word, count)| (count, word))
}

fn main() -> Result<(), Box<dyn Error>> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/README.md"))?;
    let mut arena = Arena::new();
    let mut chunks = 0;
    for batch in 0..10 {
        let found = most_frequent(&arena, &text);
        let (word, count) = found.ok_or("a file without words")?;
        let stats = arena.stats();
        if batch == 0 {
            println!(
                "\"{word}\" {count} times; tables and words took {}",
                Bytes(stats.high_water as u64)
            );
        } else {
            assert_eq!(stats.chunks, chunks, "later batches fit where the first ones did");
        }
        // Frees everything at once, without walking the table.
        arena.reset()?;
        chunks = arena.stats().chunks;
    }
    println!("ten batches in {chunks} chunk");
    Ok(())
}
