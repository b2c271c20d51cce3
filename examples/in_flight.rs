//! An asynchronous copy in safe code: the flight owns the vector and returns it.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DeviceBuffer, Runtime, vec::Vec};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;

    let mut v = Vec::new_in(rt.pinned_near(0).allocator());
    v.extend((0..1u64 << 16).rev());
    let mut x: DeviceBuffer<u64> = pool.buffer(&s, v.len())?;

    let flight = s.upload(v, &mut x)?; // queued; the host continues
    let mut v = flight.wait()?; // returns the vector

    v.fill(0);
    let v = s.download(&x, v)?.wait()?;
    assert_eq!((v[0], v[v.len() - 1]), ((1 << 16) - 1, 0));

    // If the flight is dropped instead, the vector's memory is returned to its pool when the copy
    // is complete.
    drop(s.upload(v, &mut x)?);
    println!("copied {} bytes up and down", 2 * x.len() * size_of::<u64>());
    Ok(())
}
