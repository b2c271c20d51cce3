//! The library alone, imported by a glob: the standard library's names keep their meaning.

pub use aquifer;

use aquifer::*;

/// Fails to compile if `Vec`, `Result` or `core` is another library's here.
pub fn sizes(pool: &DevicePool) -> Result<Vec<usize>, MemoryError> {
    pool.stream()?;
    Ok(vec![core::mem::size_of::<Block>()])
}
