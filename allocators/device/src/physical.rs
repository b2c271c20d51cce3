//! What stands behind the addresses.
//!
//! With virtual memory management ([`mapped`]) a pool has one range of addresses and a stock of
//! physical handles, all of one size. Addresses are cheap and handles are memory, so handles go
//! where the need is: a live block's stay, those under free ranges may be taken away and mapped
//! elsewhere. Without it ([`plain`]) a pool has whole allocations of the driver's, each a segment
//! that no block crosses.

pub(crate) mod commons;
pub(crate) mod handle;
pub(crate) mod mapped;
pub(crate) mod plain;
pub(crate) mod slots;
pub(crate) mod window;

use mapped::Mapped;
use plain::Plain;

/// One of the two.
#[derive(Debug)]
pub(crate) enum Physical {
    Mapped(Mapped),
    Plain(Plain),
}
