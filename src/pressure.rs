//! Memory pressure that no budget of this process sees: other processes on the device, and a host
//! short of memory.
//!
//! | module | contents |
//! |---|---|
//! | `ceiling` | a budget above ours for one memory, limited to what the outside leaves |
//! | `keep_free` | devices: reads the driver's free memory and reacts |
//! | `host` | the host: reads what control groups and nodes have left, and reacts |
//! | `report` | [`Pressure`]: what was seen and done |
//! | `watch_thread` | the watch thread |
//!
//! Nothing here runs unless [`RuntimeBuilder::keep_free`](crate::RuntimeBuilder::keep_free) or
//! [`RuntimeBuilder::watch_host`](crate::RuntimeBuilder::watch_host) enables it. A pure function
//! maps each reading to an action, and the thread carries it out.
//!
//! # How room for other processes is made
//! Another process cannot wait for our budget. It can only retry. So the bytes that it lacks must
//! lie free in the driver, and must stay free when our own pools need to grow:
//!
//! ```text
//!   |◀─────────────────── the device ────────────────────▶|
//!   | neighbours' | ours: live | ours: cached |    free    |
//!                 |◀──────── the ceiling ───────▶|keep_free|   ceiling = used + free − keep_free
//! ```
//!
//! The ceiling does not move when our pools grow or release memory, since `free` shrinks by what
//! `used` gains. It is the device less the neighbours' memory and `keep_free`, and moves only with
//! those two. A limit of `used` plus the free bytes beyond `keep_free`, but at least `used`, would
//! let one pool take what another has just released. The ceiling does not oscillate either:
//! slightly more is released than was missing, and growth stops where `keep_free` begins.

mod ceiling;
mod host;
mod keep_free;
mod report;
mod watch_thread;

pub use host::HostWatch;
pub use report::{DevicePressure, HostPressure, Level, Pressure};

pub(crate) use ceiling::Ceiling;
pub(crate) use host::WatchedHost;
pub(crate) use keep_free::{KeepFree, WatchedDevice};
