//! The library with its default features beside the user's own cudarc, whose types are one and the same.

pub use aquifer;
pub use cudarc;
