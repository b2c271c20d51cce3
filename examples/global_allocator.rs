//! A global allocator that accounts memory by tag, and a route that puts a library's buffers into
//! pinned memory.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Bytes, Runtime, Tag, global, staging, tagged};
use std::error::Error;

#[global_allocator]
static GLOBAL: aquifer::Global = aquifer::Global::new();

/// Returns the lengths of the lines.
fn parse(text: &[u8]) -> Vec<usize> {
    text.split(|&byte| byte == b'\n').map(<[u8]>::len).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    staging::install(rt.pinned_near(0).clone())?;

    // The reader has no support for pinned memory. What it allocates in this scope is pinned all
    // the same.
    let path = std::env::temp_dir().join(format!("aquifer-example-{}", std::process::id()));
    std::fs::write(&path, "a line of text\n".repeat(1 << 19))?;
    let bytes: Vec<u8> = staging::route(|| std::fs::read(&path))?;
    std::fs::remove_file(&path)?;
    let pinned = rt.pinned_near(0).stats().memory.live;
    assert!(pinned >= bytes.len() as u64, "{pinned} bytes are pinned, {} were read", bytes.len());

    // Count what is allocated here under a name.
    let parsing = Tag::named("parse");
    let lines = tagged(parsing, || parse(&bytes));
    let under = Bytes(global::allocated_under(parsing).bytes);
    assert!(under.0 >= size_of_val(&lines[..]) as u64);
    println!(
        "{} read into pinned memory; {under} allocated to parse it",
        Bytes(bytes.len() as u64)
    );
    println!("the program holds {}", Bytes(global::stats().live));
    Ok(())
}
