//! Plain Rust collections in pinned memory, on the node next to the first device.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Runtime, vec::Vec};
use hashbrown::HashMap;
use std::{error::Error, hash::RandomState};

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;

    let mut v = Vec::with_capacity_in(1 << 20, rt.pinned_near(0).allocator());
    v.extend((0..1u32 << 20).map(|i| i.wrapping_mul(2_654_435_761)));

    let mut index = HashMap::<u64, [f32; 16], RandomState, _>::with_hasher_in(
        RandomState::new(),
        rt.pinned_near(0).allocator(),
    );
    for key in 0..1000 {
        index.insert(key, [key as f32; 16]);
    }

    assert_eq!(v[3], 3u32.wrapping_mul(2_654_435_761));
    assert_eq!(index[&999][15], 999.0);
    println!("{} bytes in pinned memory", rt.pinned_near(0).stats().memory.live);
    Ok(())
}
