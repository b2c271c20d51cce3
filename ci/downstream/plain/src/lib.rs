//! Nothing but the library, all of it in scope: the standard library's names mean what they always do.

pub use aquifer;

use aquifer::*;

/// Fails to compile if `Vec`, `Result` or `core` is another library's here.
pub fn sizes(pool: &DevicePool) -> Result<Vec<usize>, MemoryError> {
    pool.stream()?;
    Ok(vec![core::mem::size_of::<Block>()])
}
