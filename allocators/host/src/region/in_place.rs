//! Registration of existing host memory in place.
//!
//! Copies from memory that is not registered go through small buffers of the driver, at a fraction
//! of the speed of the link. Large, long-lived memory can be registered where it lies, and nothing
//! is moved or copied. [`InPlace`] does that for memory that it owns, [`scope`] and [`scope_mut`]
//! for memory that is lent to a closure.
//!
//! | memory | registered |
//! |---|---|
//! | heap, anonymous mappings, huge pages, memory files | yes |
//! | files mapped shared and read-only | yes, read-only for devices, if the driver can |
//! | files mapped to be written, or privately | no, a stager has to copy them |
//!
//! The kernel reports the kind of a range before the driver is called, because the driver does not
//! return from an attempt to register a private read-only file mapping.
//!
//! # Caveats
//! - The driver pins whole pages. Other data in the first and the last page is pinned too. Two
//!   registrations must not share a page, and the second one is refused ([`Cause::AlreadyPinned`]).
//! - When a process forks, the kernel copies its pinned pages for the child at once. Regions are
//!   excluded from child processes. Memory of other owners is not, because a child that accessed a
//!   neighbour in the same page would crash.
//! - Registering slows down kernel launches of other threads, and unregistering waits for the
//!   device. See [`region`](super).

use super::{
    Host, RegionError, Shortfall, Step,
    backing::{Backing, ForeignMemory, retire},
    claims,
    make::{charge, registration_limit},
    report::{Cause, Unfit},
};
use crate::kernel::{Ground, Kernel, MapEntry, Span};
use aquifer_core::Budget;
use aquifer_driver::HostFlags;
use bytemuck::Pod;
use std::{error, fmt, mem::ManuallyDrop, ptr::NonNull, sync::Arc};

/// The driver's error code for memory that is partly registered already.
const ALREADY_REGISTERED: u32 = 712;

pub use owners::{Pinnable, PinnableMut};

mod owners {
    //! Owners whose memory may be accessed by devices.
    #![expect(
        unsafe_code,
        reason = "declares an unsafe trait, and promises that the memory of well-known owners stays"
    )]

    use allocator_api2::{alloc::Allocator, vec::Vec as AllocVec};
    use bytemuck::Pod;

    /// An owner of memory with a stable address.
    ///
    /// # Safety
    /// 1. [`Pinnable::items`] returns the same initialised elements each time, also after the owner
    ///    has been moved, and these stay mapped, with the same pages, until the owner is dropped.
    /// 2. They are not written through any other path until then.
    pub unsafe trait Pinnable: Send + 'static {
        /// The type of the elements.
        type Item: Pod;

        /// Returns the elements.
        fn items(&self) -> &[Self::Item];
    }

    /// An owner whose memory may be written, also by devices.
    ///
    /// # Safety
    /// 1. [`PinnableMut::items_mut`] returns the elements of [`Pinnable::items`].
    pub unsafe trait PinnableMut: Pinnable {
        /// Returns the elements, mutably.
        fn items_mut(&mut self) -> &mut [Self::Item];
    }

    macro_rules! owner {
        ($owner:ty $(, $allocator:ident)?) => {
            // SAFETY: 1. its buffer does not move with it. Only `&mut` access to the owner itself
            // could reallocate the buffer, and no caller gets that. 2. the owner has exclusive
            // access to the buffer.
            unsafe impl<T: Pod + Send $(, $allocator: Allocator + Send + 'static)?> Pinnable for $owner {
                type Item = T;

                fn items(&self) -> &[T] {
                    self
                }
            }

            // SAFETY: 1. the same elements.
            unsafe impl<T: Pod + Send $(, $allocator: Allocator + Send + 'static)?> PinnableMut for $owner {
                fn items_mut(&mut self) -> &mut [T] {
                    self
                }
            }
        };
    }
    owner!(Vec<T>);
    owner!(Box<[T]>);
    owner!(AllocVec<T, A>, A);
}

/// Memory that is pinned in place, together with its owner.
///
/// Safe code can copy it asynchronously, with `Stream::upload` if it is writable, otherwise in a
/// scope.
///
/// Dropping it ends the registration and drops the owner. If such a copy is still in flight, that
/// is left to [`end_retired`](super::end_retired). Forgetting it leaks both, which is safe.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_driver::{DeviceId, HostFlags, sim::Sim};
/// use aquifer_host::{kernel::Kernel, region::{Host, InPlace}, topology::Topology};
/// let sim = Sim::h200(1);
/// let host = Host::new(Topology::read()?, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
/// let budget = Budget::new("pinned", 1 << 30);
/// let weights = vec![1.5f32; 1 << 20];
/// let mut pinned = InPlace::new(&host, &budget, weights, HostFlags::default())?;
/// pinned.items_mut()[0] = 2.0;
/// assert!(budget.used() >= 4 << 20);
/// let weights = pinned.close()?;
/// assert_eq!((weights[0], budget.used()), (2.0, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Two registrations never share a page. Memory that cannot be registered in place is refused with
/// the reason:
///
/// ```
/// # use aquifer_core::Budget;
/// # use aquifer_driver::{DeviceId, HostFlags, sim::Sim};
/// # use aquifer_host::{kernel::Kernel, region::{Cause, Host, InPlace}, topology::Topology};
/// # let sim = Sim::h200(1);
/// # let host = Host::new(Topology::read()?, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
/// # let budget = Budget::new("pinned", 1 << 30);
/// // Constants of the program lie in a private mapping of its file.
/// static WORDS: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
/// let refused = aquifer_host::region::scope(&host, &budget, WORDS, HostFlags::default(), |_| ()).unwrap_err();
/// assert!(matches!(refused.cause, Cause::NotInPlace(_)), "{refused}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct InPlace<T: Pinnable> {
    /// Released before the owner is dropped. Both are present until `close` or `drop` takes them.
    backing: ManuallyDrop<Backing>,
    owner: ManuallyDrop<Box<T>>,
    info: PinInfo,
}

/// The kind of a range, as found.
#[derive(Clone, Debug)]
struct PinInfo {
    ground: Ground,
    shortfalls: Vec<Shortfall>,
}

/// Memory that could not be pinned, with the reason.
///
/// See [`InPlace`] for an example.
pub struct PinError<T> {
    /// The memory of the call, unchanged.
    pub memory: T,
    /// The reason.
    pub error: RegionError,
}

impl<T> fmt::Debug for PinError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<T> fmt::Display for PinError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> error::Error for PinError<T> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<T> From<PinError<T>> for RegionError {
    fn from(refused: PinError<T>) -> Self {
        refused.error
    }
}

impl<T: Pinnable> InPlace<T> {
    /// Pins `memory` for devices (`cuMemHostRegister`), and owns it from then on.
    ///
    /// Charges the pages of the memory first. Several workers populate missing pages. Blocks. A
    /// file mapping is always registered as read-only for devices, regardless of `flags`.
    ///
    /// # Errors
    /// [`PinError`], which contains `memory`: [`Cause::NotInPlace`] for memory that a stager has to
    /// copy, [`Cause::AlreadyPinned`], [`Cause::NoDriver`], or an error of the budget or the
    /// driver. Nothing is pinned.
    pub fn new(
        host: &Host,
        budget: &Budget,
        memory: T,
        flags: HostFlags,
    ) -> Result<Self, PinError<T>> {
        let owner = Box::new(memory);
        match pin(host, budget, range(NonNull::from(owner.items())), flags) {
            Ok((backing, info)) => {
                let (backing, owner) = (ManuallyDrop::new(backing), ManuallyDrop::new(owner));
                Ok(Self { backing, owner, info })
            }
            Err(error) => Err(PinError { memory: *owner, error }),
        }
    }

    /// Returns the owner.
    #[must_use]
    pub fn owner(&self) -> &T {
        &self.owner
    }

    /// Returns the elements.
    #[must_use]
    pub fn items(&self) -> &[T::Item] {
        self.owner.items()
    }

    /// Returns the elements, mutably.
    pub fn items_mut(&mut self) -> &mut [T::Item]
    where
        T: PinnableMut,
    {
        self.owner.items_mut()
    }

    /// Returns the kind of the memory.
    #[must_use]
    pub fn ground(&self) -> Ground {
        self.info.ground
    }

    /// Returns the requested properties that were not available.
    #[must_use]
    pub fn shortfalls(&self) -> &[Shortfall] {
        &self.info.shortfalls
    }

    /// Returns the range of registered pages: the whole pages that contain the elements.
    #[must_use]
    pub fn registered(&self) -> Option<Span> {
        self.backing.registrations().first().copied()
    }

    pub(super) fn backing_mut(&mut self) -> &mut Backing {
        &mut self.backing
    }

    /// Ends the registration and returns the memory. Blocks until copies in flight are done and the
    /// device is idle.
    ///
    /// # Errors
    /// An error of the driver, if it does not end the registration. The registration is then
    /// stranded, together with the memory.
    pub fn close(self) -> Result<T, RegionError> {
        let (mut backing, owner) = self.into_parts();
        match backing.release() {
            Ok(charge) => {
                drop(charge);
                Ok(*owner)
            }
            Err(error) => {
                backing.set_owner(owner);
                backing.strand();
                Err(error)
            }
        }
    }

    /// Gives up the memory without ending its registration. [`end_retired`](super::end_retired)
    /// ends it, and drops the owner too.
    pub fn retire(self) {
        let (mut backing, owner) = self.into_parts();
        backing.set_owner(owner);
        retire(backing);
    }
}

mod parts {
    #![expect(unsafe_code, reason = "moves fields out of a value with a destructor")]

    use super::{Backing, InPlace, Pinnable};
    use std::mem::ManuallyDrop;

    impl<T: Pinnable> InPlace<T> {
        pub(super) fn into_parts(self) -> (Backing, Box<T>) {
            let mut this = ManuallyDrop::new(self);
            // SAFETY: 1. `this` is not accessed again, and its destructor does not run.
            unsafe { (ManuallyDrop::take(&mut this.backing), ManuallyDrop::take(&mut this.owner)) }
        }
    }

    impl<T: Pinnable> Drop for InPlace<T> {
        fn drop(&mut self) {
            // SAFETY: 1. the fields are taken only here and in `into_parts`, after which this does
            // not run.
            let (mut backing, owner) = unsafe {
                (ManuallyDrop::take(&mut self.backing), ManuallyDrop::take(&mut self.owner))
            };
            // The owner is dropped with the backing: now, or when the backing can be released.
            backing.set_owner(owner);
        }
    }
}

impl<T: Pinnable> fmt::Debug for InPlace<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPlace")
            .field("registered", &self.registered())
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// Pins `memory` for devices while `work` runs, which may copy from it.
///
/// The registration ends before this returns, also on unwind, and safe code cannot prevent that.
/// Work that was queued outside a stream's own scope must be done by then.
///
/// ```
/// # use aquifer_core::Budget;
/// # use aquifer_driver::{DeviceId, HostFlags, sim::Sim};
/// # use aquifer_host::{kernel::Kernel, region::{self, Host}, topology::Topology};
/// # let sim = Sim::h200(1);
/// # let host = Host::new(Topology::read()?, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
/// # let budget = Budget::new("pinned", 1 << 30);
/// let data = vec![7u8; 1 << 20];
/// let sum = region::scope(&host, &budget, &data, HostFlags::default(), |data| {
///     // stream.scope(|c| c.upload(data, &mut buffer)) copies at the speed of the link
///     assert_eq!(sim.outstanding().registrations, 1);
///     data.iter().map(|&byte| u64::from(byte)).sum::<u64>()
/// })?;
/// assert_eq!((sum, sim.outstanding().registrations), (7 << 20, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`InPlace::new`], before `work` has run. Or an error of the driver, if it does not end
/// the registration afterwards. Then [`retry_stranded`](super::retry_stranded) tries again, and the
/// memory must not be freed before the registration has ended.
pub fn scope<T: Pod, R>(
    host: &Host,
    budget: &Budget,
    memory: &[T],
    flags: HostFlags,
    work: impl FnOnce(&[T]) -> R,
) -> Result<R, RegionError> {
    let (backing, _) = pin(host, budget, range(NonNull::from(memory)), flags)?;
    let answer = work(memory);
    backing.close()?;
    Ok(answer)
}

/// Pins `memory` as [`scope`] does, for a closure that may copy into it.
///
/// # Errors
/// As [`scope`].
pub fn scope_mut<T: Pod, R>(
    host: &Host,
    budget: &Budget,
    memory: &mut [T],
    flags: HostFlags,
    work: impl FnOnce(&mut [T]) -> R,
) -> Result<R, RegionError> {
    let (backing, _) = pin(host, budget, range(NonNull::from(&mut *memory)), flags)?;
    let answer = work(memory);
    backing.close()?;
    Ok(answer)
}

fn range<T>(elements: NonNull<[T]>) -> Span {
    // The driver accesses the memory by its address.
    let start = elements.cast::<u8>().as_ptr().expose_provenance();
    Span { start, len: elements.len() * size_of::<T>() }
}

/// Charges, claims, populates and registers the pages of a range.
fn pin(
    host: &Host,
    budget: &Budget,
    range: Span,
    mut flags: HostFlags,
) -> Result<(Backing, PinInfo), RegionError> {
    let refused = |cause| RegionError::new(Step::Request, cause);
    let reach = host.reach.clone().ok_or(RegionError::new(Step::Register, Cause::NoDriver))?;
    let limit = registration_limit(&host.kernel);
    let page =
        host.topology.page_size().value.and_then(|n| usize::try_from(n).ok()).unwrap_or(4096);
    if range.len == 0 {
        return Err(refused(Cause::Size { bytes: 0, max: limit }));
    }
    let start = range.start / page * page;
    let pages = Span { start, len: (range.end() - start).next_multiple_of(page) };
    if pages.len > limit {
        return Err(refused(Cause::NotInPlace(Unfit::TooLarge { limit })));
    }
    let entries = host.kernel.mappings(pages).map_err(|e| refused(Cause::System(e)))?;
    let ground = classify(pages, &entries).map_err(|unfit| refused(Cause::NotInPlace(unfit)))?;
    let writable = entries.iter().all(|entry| entry.writable);
    flags.read_only |= !writable;
    let mut info = PinInfo { ground, shortfalls: Vec::new() };
    if flags.write_combined {
        // The caching mode of memory is fixed when it is mapped.
        flags.write_combined = false;
        info.shortfalls.push(Shortfall { step: Step::Request, cause: Cause::Cached });
    }
    let charge = charge(budget, pages.len)?;
    let already_pinned = |pages| RegionError::new(Step::Register, Cause::AlreadyPinned(pages));
    claims::claim(pages).map_err(already_pinned)?;
    // From here on the drop of the backing releases everything.
    let mut backing = Backing::foreign(ForeignMemory::new(pages, charge), reach);
    info.shortfalls.extend(populate(host, pages, writable));
    match register(&mut backing, pages, flags, writable) {
        Ok(None) => Ok((backing, info)),
        Ok(Some(shortfall)) => {
            info.shortfalls.push(shortfall);
            Ok((backing, info))
        }
        Err(cause) => Err(RegionError { step: Step::Register, cause, before: info.shortfalls }),
    }
}

/// Returns the kind of the whole range, or the reason why it cannot be registered.
fn classify(pages: Span, entries: &[MapEntry]) -> Result<Ground, Unfit> {
    let mut end = pages.start;
    let Some(first) = entries.first() else { return Err(Unfit::Mixed) };
    for entry in entries {
        if entry.span.start > end
            || (entry.ground, entry.writable) != (first.ground, first.writable)
        {
            return Err(Unfit::Mixed);
        }
        match (entry.ground, entry.writable, entry.shared) {
            (Ground::File, true, _) => return Err(Unfit::WritableFile),
            (Ground::File, false, false) => return Err(Unfit::PrivateFile),
            (Ground::File, false, true) => {}
            (_, false, _) => return Err(Unfit::Protected),
            (_, true, _) => {}
        }
        end = entry.span.end();
    }
    if end < pages.end() { Err(Unfit::Mixed) } else { Ok(first.ground) }
}

fn register(
    backing: &mut Backing,
    pages: Span,
    flags: HostFlags,
    writable: bool,
) -> Result<Option<Shortfall>, Cause> {
    let cause_of = |e: aquifer_core::DriverError| match e.code {
        ALREADY_REGISTERED => Cause::AlreadyPinned(pages),
        _ => Cause::Driver(e),
    };
    match backing.register(pages, flags) {
        Ok(()) => Ok(None),
        // Some devices do not support read-only registration. Writable memory is registered without
        // it.
        Err(e) if flags.read_only && writable && e.code != ALREADY_REGISTERED => {
            let mut without_read_only = flags;
            without_read_only.read_only = false;
            backing.register(pages, without_read_only).map_err(cause_of)?;
            Ok(Some(Shortfall { step: Step::Register, cause: Cause::Writable }))
        }
        Err(e) => Err(cause_of(e)),
    }
}

/// Populates missing pages with several workers. The driver would populate them one by one, and
/// does so if this fails.
fn populate(host: &Host, pages: Span, writable: bool) -> Option<Shortfall> {
    const PIECE: usize = super::RegionRequest::PIECE;
    let count = pages.len.div_ceil(PIECE);
    let kernel = host.kernel.clone();
    let populate_piece = move |number: usize| {
        let offset = number * PIECE;
        let part = Span { start: pages.start + offset, len: PIECE.min(pages.len - offset) };
        populate_part(&kernel, part, writable)
    };
    let populate_piece = Arc::new(populate_piece);
    let by_worker = populate_piece.clone();
    let shortfall = |cause| Some(Shortfall { step: Step::Populate, cause });
    let answers = match host.workers.submit(None, count, None, move |number| by_worker(number)) {
        // Waits for every piece, so no worker uses the memory when this returns.
        Ok(job) => match job.wait(None) {
            Ok(answers) => answers,
            Err(e) => return shortfall(Cause::Job(crate::workers::RunError::NotDone(e))),
        },
        Err(_) => (0..count).map(|number| populate_piece(number)).collect(),
    };
    answers.into_iter().find_map(Result::err).and_then(|e| shortfall(Cause::System(e)))
}

fn populate_part(
    kernel: &Kernel,
    part: Span,
    writable: bool,
) -> Result<(), aquifer_core::SystemError> {
    if writable {
        kernel.populate(part)?
    } else {
        kernel.populate_read(part)?
    };
    Ok(())
}
