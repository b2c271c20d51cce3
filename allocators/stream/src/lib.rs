//! Leased streams, what is known of their past, who uses which block, and copies in safe code.
//!
//! | module | holds |
//! |---|---|
//! | [`StreamPool`], [`Stream`] | streams that are leased and come back; adoption of other libraries' streams |
//! | [`Timeline`], [`epochs`] | a stream's past in epochs, proved by events that are recorded only when somebody asks |
//! | [`UseList`], [`Use`] | which other streams use a block |
//! | [`Launch`], [`Ready`] | all the blocks that one launch touches, ordered and stamped at once |
//! | [`Stream::upload`], [`Stream::scope`] and their kin | asynchronous copies that safe code cannot race with |
//! | [`Retirement`] | who may still call for a handle that is about to go |
//! | [`Spin`] | the lock in front of a stream's cache |

mod attachments;
mod copy;
pub mod epochs;
mod events;
mod identity;
mod launch;
mod life;
mod lock;
mod pool;
mod retirement;
mod stream;
mod sync;
mod timeline;
mod uses;
mod waited;

pub use copy::{Grid, HostOwned, InFlight, Landing, Refused, Scope};
pub use epochs::Epochs;
pub use launch::{Account, Launch, Ready, Tracked};
pub use life::Life;
pub use lock::Spin;
pub use pool::{DEFAULT_CAP, Lease, StreamPool};
pub use retirement::{Calling, Ended, Retirement};
pub use stream::{Point, Stream};
pub use timeline::{Fence, Timeline};
pub use uses::{Noted, Use, UseList, Uses, Watch, node::LastUse};
