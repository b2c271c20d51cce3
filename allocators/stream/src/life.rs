//! How long a stream's handle is valid, and which thread may call the driver with it.

use aquifer_core::DriverError;
use aquifer_driver::{Driver, KeepAlive, RawStream, Relaxed};
use std::{
    fmt,
    sync::OnceLock,
    thread::{self, ThreadId},
};

/// How a stream's handle is kept valid for events that are recorded later.
///
/// ```
/// use aquifer::{DeviceId, Driver, StreamPool, sim::Sim, stream::StreamLifetime};
/// let driver = Sim::h200(1).driver();
/// let streams = StreamPool::new(driver.clone(), DeviceId(0), 4);
/// let theirs = driver.stream_create(DeviceId(0), 0)?;
/// // SAFETY: 1. a valid stream of this device. 2. it is never destroyed here.
/// let stream = unsafe { streams.adopt(theirs, StreamLifetime::Retired) }?;
/// stream.retire()?;                       // before it is destroyed
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub enum StreamLifetime {
    /// The pool owns the stream, and destroys it when the last reference is dropped.
    Owned,
    /// Another library owns the stream, which lives as long as this value.
    KeptAlive(KeepAlive),
    /// Another library owns the stream, and calls [`Stream::retire`](crate::Stream::retire) before
    /// destroying it.
    Retired,
    /// Another library owns the stream, and may destroy it whenever no call is in progress. Every
    /// free and use is fenced immediately with an event. Its blocks must be freed and its uses
    /// ended before it is destroyed.
    Fenced,
    /// The device's legacy default stream, which lives as long as the context.
    Legacy,
    /// The per-thread default stream of this thread. Its handle, 2, means a different stream on
    /// every other thread. So only this thread calls the driver with it, and it fences every free
    /// and use immediately.
    Thread(ThreadId),
}

impl StreamLifetime {
    /// Returns whether an event must be recorded at each free and at the end of each use, because
    /// it may be too late afterwards.
    pub(crate) fn fences_at_once(&self) -> bool {
        matches!(self, Self::Fenced | Self::Thread(_))
    }

    /// Returns whether the handle means this stream on the calling thread.
    pub(crate) fn is_valid_on_this_thread(&self) -> bool {
        match self {
            Self::Thread(owner) => thread::current().id() == *owner,
            _ => true,
        }
    }

    /// Returns whether [`Stream::retire`](crate::Stream::retire) leaves the stream usable: it
    /// belongs to a pool, or is the legacy default stream.
    pub(crate) fn outlives_retirement(&self) -> bool {
        matches!(self, Self::Owned | Self::Legacy)
    }
}

impl fmt::Debug for StreamLifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owned => f.write_str("Owned"),
            Self::KeptAlive(_) => f.write_str("KeptAlive"),
            Self::Retired => f.write_str("Retired"),
            Self::Fenced => f.write_str("Fenced"),
            Self::Legacy => f.write_str("Legacy"),
            Self::Thread(thread) => f.debug_tuple("Thread").field(thread).finish(),
        }
    }
}

/// The driver's id of a stream, once it is known.
pub(crate) struct StreamIdentity(OnceLock<u64>);

impl StreamIdentity {
    pub(crate) fn new(id: Option<u64>) -> Self {
        Self(id.map_or_else(OnceLock::new, OnceLock::from))
    }

    pub(crate) fn id(&self) -> Option<u64> {
        self.0.get().copied()
    }

    /// Returns whether a stream of this lifetime has this id. A stream without a known id adopts
    /// this one, unless it may be destroyed without notice.
    pub(crate) fn matches(&self, id: u64, life: &StreamLifetime) -> bool {
        match life {
            StreamLifetime::Fenced => self.0.get() == Some(&id),
            _ => *self.0.get_or_init(|| id) == id,
        }
    }
}

/// Returns the driver's id of a stream, or `None` if it captures. Does not invalidate captures of
/// other streams.
pub(crate) fn id_of(driver: &dyn Driver, raw: RawStream) -> Result<Option<u64>, DriverError> {
    let _relaxed = Relaxed::enter(driver);
    if driver.stream_is_capturing(raw)? {
        return Ok(None);
    }
    driver.stream_id(raw).map(Some)
}
