//! Kernels of a test's own: closures that say what they touch.
#![expect(unsafe_code, reason = "lends the bytes that a kernel has declared to its closure")]

use super::space::Use;
use crate::{Access, DeviceRange};
use std::{
    fmt,
    marker::PhantomData,
    sync::{Arc, Mutex},
};

/// The closure of a kernel, which every launch of a graph that it is part of runs again. Never
/// contended: one item runs at a time.
pub(crate) type Body = Arc<Mutex<dyn FnMut(&mut KernelMemory<'_>) + Send>>;

/// One thing that a kernel touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Declared {
    pub(crate) range: DeviceRange,
    pub(crate) access: Access,
    pub(crate) generation: Option<u64>,
}

/// A piece of work for the simulated GPU: a name, what it reads and writes, and a closure that does
/// it.
///
/// The oracle believes the declaration, and the closure gets no bytes beyond it. Name the block's
/// `generation` where it is known, and a kernel that outlives its block is found even if it is
/// ordered with everything.
///
/// The closure runs in [`Mode::Bytes`](super::Mode::Bytes) only, when its stream gets there, on
/// whatever thread makes that happen: once, or, if it was captured, at each launch of the graph. It
/// may call nothing of the driver's.
///
/// ```
/// use aquifer_driver::{DeviceId, DeviceRange, sim::{Kernel, Sim}};
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4)?, bytes: 4 };
/// let fill = Kernel::new("fill").writes(range, None).run(|memory| memory.write(0).fill(7));
/// sim.launch(stream, fill)?;
/// assert_eq!(sim.read_back(range), Some(vec![7; 4]));
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[must_use = "a kernel does nothing until it is launched"]
pub struct Kernel {
    pub(crate) name: &'static str,
    pub(crate) declared: Vec<Declared>,
    pub(crate) body: Option<Body>,
}

impl Kernel {
    /// A kernel that touches nothing yet. Reports call it by its name.
    pub fn new(name: &'static str) -> Self {
        Self { name, declared: Vec::new(), body: None }
    }

    /// It reads this range, as part of this block.
    pub fn reads(self, range: DeviceRange, generation: Option<u64>) -> Self {
        self.touches(range, Access::Read, generation)
    }

    /// It writes this range, as part of this block.
    pub fn writes(self, range: DeviceRange, generation: Option<u64>) -> Self {
        self.touches(range, Access::Write, generation)
    }

    /// It touches this range, as part of this block.
    pub fn touches(mut self, range: DeviceRange, access: Access, generation: Option<u64>) -> Self {
        self.declared.push(Declared { range, access, generation });
        self
    }

    /// What it does, with the ranges numbered in the order in which they were declared.
    pub fn run(mut self, body: impl FnMut(&mut KernelMemory<'_>) + Send + 'static) -> Self {
        self.body = Some(Arc::new(Mutex::new(body)));
        self
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.name)
            .field("declared", &self.declared)
            .finish_non_exhaustive()
    }
}

/// The bytes that a kernel has declared, one range at a time: declared ranges may overlap.
///
/// Its example is that of [`Kernel`].
#[derive(Debug)]
pub struct KernelMemory<'a> {
    /// Mapped and open as long as `'a`, and touched by nobody else meanwhile but through this.
    ranges: &'a [Use],
    bytes: PhantomData<&'a mut [u8]>,
}

impl<'a> KernelMemory<'a> {
    /// # Safety
    /// 1. With bytes, every range can be read and written through its address for `'a`.
    /// 2. Nobody else touches those bytes for `'a`.
    pub(crate) unsafe fn new(ranges: &'a [Use]) -> Self {
        Self { ranges, bytes: PhantomData }
    }

    /// How many ranges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether nothing was declared.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The bytes of a range; none for a number that was not declared.
    #[must_use]
    pub fn read(&self, range: usize) -> &[u8] {
        let Some(u) = self.ranges.get(range).filter(|u| u.range.bytes > 0) else { return &[] };
        // SAFETY: 1. The range can be read while `self` is borrowed, by the field's promise; any
        // bytes are good `u8`s.
        // 2. Nobody writes it meanwhile: `write` borrows `self` whole.
        unsafe { std::slice::from_raw_parts(u.range.address as *const u8, u.range.bytes as usize) }
    }

    /// The bytes of a range declared as written, to change; none for any other.
    #[must_use]
    pub fn write(&mut self, range: usize) -> &mut [u8] {
        let Some(u) = self.ranges.get(range).filter(|u| u.writes && u.range.bytes > 0) else {
            return &mut [];
        };
        // SAFETY: 1. The range can be written while `self` is borrowed, by the field's promise. 2.
        // No other slice of these bytes lives meanwhile: `self` is borrowed whole, and nobody else
        // has them.
        unsafe {
            std::slice::from_raw_parts_mut(u.range.address as *mut u8, u.range.bytes as usize)
        }
    }
}
