//! Memory of another library, copied and filled here, and given back: [`Adopted`].
//!
//! With a GPU the other library is cudarc, whose slice it is. Without one it is a few lines that
//! stand for such a library on the simulated device. The middle is the same for both.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![expect(unsafe_code, reason = "answers for memory of another library")]

use aquifer::{
    Adopted, DeviceBuffer, DevicePool, DeviceRange, MemoryError, Runtime,
    driver::{External, Foreign},
};
use std::{error::Error, sync::Arc};

const LEN: usize = 1 << 16;

/// What a program does with a buffer that is not its own. Streams are ordered by the library: `s`
/// waits for the other library's work, and that library's stream for the work on `s`.
fn double<F: Foreign<Item = f32>>(pool: &DevicePool, theirs: F) -> Result<F, MemoryError> {
    let s = pool.stream()?;
    let mut x = Adopted::new(pool.streams(), theirs)?;
    let mut mine: DeviceBuffer<f32> = pool.buffer(&s, LEN)?;
    s.copy(&x, &mut mine)?;
    let mut host = vec![0.0; LEN];
    s.try_scope(|copies| copies.download(&mine, &mut host))?;
    host.iter_mut().for_each(|number| *number *= 2.0);
    s.try_scope(|copies| copies.upload(&host, &mut x))?;
    s.fill(&mut x.slice_mut(0..1)?, -1.0)?; // queued, and not waited for by the host
    Ok(x.into_inner()?) // dropping `x` instead frees it by its library, behind all of its uses
}

fn is_doubled(numbers: &[f32]) -> bool {
    numbers[0] == -1.0 && numbers[1..].iter().all(|&number| number == 3.0)
}

#[cfg(feature = "cuda")]
fn on_cudarc(pool: &DevicePool) -> Result<(), Box<dyn Error>> {
    // A program on cudarc has these already. Both libraries use the device's primary context.
    let cu = cudarc::driver::CudaContext::new(pool.device().0 as usize)?.new_stream()?;
    let theirs: cudarc::driver::CudaSlice<f32> = cu.clone_htod(&vec![1.5; LEN])?;
    let theirs = double(pool, theirs)?;
    assert!(is_doubled(&cu.clone_dtoh(&theirs)?));
    println!("a slice of cudarc on {} was doubled", pool.info().name);
    Ok(())
}

fn on_simulator(rt: &Runtime, pool: &DevicePool) -> Result<(), Box<dyn Error>> {
    let driver = rt.driver().ok_or("no driver")?;
    let stream = driver.stream_create(pool.device(), 0)?;
    let bytes = 4 * LEN as u64;
    let range = DeviceRange {
        device: pool.device(),
        address: driver.mem_alloc(pool.device(), bytes)?,
        bytes,
    };
    // SAFETY: 1. the range is mapped until the end. 2. no work is queued. 3. the guard frees
    // nothing. 4. the stream is never destroyed.
    let mut theirs =
        unsafe { External::<f32, _>::new(range, stream, Some(Arc::new(())), "a guard") };
    let s = pool.stream()?;
    let mut x = Adopted::new(pool.streams(), theirs)?;
    s.fill(&mut x, 1.5)?;
    theirs = double(pool, x.into_inner()?)?;
    let x = Adopted::new(pool.streams(), theirs)?;
    let mut back = vec![0.0; LEN];
    s.try_scope(|copies| copies.download(&x, &mut back))?;
    assert!(is_doubled(&back));
    println!("memory of another library on {} was doubled", pool.info().name);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    #[cfg(feature = "cuda")]
    if rt.driver().is_some_and(|driver| driver.name() == "cuda") {
        return on_cudarc(pool);
    }
    on_simulator(&rt, pool)
}
