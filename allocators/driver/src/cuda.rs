//! The CUDA driver, through cudarc.
//!
//! [`CudaDriver`] is the [`Driver`](crate::Driver) of a machine with an NVIDIA GPU. It needs
//! nothing at build time, and at run time only `libcuda.so.1`, which comes with the kernel module:
//! no toolkit and no runtime library. If the library is missing, [`CudaDriver::open`] returns an
//! error and has no other effect. So one program can serve machines with and without a GPU.
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
//! # Guarantees
//! - **A call is one call.** Each method makes the driver call that it is named for, and a few
//!   cheap ones beside it if needed: it reads the thread's current context (7 ns) and sets it if it
//!   differs. Nothing is cached, retried or logged. `Driver::calls` counts each
//!   method once.
//! - **Codes are passed on unchanged**, also those of a driver later than this build. "Not ready"
//!   (600) is a result and never an error. "Deinitialised" (4) is an error, except in calls that
//!   destroy something: at exit the driver may shut down first, and has then destroyed it already.
//! - **The primary context of each device** is used. It is retained when first needed and released
//!   with the driver. cudarc, the CUDA runtime and every library above it use the same context, so
//!   memory and streams can be shared with them. A context that another library made current on the
//!   thread is current again when the call returns.
//! - **No lock.** Any thread may make calls. The driver does its own locking.
//!
//! # cudarc
//! [`lend`] lends our buffers to programs written against cudarc, and [`raw_stream`] accepts their
//! streams. The CUDA version is that of any `cuda-1…` feature of cudarc in the program's
//! dependencies, or of one of this crate's own, from `cuda-12080` to `cuda-13040`. Without such a
//! feature it is that of the toolkit on the machine, or else the latest that cudarc supports. It
//! selects which bindings are compiled. Of the driver nothing newer than CUDA 12.0 is needed.
//! cudarc must load the driver at run time (`dynamic-loading`, or its fall-back that is enabled
//! here), since its features that link against the driver leave no library handle to look symbols
//! up in.

mod abi;
mod calls;
mod codes;
mod context;
mod copies;
mod devices;
mod driver;
mod function_table;
mod graphs;
mod host_memory;
mod ipc;
pub mod lend;
mod memory;
mod physical;
mod streams;

pub use aquifer_core::NoGpu as OpenError;
/// The bindings, in the version for which [`lend`] implements the traits.
pub use cudarc;
pub use driver::CudaDriver;
pub use lend::{Lend, Lent, LentMut, keep_alive, raw_stream};
