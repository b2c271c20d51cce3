//! Nothing but the library.

pub use aquifer;
