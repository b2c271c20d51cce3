//! The CUDA driver, through cudarc.
//!
//! [`CudaDriver`] is the [`Driver`](crate::Driver) of a machine with an NVIDIA GPU. It needs
//! nothing at build time, and at run time `libcuda.so.1` alone, which comes with the kernel module:
//! no toolkit, no runtime library. Where that is missing, [`CudaDriver::open`] says so and nothing
//! else happens, so one program serves machines with and without a GPU.
//!
//! ```
//! use aquifer_driver::{Devices, cuda::CudaDriver};
//!
//! match CudaDriver::open() {
//!     Ok(driver) => println!("{} devices", driver.device_count()?),
//!     Err(reason) => println!("on the simulator, then: {reason}"),
//! }
//! # Ok::<(), aquifer_driver::DriverError>(())
//! ```
//!
//! # What it promises
//! - **A call is one call.** Each method makes the driver call that it is named for, and a few
//!   cheap ones beside it where it must: the thread's current context is looked at (7 ns) and set
//!   if it is another. Nothing is cached, retried or logged. [`calls`](crate::Driver::calls) counts
//!   each method once.
//! - **Codes arrive as they are**, also those of a driver later than this build. "Not ready" (600)
//!   is an answer and never an error; "deinitialised" (4) is one, except in calls that end
//!   something: at exit the driver may go first, and has then ended it already.
//! - **The primary context of each device**, taken when first needed and let go of with the driver:
//!   it is the one that cudarc, the CUDA runtime and every library above it use, so memory and
//!   streams can be shared with all of them. A context that somebody else made current on the
//!   thread is current again when the call returns.
//! - **No lock.** Calls go to the driver from any thread, which does its own locking.
//!
//! # cudarc
//! [`lend`] hands our buffers to programs written against cudarc, and [`raw_stream`] takes their
//! streams. The CUDA version is that of any `cuda-1…` feature of cudarc in the program's
//! dependencies, or of one of this crate's own, from `cuda-12080` to `cuda-13040`; else that of the
//! toolkit on the machine, else the latest that cudarc knows. It decides which bindings are
//! compiled; of the driver nothing newer than CUDA 12.0 is needed. cudarc must load the driver at
//! run time (`dynamic-loading`, or its fall-back that is on here); its features that link against
//! it leave nothing to look functions up in.

mod abi;
mod codes;
mod context;
mod copies;
mod devices;
mod events;
mod graphs;
mod host_memory;
mod ipc;
pub mod lend;
mod memory;
mod physical;
mod start;
mod streams;
mod table;

pub use aquifer_core::NoGpu as OpenError;
/// The bindings themselves, in the version that [`lend`] implements the traits of.
pub use cudarc;
pub use lend::{Lend, Lent, LentHost, LentMut, keep_alive, raw_stream};
pub use start::CudaDriver;
