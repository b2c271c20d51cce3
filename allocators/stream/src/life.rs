//! How long a stream's handle is good, and who may call the driver with it.

use aquifer_driver::KeepAlive;
use std::{
    fmt,
    thread::{self, ThreadId},
};

/// How a stream's handle is kept valid for events that are recorded later.
///
/// ```
/// use aquifer_driver::{DeviceId, Driver, sim::Sim};
/// use aquifer_stream::{Life, StreamPool};
/// let driver = Sim::h200(1).driver();
/// let streams = StreamPool::new(driver.clone(), DeviceId(0), 4);
/// let theirs = driver.stream_create(DeviceId(0), 0)?;
/// // SAFETY: 1. the handle is one, of this device. 2. nobody destroys it here.
/// let stream = unsafe { streams.adopt(theirs, Life::Retired) }?;
/// stream.retire()?;                       // before it is destroyed
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub enum Life {
    /// It is ours, and is destroyed when the last who notes it lets go.
    Owned,
    /// It is another library's, and lives as long as this.
    KeptAlive(KeepAlive),
    /// It is another library's. Its owner calls [`Stream::retire`](crate::Stream::retire) before
    /// destroying it.
    Retired,
    /// It is another library's and may be destroyed at any time that no call is in progress: every
    /// free and every use is fenced at once, with an event recorded there and then. Blocks
    /// allocated for it are freed, and uses on it ended, before it is destroyed.
    Fenced,
    /// The device's legacy default stream, which lives as long as the context.
    Legacy,
    /// The per-thread default stream of this thread. Its handle, 2, means another stream on every
    /// other thread, so no other thread calls the driver with it, and every free and every use is
    /// fenced at once, by the thread itself.
    Thread(ThreadId),
}

impl Life {
    /// Whether an event must be recorded at each free and at the end of each use, since it may be
    /// too late afterwards.
    pub(crate) fn fences_at_once(&self) -> bool {
        matches!(self, Self::Fenced | Self::Thread(_))
    }

    /// Whether the handle means this stream on the thread that asks.
    pub(crate) fn is_meant_here(&self) -> bool {
        match self {
            Self::Thread(owner) => thread::current().id() == *owner,
            _ => true,
        }
    }

    /// Whether the stream cannot be ended by a program: our own, which its pool ends, and the
    /// legacy default stream.
    pub(crate) fn outlives_retirement(&self) -> bool {
        matches!(self, Self::Owned | Self::Legacy)
    }
}

impl fmt::Debug for Life {
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
