//! A buffer of one stream used on another. The library orders the streams, and the host does not
//! wait.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DeviceBuffer, Runtime};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let (s, u) = (pool.stream()?, pool.stream()?);

    let host: Vec<u32> = (0..4096).collect();
    let mut a: DeviceBuffer<u32> = pool.buffer(&s, host.len())?;
    let mut b: DeviceBuffer<u32> = pool.buffer(&u, host.len())?;
    s.try_scope(|c| c.upload(&host, &mut a))?;

    u.copy(&a, &mut b)?; // `a` is owned by `s`, so `u` waits for `s`
    drop(a); // `s` reuses these bytes only after the copy on `u`

    let mut c: DeviceBuffer<u32> = pool.buffer(&s, host.len())?;
    s.fill(&mut c, 0xff)?;

    let mut back = vec![0u32; host.len()];
    u.try_scope(|c| c.download(&b, &mut back))?;
    assert_eq!(back, host);
    println!(
        "{} waits between streams, {} of the host",
        pool.stats().stream_waits,
        pool.stats().host_waits
    );
    Ok(())
}
