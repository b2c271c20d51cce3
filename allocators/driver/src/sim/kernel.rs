//! Kernels of a test: closures that declare their accesses.
#![expect(unsafe_code, reason = "lends the bytes that a kernel has declared to its closure")]

use super::address_space::DeviceUse;
use crate::{Access, DeviceRange};
use std::{
    fmt,
    marker::PhantomData,
    sync::{Arc, Mutex},
};

/// The closure of a kernel. Every launch of a graph with this kernel runs it again. Never
/// contended, since one item runs at a time.
pub(crate) type KernelBody = Arc<Mutex<dyn FnMut(&mut KernelMemory<'_>) + Send>>;

/// One declared access of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeclaredAccess {
    pub(crate) range: DeviceRange,
    pub(crate) access: Access,
    pub(crate) generation: Option<u64>,
}

/// A kernel for the simulated GPU: a name, the ranges it reads and writes, and a closure.
///
/// The oracle trusts the declaration, and the closure receives no other bytes. Give the
/// `generation` of the block if it is known. Then a kernel that outlives its block is found even if
/// it is ordered with everything.
///
/// The closure runs only in [`Mode::Bytes`](super::Mode::Bytes), when its item runs, on any thread.
/// It runs once, or at each launch of the graph if it was captured. It must not call the driver.
///
/// ```
/// use aquifer::{DeviceId, DeviceRange, sim::{Sim, SimKernel}};
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4)?, bytes: 4 };
/// let fill = SimKernel::new("fill").writes(range, None).run(|memory| memory.write(0).fill(7));
/// sim.launch(stream, fill)?;
/// assert_eq!(sim.read_back(range), Some(vec![7; 4]));
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
#[must_use = "a kernel does nothing until it is launched"]
pub struct SimKernel {
    pub(crate) name: &'static str,
    pub(crate) declared: Vec<DeclaredAccess>,
    pub(crate) body: Option<KernelBody>,
}

impl SimKernel {
    /// Creates a kernel without accesses. Reports contain its name.
    pub fn new(name: &'static str) -> Self {
        Self { name, declared: Vec::new(), body: None }
    }

    /// Declares that it reads this range, as part of block `generation`.
    pub fn reads(self, range: DeviceRange, generation: Option<u64>) -> Self {
        self.touches(range, Access::Read, generation)
    }

    /// Declares that it writes this range, as part of block `generation`.
    pub fn writes(self, range: DeviceRange, generation: Option<u64>) -> Self {
        self.touches(range, Access::Write, generation)
    }

    /// Declares that it accesses this range, as part of block `generation`.
    pub fn touches(mut self, range: DeviceRange, access: Access, generation: Option<u64>) -> Self {
        self.declared.push(DeclaredAccess { range, access, generation });
        self
    }

    /// Sets the closure. Ranges are numbered in the order of their declaration.
    pub fn run(mut self, body: impl FnMut(&mut KernelMemory<'_>) + Send + 'static) -> Self {
        self.body = Some(Arc::new(Mutex::new(body)));
        self
    }
}

impl fmt::Debug for SimKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.name)
            .field("declared", &self.declared)
            .finish_non_exhaustive()
    }
}

/// The bytes that a kernel has declared, accessed one range at a time, since ranges may overlap.
///
/// See [`SimKernel`] for an example.
#[derive(Debug)]
pub struct KernelMemory<'a> {
    /// Mapped and accessible for `'a`, without any other access in that time.
    ranges: &'a [DeviceUse],
    bytes: PhantomData<&'a mut [u8]>,
}

impl<'a> KernelMemory<'a> {
    /// # Safety
    /// 1. With bytes, every range can be read and written through its address for `'a`.
    /// 2. There is no other access to those bytes for `'a`.
    pub(crate) unsafe fn new(ranges: &'a [DeviceUse]) -> Self {
        Self { ranges, bytes: PhantomData }
    }

    /// Returns the number of ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether nothing was declared.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the bytes of a range. Empty for a number that was not declared.
    #[must_use]
    pub fn read(&self, range: usize) -> &[u8] {
        let Some(u) = self.ranges.get(range).filter(|u| u.range.bytes > 0) else { return &[] };
        // SAFETY: 1. The field promises that the range can be read while `self` is borrowed. Any
        // bytes are valid `u8`s. 2. It is not written in that time, since `write` borrows `self`
        // mutably.
        unsafe { std::slice::from_raw_parts(u.range.address as *const u8, u.range.bytes as usize) }
    }

    /// Returns the mutable bytes of a range that was declared as written. Empty for any other.
    #[must_use]
    pub fn write(&mut self, range: usize) -> &mut [u8] {
        let Some(u) = self.ranges.get(range).filter(|u| u.writes && u.range.bytes > 0) else {
            return &mut [];
        };
        // SAFETY: 1. The field promises that the range can be written while `self` is borrowed. 2.
        // No other slice of these bytes lives in that time: `self` is borrowed mutably, and the
        // bytes have no other user.
        unsafe {
            std::slice::from_raw_parts_mut(u.range.address as *mut u8, u.range.bytes as usize)
        }
    }
}
