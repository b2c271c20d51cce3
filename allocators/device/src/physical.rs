//! Physical memory behind a pool's addresses.
//!
//! - With virtual memory management ([`mapped`]), a pool has one range of addresses and a set of
//!   physical handles. Addresses are cheap and handles are memory, so handles are moved to where
//!   they are needed: those of live blocks stay, and those under free ranges can be unmapped and
//!   mapped elsewhere.
//! - Without it ([`segments`]), a pool has whole allocations of the driver. Each is a segment, and
//!   no block crosses segments.

pub(crate) mod handle;
pub(crate) mod mapped;
pub(crate) mod segments;
pub(crate) mod shared_free;
pub(crate) mod slots;
pub(crate) mod window;

use mapped::Mapped;
use segments::Segments;

/// The physical memory of a pool, of one of the two kinds.
#[derive(Debug)]
pub(crate) enum Physical {
    Mapped(Mapped),
    Segments(Segments),
}
