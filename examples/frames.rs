//! A ring of arenas for buffers that live for one step, while earlier steps are still being copied.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{DeviceBuffer, Frames, MemoryError, Runtime, vec::Vec};

fn main() -> Result<(), MemoryError> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;
    let mut x: DeviceBuffer<u32> = pool.buffer(&s, 1024)?;

    let mut frames = Frames::new_in(3, rt.pinned_near(0).allocator());
    for step in 0..10u32 {
        let frame = frames.next()?; // waits for the step three steps before
        let mut batch = Vec::new_in(frame.arena());
        batch.extend((0..1024).map(|i| i + step));
        drop(s.upload(batch, &mut x)?); // the arena remembers the stream
    }

    let mut back = vec![0u32; 1024];
    s.try_scope(|c| c.download(&x, &mut back))?;
    assert_eq!(back[5], 5 + 9);
    println!("ten steps through three frames");
    Ok(())
}
