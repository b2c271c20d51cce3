//! The library with its default features beside the user's own cudarc: both share their types.

pub use aquifer;
pub use cudarc;
