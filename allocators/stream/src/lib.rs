//! Leased CUDA streams with epochs, records of which streams use a block, and safe asynchronous
//! copies. Part of aquifer; promises no stability beyond what aquifer re-exports.
//!
//! | item | holds |
//! |---|---|
//! | [`StreamPool`], [`Stream`] | leased and recycled streams, adopted streams of other libraries |
//! | [`Timeline`], [`epochs`] | the epochs of a stream, and the events that prove them complete |
//! | [`UseList`], [`Use`] | the uses of a block by streams other than its owner stream |
//! | [`Launch`], [`PreparedLaunch`] | all blocks of one launch, ordered and stamped together |
//! | [`Stream::upload`], [`Stream::scope`] | asynchronous copies that safe code cannot race with |
//! | [`Retirement`] | whether driver calls may still use a handle that is about to be destroyed |
//! | [`Spin`], [`AllLocked`] | the spin lock of a stream's cache, and several of them at once |

mod attachments;
mod copy;
pub mod epochs;
mod events;
mod launch;
mod life;
mod lock;
mod pool;
mod retirement;
mod stream;
mod sync;
mod timeline;
mod use_table;
mod uses;

pub use copy::{CopyScope, Grid, HostOwned, InFlight, Landing, RefusedCopy};
pub use epochs::Epochs;
pub use launch::{Account, Launch, PreparedLaunch, TrackUses};
pub use life::StreamLifetime;
pub use lock::{AllLocked, Spin};
pub use pool::{AfterSynchronize, DEFAULT_CAP, StreamPool};
pub use retirement::{Calling, Ended, Retirement};
pub use stream::{Point, Stream};
pub use timeline::{Fence, Timeline};
pub use use_table::LastUse;
pub use uses::{Noted, Use, UseList, Uses, Watch};

// State of streams is in atomics and behind locks that ignore poison, and no code of the program
// runs while one is held. So a panic that unwinds past a handle leaves it usable.
aquifer_core::__unwind_safe! { [] Stream, [] StreamPool, [] Timeline }
