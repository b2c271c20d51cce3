//! Pressure that no budget of ours sees: neighbours on the device, and a host that runs out of
//! memory.
//!
//! | module | holds |
//! |---|---|
//! | `ceiling` | a budget above all of ours in one memory, whose limit is what the outside leaves |
//! | `keep_free` | a device: the driver's free memory, and what follows from it |
//! | `host` | the host: control groups, stalls and free memory, and what follows from them |
//! | `report` | [`Pressure`]: what was seen and done |
//! | `thread` | the thread that looks |
//!
//! Nothing here runs unless asked for by
//! [`RuntimeBuilder::keep_free`](crate::RuntimeBuilder::keep_free) or
//! [`RuntimeBuilder::watch_host`](crate::RuntimeBuilder::watch_host). What was read goes through a
//! pure function that answers with what to do; the thread does it.
//!
//! # Whose memory gives way
//! A neighbour process cannot wait in line at our budget: all it can do is try again. So the bytes
//! that it lacks must lie free in the driver's hands, and must stay there when our own pools want
//! to grow:
//!
//! ```text
//!   |◀─────────────────── the device ────────────────────▶|
//!   | neighbours' | ours: live | ours: cached |    free    |
//!                 |◀──────── the ceiling ───────▶|keep_free|   ceiling = used + free − keep_free
//! ```
//!
//! The ceiling does not move when our pools grow or give back, since what `used` gains `free`
//! loses: it is the device without its neighbours and without `keep_free`, and moves when they take
//! or give. A limit at `used` plus what is free beyond `keep_free`, never less than `used`, would
//! let a pool take back what another has just given. Nor does it flap: what is given back is a
//! little more than was missing, and growth stops where `keep_free` begins.

mod ceiling;
mod host;
mod keep_free;
mod report;
mod thread;

pub use host::{HostHook, HostWatch};
pub use report::{DevicePressure, DeviceReading, HostPressure, HostReading, Pressure};

pub(crate) use ceiling::Ceiling;
pub(crate) use host::WatchedHost;
pub(crate) use keep_free::{KeepFree, WatchedDevice};
