//! The system calls that regions and workers use, and fault injection for them.
//!
//! Functions that change mappings are `unsafe`: the caller guarantees that the addresses are not in
//! use. A [`Kernel`] made by [`Kernel::with_faults`] consults its [`Faults`] before each call.
//! Tests can thus make every step of creating and releasing a region fail, on any machine.
#![expect(unsafe_code, reason = "makes system calls")]

mod faults;

pub use faults::{Faults, SystemCall};

use crate::topology::{IdSet, NodeId};
use aquifer_core::SystemError;
use nix::{
    errno::Errno,
    libc::{self, c_int, c_long, c_void},
    time::{ClockId, clock_gettime},
};
use std::{
    num::NonZeroUsize,
    ptr,
    ptr::NonNull,
    sync::{
        Arc, Once, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// A range of addresses of this process. Plain numbers, without ownership.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Span {
    /// The first address.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

impl Span {
    /// Returns the first address after it.
    #[must_use]
    pub fn end(self) -> usize {
        // No span wraps: the kernel maps nothing at the last address.
        self.start.wrapping_add(self.len)
    }

    fn pointer(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.start)
    }
}

/// The page size of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MapPages {
    /// Base pages, or transparent huge pages, depending on the system's mode.
    Ordinary,
    /// Huge pages of 2 MiB from the reserved pool (`MAP_HUGETLB`).
    Huge2M,
}

impl MapPages {
    /// Returns the flags of `mmap` for this page size.
    fn bits(self) -> c_int {
        match self {
            Self::Ordinary => 0,
            Self::Huge2M => libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
        }
    }
}

/// Advice on a mapping (`madvise`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Advice {
    /// Child processes do not inherit the mapping. Otherwise a fork would copy pinned pages, while
    /// the device keeps using the parent's.
    DontFork,
    /// Core dumps exclude the mapping.
    DontDump,
    /// Enables transparent huge pages.
    HugePage,
    /// Disables transparent huge pages.
    NoHugePage,
    /// Frees the pages of a shared mapping for all processes. They read zeros from then on.
    Remove,
}

/// The memory policy that prefers one node and falls back to others when it is full
/// (`MPOL_PREFERRED`). The strict policy would end in an out-of-memory kill.
const MPOL_PREFERRED: c_int = 1;

/// The system calls of this machine. Cheap to clone.
///
/// ```
/// use aquifer_host::kernel::{Advice, Kernel, MapPages, Span};
/// use std::num::NonZeroUsize;
///
/// let kernel = Kernel::new();
/// let span: Span = kernel.reserve(NonZeroUsize::new(1 << 20).ok_or("zero")?)?;
/// // SAFETY: the range has just been reserved, and nothing else uses it.
/// unsafe {
///     kernel.map(span, MapPages::Ordinary)?;
///     kernel.advise(span, Advice::DontFork)?;
/// }
/// kernel.populate(span)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default, Debug)]
pub struct Kernel {
    faults: Option<Arc<Faults>>,
}

type Result<T> = std::result::Result<T, SystemError>;

impl Kernel {
    /// Creates the interface to the real kernel.
    #[must_use]
    pub fn new() -> Self {
        watch_forks();
        aquifer_driver::forks::hold_budgets();
        Self::default()
    }

    /// Creates an interface whose calls fail as planned.
    #[must_use]
    pub fn with_faults(faults: Arc<Faults>) -> Self {
        let mut kernel = Self::new();
        kernel.faults = Some(faults);
        kernel
    }

    /// Counts the call, and fails if that is planned. Returns the simulated duration, if one is
    /// planned.
    fn intercept(&self, call: SystemCall) -> Result<Option<Duration>> {
        match &self.faults {
            Some(faults) => faults.intercept(call),
            None => Ok(None),
        }
    }

    /// Reserves addresses without memory (`mmap`, `PROT_NONE`).
    ///
    /// # Errors
    /// `ENOMEM` if the address space is limited.
    pub fn reserve(&self, len: NonZeroUsize) -> Result<Span> {
        self.intercept(SystemCall::Reserve)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: 1. no address is given, so no mapping is replaced.
        let address =
            unsafe { libc::mmap(ptr::null_mut(), len.get(), libc::PROT_NONE, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        Ok(Span { start: address.expose_provenance(), len: len.get() })
    }

    /// Maps fresh zeroed memory over a reserved range (`mmap`, `MAP_FIXED`). Huge pages are
    /// reserved in their pool now.
    ///
    /// # Safety
    /// 1. The range is reserved or mapped by the caller, and is not in use.
    ///
    /// # Errors
    /// `ENOMEM` if the pool of huge pages, or the number of mappings, is exhausted. The range is
    /// then unchanged.
    pub unsafe fn map(&self, span: Span, pages: MapPages) -> Result<()> {
        // SAFETY: 1. the caller's first condition.
        unsafe { self.map_fresh(span, pages, libc::MAP_PRIVATE) }
    }

    /// As [`Kernel::map`], but the children of a fork have the same pages (`MAP_SHARED`).
    ///
    /// # Safety
    /// 1. The range is reserved or mapped by the caller, and is not in use.
    ///
    /// # Errors
    /// As [`Kernel::map`].
    pub unsafe fn map_for_children(&self, span: Span, pages: MapPages) -> Result<()> {
        // SAFETY: 1. the caller's first condition.
        unsafe { self.map_fresh(span, pages, libc::MAP_SHARED) }
    }

    /// # Safety
    /// 1. The range is reserved or mapped by the caller, and is not in use.
    unsafe fn map_fresh(&self, span: Span, pages: MapPages, sharing: c_int) -> Result<()> {
        self.intercept(match pages {
            MapPages::Ordinary => SystemCall::Map,
            MapPages::Huge2M => SystemCall::MapHuge,
        })?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_FIXED | pages.bits();
        // SAFETY: 1. the caller's first condition.
        let address = unsafe { libc::mmap(span.pointer(), span.len, access, flags, -1, 0) };
        if address == libc::MAP_FAILED { Err(last_error("mmap")) } else { Ok(()) }
    }

    /// Releases the memory of a range and keeps its addresses reserved (`mmap` over it,
    /// `PROT_NONE`).
    ///
    /// # Safety
    /// 1. The range is mapped by the caller, and is no longer in use.
    ///
    /// # Errors
    /// `ENOMEM` if the number of mappings is exhausted. The memory then stays mapped.
    pub unsafe fn unmap(&self, span: Span) -> Result<()> {
        self.intercept(SystemCall::Unmap)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: 1. the caller's first condition.
        let address =
            unsafe { libc::mmap(span.pointer(), span.len, libc::PROT_NONE, flags, -1, 0) };
        if address == libc::MAP_FAILED { Err(last_error("mmap")) } else { Ok(()) }
    }

    /// Gives the kernel advice on a mapping (`madvise`).
    ///
    /// # Safety
    /// 1. The range is mapped by the caller.
    /// 2. For [`Advice::Remove`], it is no longer in use by this process.
    ///
    /// # Errors
    /// `EINVAL` if the kernel does not support the advice.
    pub unsafe fn advise(&self, span: Span, advice: Advice) -> Result<()> {
        let (call, advice) = match advice {
            Advice::DontFork => (SystemCall::DontFork, libc::MADV_DONTFORK),
            Advice::DontDump => (SystemCall::DontDump, libc::MADV_DONTDUMP),
            Advice::HugePage => (SystemCall::HugePage, libc::MADV_HUGEPAGE),
            Advice::NoHugePage => (SystemCall::NoHugePage, libc::MADV_NOHUGEPAGE),
            Advice::Remove => (SystemCall::Remove, libc::MADV_REMOVE),
        };
        self.intercept(call)?;
        // SAFETY: 1. only `Remove` changes the contents of memory, which is not in use then. 2. the
        // range belongs to the caller.
        check("madvise", unsafe { libc::madvise(span.pointer(), span.len, advice) })
    }

    /// Makes a node preferred for the pages of a mapping that are not populated yet (`mbind`,
    /// `MPOL_PREFERRED`).
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` if a sandbox refuses it, `EINVAL` for a node that the process may not
    /// use.
    pub fn prefer(&self, span: Span, node: NodeId) -> Result<()> {
        self.intercept(SystemCall::Prefer)?;
        let mask = IdSet::from_iter([node.0]).words();
        // The kernel uses one bit less than this count.
        let bits = mask.len() * 64 + 1;
        // SAFETY: 1. the mask has that many bits less one. 2. a policy changes no memory.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                span.start,
                span.len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        if answer == 0 { Ok(()) } else { Err(last_error("mbind")) }
    }

    /// Populates a mapping as by writes, and keeps its contents (`madvise`, `MADV_POPULATE_WRITE`).
    /// Returns the CPU time that it took.
    ///
    /// # Errors
    /// `EINVAL` on kernels before 5.14; `EFAULT` if the pool of huge pages is exhausted; `ENOMEM`.
    pub fn populate(&self, span: Span) -> Result<Duration> {
        let simulated = self.intercept(SystemCall::Populate)?;
        // Wall time would include the time of other threads.
        let start = thread_cpu_time()?;
        loop {
            // SAFETY: 1. populating does not change the visible contents of memory, whichever owner
            // it has.
            let answer =
                unsafe { libc::madvise(span.pointer(), span.len, libc::MADV_POPULATE_WRITE) };
            match check("madvise", answer) {
                Err(e) if e.errno == libc::EINTR || e.errno == libc::EAGAIN => {}
                answer => {
                    answer?;
                    let took = thread_cpu_time()?.saturating_sub(start);
                    return Ok(simulated.unwrap_or(took));
                }
            }
        }
    }

    /// Writes one zero to each page. Replaces [`Kernel::populate`] on kernels that do not support
    /// it.
    ///
    /// # Safety
    /// 1. The range is mapped by the caller with pages of at least `page` bytes, fresh, and not in
    ///    use elsewhere.
    /// 2. It is not backed by reserved huge pages, where a missing page raises a signal.
    pub unsafe fn touch(&self, span: Span, page: usize) {
        let first = span.pointer().cast::<u8>();
        for offset in (0..span.len).step_by(page.max(1)) {
            // SAFETY: 1. inside the range, which is mapped for writing and not in use elsewhere.
            unsafe { first.add(offset).write_volatile(0) };
        }
    }

    /// Returns the node of each page (`move_pages` without nodes). A negative value is an error
    /// number: `-ENOENT` for a page that is not populated.
    ///
    /// While the kernel moves a page, for example to make room for huge pages, it also reports
    /// `-ENOENT`. So it is asked again for some milliseconds.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` if a sandbox refuses it.
    pub fn nodes_of(&self, pages: &[usize]) -> Result<Vec<c_int>> {
        self.intercept(SystemCall::Query)?;
        let mut nodes = vec![-libc::ENOENT; pages.len()];
        for _ in 0..QUERIES {
            // SAFETY: 1. both arrays have `pages.len()` elements. 2. without nodes nothing is
            // moved. 3. the pages are looked up by address and not read.
            let answer = unsafe {
                libc::syscall(
                    libc::SYS_move_pages,
                    0,
                    pages.len(),
                    pages.as_ptr(),
                    ptr::null::<c_int>(),
                    nodes.as_mut_ptr(),
                    0,
                )
            };
            if answer < 0 {
                return Err(last_error("move_pages"));
            }
            if !nodes.contains(&-libc::ENOENT) {
                break;
            }
            thread::sleep(QUERY_PAUSE);
        }
        Ok(nodes)
    }

    /// Returns whether [`Kernel::barrier`] is available. The first call registers the process with
    /// the kernel, which takes some milliseconds if it has several threads, and caches the result.
    #[must_use]
    pub fn offers_barrier(&self) -> bool {
        static OFFERED: OnceLock<bool> = OnceLock::new();
        *OFFERED.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED).is_ok())
    }

    /// Executes a full memory barrier on every running thread of the process
    /// (`MEMBARRIER_CMD_PRIVATE_EXPEDITED`). Takes some microseconds.
    ///
    /// Assume that one thread writes A and then reads B, with only a compiler fence between, and
    /// another thread writes B, calls this, and then reads A. At least one of them sees the other's
    /// write.
    ///
    /// # Errors
    /// `EPERM` if the process is not registered, `ENOSYS` or a sandbox's error if the call is not
    /// available.
    pub fn barrier(&self) -> Result<()> {
        self.intercept(SystemCall::Barrier)?;
        if !self.offers_barrier() {
            return Err(SystemError { call: "membarrier", errno: libc::ENOSYS });
        }
        membarrier(PRIVATE_EXPEDITED)
    }

    /// Starts a thread. The kernel keeps 15 bytes of its name, which has no zero byte.
    ///
    /// ```
    /// use aquifer_host::kernel::Kernel;
    /// let thread = Kernel::new().spawn("example", || println!("runs"))?;
    /// assert!(thread.join().is_ok());
    /// # Ok::<(), aquifer_core::SystemError>(())
    /// ```
    ///
    /// # Errors
    /// `EAGAIN` if the limit of threads is reached. `work` is dropped.
    pub fn spawn(
        &self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>> {
        self.intercept(SystemCall::Spawn)?;
        thread::Builder::new().name(name.into()).spawn(work).map_err(|e| SystemError {
            call: SystemCall::Spawn.name(),
            errno: e.raw_os_error().unwrap_or(libc::EAGAIN),
        })
    }

    /// Binds the calling thread to CPUs (`sched_setaffinity`). The set may have any size.
    ///
    /// # Errors
    /// `EINVAL` if the process may use none of the CPUs.
    pub fn bind_thread(&self, cpus: &IdSet) -> Result<()> {
        self.intercept(SystemCall::Bind)?;
        let words = cpus.words();
        // SAFETY: 1. the kernel reads exactly the given number of bytes, independent of the size of
        // the C type.
        check("sched_setaffinity", unsafe {
            libc::sched_setaffinity(0, size_of_val(&words[..]), words.as_ptr().cast())
        })
    }
}

const PRIVATE_EXPEDITED: c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

fn membarrier(command: c_int) -> Result<()> {
    // SAFETY: 1. the call takes only numbers, and changes no memory.
    let answer: c_long = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if answer == 0 { Ok(()) } else { Err(last_error("membarrier")) }
}

/// Relaxed, because it changes before a child has a second thread.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Detects forks by the C library from now on (`pthread_atfork`), which include those of Rust and
/// of other libraries. If the C library has no memory for the handler, forks are not detected.
fn watch_forks() {
    static WATCHED: Once = Once::new();
    // SAFETY: 1. `in_child` may run in a child of a process with threads: it touches one atomic.
    WATCHED.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
}

/// Returns whether this process was forked by one that had made a [`Kernel`].
///
/// Such a child has neither its parent's threads nor, unless it is shared, its pinned memory. The
/// locks of host memory may be held by threads that do not exist here. So pools, stagers and
/// workers refuse everything in a child, and it can make none of its own. Costs a load.
///
/// ```
/// use aquifer_host::kernel::{Kernel, is_forked_child};
/// let _kernel = Kernel::new();
/// assert!(!is_forked_child());
/// ```
#[inline]
#[must_use]
pub fn is_forked_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Returns a pointer to an address of a mapping that this crate or the driver made.
pub(crate) fn pointer(address: usize) -> Option<NonNull<u8>> {
    NonNull::new(ptr::with_exposed_provenance_mut(address))
}

/// Maximum number of queries for pages that the kernel may be moving, and the pause between them.
const QUERIES: usize = 20;
const QUERY_PAUSE: Duration = Duration::from_micros(200);

/// Returns the CPU time of this thread.
fn thread_cpu_time() -> Result<Duration> {
    let spent = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    spent.map(Duration::from).map_err(|e| SystemError { call: "clock_gettime", errno: e as c_int })
}

fn check(call: &'static str, answer: c_int) -> Result<()> {
    if answer == 0 { Ok(()) } else { Err(last_error(call)) }
}

fn last_error(call: &'static str) -> SystemError {
    SystemError { call, errno: Errno::last_raw() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn reserved_range_is_mapped_populated_and_unmapped() {
        let kernel = Kernel::new();
        let span = kernel.reserve(NonZeroUsize::new(16 * PAGE).unwrap()).unwrap();
        // SAFETY: 1. reserved above, and used only here.
        unsafe {
            kernel.map(span, MapPages::Ordinary).unwrap();
            kernel.advise(span, Advice::DontFork).unwrap();
            kernel.advise(span, Advice::DontDump).unwrap();
        }
        kernel.populate(span).unwrap();
        let pages: Vec<usize> = (0..16).map(|i| span.start + i * PAGE).collect();
        assert!(kernel.nodes_of(&pages).unwrap().iter().all(|&node| node >= 0));
        // SAFETY: as above.
        unsafe {
            kernel.touch(span, PAGE);
            kernel.unmap(span).unwrap();
        }
        assert!(
            kernel.nodes_of(&pages).unwrap().iter().all(|&node| node < 0),
            "the memory is gone"
        );
    }

    #[test]
    fn planned_fault_hits_only_the_named_call() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        faults.fail(SystemCall::Reserve, 2, libc::ENOMEM);
        let len = NonZeroUsize::new(PAGE).unwrap();
        kernel.reserve(len).unwrap();
        assert_eq!(kernel.reserve(len), Err(SystemError { call: "mmap", errno: libc::ENOMEM }));
        kernel.reserve(len).unwrap();
        assert_eq!(faults.made(SystemCall::Reserve), 3);
        faults.fail_from(SystemCall::Query, 1, libc::EPERM);
        assert!(kernel.nodes_of(&[0]).is_err() && kernel.nodes_of(&[0]).is_err());
        faults.clear();
        assert!(kernel.nodes_of(&[0]).is_ok());
    }

    #[test]
    fn a_thread_is_bound_with_a_mask_of_any_length() {
        let topology = crate::topology::Topology::read_under(std::path::Path::new("/")).unwrap();
        let allowed = topology.cpus_allowed().unwrap();
        let one = allowed.iter().next().unwrap();
        let mask = IdSet::from_iter([one, 4000]);
        thread::spawn(move || {
            Kernel::new().bind_thread(&mask).unwrap();
            assert!(Kernel::new().bind_thread(&IdSet::default()).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn barrier_succeeds_where_offered_and_fails_as_planned() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        assert_eq!(kernel.barrier().is_ok(), kernel.offers_barrier());
        faults.fail(SystemCall::Barrier, 1, libc::EPERM);
        assert_eq!(kernel.barrier(), Err(SystemError { call: "membarrier", errno: libc::EPERM }));
    }

    /// Runs `work` in a child, and returns its result.
    fn answer_of_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: 1. the child exits without returning, and takes no lock.
        match unsafe { libc::fork() } {
            0 => {
                let answer = i32::from(!work());
                // SAFETY: 1. ends the process.
                unsafe { libc::_exit(answer) }
            }
            child => {
                let mut status = 0;
                // SAFETY: 1. the status is written to a local.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                status == 0
            }
        }
    }

    #[test]
    fn children_and_grandchildren_know_that_they_are() {
        watch_forks();
        assert!(!is_forked_child());
        assert!(answer_of_child(|| is_forked_child() && answer_of_child(is_forked_child)));
        assert!(!is_forked_child(), "a fork changes nothing here");
    }
}
