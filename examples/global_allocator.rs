//! A global allocator that knows who holds what, and a route that puts a library's buffers into pinned memory.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Runtime, staging};
use std::error::Error;

#[global_allocator]
static GLOBAL: aquifer::Global = aquifer::Global::new();

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    staging::install(rt.pinned_near(0).clone())?;

    // The reader knows nothing of pinned memory; what it allocates in this scope lies there all the same.
    let path = std::env::temp_dir().join(format!("aquifer-example-{}", std::process::id()));
    std::fs::write(&path, vec![7; 8 << 20])?;
    let bytes: Vec<u8> = staging::route(|| std::fs::read(&path))?;

    std::fs::remove_file(&path)?;
    let pinned = rt.pinned_near(0).stats().memory.live;
    assert!(pinned >= bytes.len() as u64, "{pinned} bytes are pinned, {} were read", bytes.len());
    println!(
        "{} bytes read into pinned memory; the program holds {}",
        bytes.len(),
        aquifer::global::stats().live
    );
    Ok(())
}
