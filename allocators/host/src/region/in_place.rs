//! Memory that is pinned where it lies.
//!
//! Copies from memory that the driver does not know go through its own small buffers at a sixth of
//! the link's speed. What is large and stays can be registered as it is, at some 50 GB/s once its
//! pages are there. [`InPlace`] does that for memory that it is given, [`scope`] and [`scope_mut`]
//! for memory that is lent to a closure; nothing is moved or copied.
//!
//! | memory | registered |
//! |---|---|
//! | heap, anonymous mappings, huge pages, memory files | yes |
//! | files mapped shared and read-only | yes, as memory that devices only read, where the driver can |
//! | files mapped to be written, or privately | no: a stager moves them |
//!
//! What a range is, is asked of the kernel before the driver is asked for anything: a driver that
//! is asked to register a file which is mapped privately and read-only does not return.
//!
//! # What surprises
//! - The driver pins whole pages, so that what shares the first and the last page with the memory
//!   is pinned too, and two registrations may not meet in a page: the second is refused
//!   ([`Cause::AlreadyPinned`]).
//! - A process that forks has the kernel copy pinned pages for the child at once. Our own regions
//!   are kept from children; other people's memory is not, since a child that touched a neighbour
//!   in the same page would die.
//! - Registering slows other threads' launches, and ending it waits for the device: see
//!   [`region`](super).

use super::{
    Host, RegionError, Shortfall, Step,
    backing::{Backing, Lent},
    claims,
    make::{charge, registration_limit},
    report::{Cause, Unfit},
};
use crate::kernel::{Ground, Kernel, MapEntry, Span};
use aquifer_core::Budget;
use aquifer_driver::HostFlags;
use bytemuck::Pod;
use std::{error, fmt, mem::ManuallyDrop, ptr::NonNull, sync::Arc};

/// The driver's code for memory of which some is registered already.
const ALREADY_REGISTERED: u32 = 712;

pub use owners::{Pinnable, PinnableMut};

mod owners {
    //! Who can be trusted with memory that devices reach.
    #![expect(
        unsafe_code,
        reason = "declares an unsafe trait, and promises that the memory of well-known owners stays"
    )]

    use allocator_api2::{alloc::Allocator, vec::Vec as AllocVec};
    use bytemuck::Pod;

    /// An owner of memory that stays where it is.
    ///
    /// # Safety
    /// 1. [`Pinnable::items`] answers with the same initialised elements each time, however the
    ///    owner is moved, and these stay mapped, with the same pages, until it is dropped.
    /// 2. Nobody else writes them meanwhile.
    pub unsafe trait Pinnable: Send + 'static {
        /// The elements' type.
        type Item: Pod;

        /// The elements.
        fn items(&self) -> &[Self::Item];
    }

    /// An owner whose memory may be written, by devices too.
    ///
    /// # Safety
    /// 1. [`PinnableMut::items_mut`] answers with the elements of [`Pinnable::items`].
    pub unsafe trait PinnableMut: Pinnable {
        /// The elements, to be written.
        fn items_mut(&mut self) -> &mut [Self::Item];
    }

    macro_rules! owner {
        ($owner:ty $(, $allocator:ident)?) => {
            // SAFETY: 1. its buffer does not move with it, and only `&mut` of the owner itself could make it grow, which
            // nobody gets. 2. it is the owner's alone.
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

/// Memory that is pinned where it lies, with its owner.
///
/// It can be copied asynchronously in safe code, by `Stream::upload` where it may be written, else
/// in a scope. Dropping it ends the registration and drops the owner; if such a copy is still on
/// its way, that is left for [`end_retired`](super::end_retired). Forgetting it leaks both and
/// races with nothing.
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
/// Two registrations never share a page, and memory that must be staged is refused with the reason:
///
/// ```
/// # use aquifer_core::Budget;
/// # use aquifer_driver::{DeviceId, HostFlags, sim::Sim};
/// # use aquifer_host::{kernel::Kernel, region::{Cause, Host, InPlace}, topology::Topology};
/// # let sim = Sim::h200(1);
/// # let host = Host::new(Topology::read()?, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
/// # let budget = Budget::new("pinned", 1 << 30);
/// // Words of the program itself: a private mapping of its file.
/// static WORDS: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
/// let refused = aquifer_host::region::scope(&host, &budget, WORDS, HostFlags::default(), |_| ()).unwrap_err();
/// assert!(matches!(refused.cause, Cause::NotInPlace(_)), "{refused}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct InPlace<T: Pinnable> {
    /// Ended before the owner goes. Both are there until `close` or `drop` takes them.
    backing: ManuallyDrop<Backing>,
    owner: ManuallyDrop<Box<T>>,
    found: Found,
}

/// What a range turned out to be.
#[derive(Clone, Debug)]
struct Found {
    ground: Ground,
    shortfalls: Vec<Shortfall>,
}

/// Memory that was not pinned, with the reason.
///
/// Its example is that of [`InPlace`].
pub struct Refused<T> {
    /// What was handed in, untouched.
    pub memory: T,
    /// Why.
    pub error: RegionError,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> error::Error for Refused<T> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<T> From<Refused<T>> for RegionError {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}

impl<T: Pinnable> InPlace<T> {
    /// Pins `memory` for devices (`cuMemHostRegister`) and keeps it. The pages it lies in are
    /// charged first, and taken by several workers if they are not there yet. Blocks meanwhile. A
    /// file's map is registered as memory that devices only read, whatever `flags` say.
    ///
    /// # Errors
    /// [`Refused`] with `memory` in it: [`Cause::NotInPlace`] for memory that a stager has to move,
    /// [`Cause::AlreadyPinned`], [`Cause::NoDriver`], the budget's, the driver's. Nothing is
    /// pinned.
    pub fn new(
        host: &Host,
        budget: &Budget,
        memory: T,
        flags: HostFlags,
    ) -> Result<Self, Refused<T>> {
        let owner = Box::new(memory);
        match pin(host, budget, range(NonNull::from(owner.items())), flags) {
            Ok((backing, found)) => {
                let (backing, owner) = (ManuallyDrop::new(backing), ManuallyDrop::new(owner));
                Ok(Self { backing, owner, found })
            }
            Err(error) => Err(Refused { memory: *owner, error }),
        }
    }

    /// The owner, to be read.
    #[must_use]
    pub fn owner(&self) -> &T {
        &self.owner
    }

    /// The elements.
    #[must_use]
    pub fn items(&self) -> &[T::Item] {
        self.owner.items()
    }

    /// The elements, to be written.
    pub fn items_mut(&mut self) -> &mut [T::Item]
    where
        T: PinnableMut,
    {
        self.owner.items_mut()
    }

    /// What kind of memory it is.
    #[must_use]
    pub fn ground(&self) -> Ground {
        self.found.ground
    }

    /// What was wanted and not to be had.
    #[must_use]
    pub fn shortfalls(&self) -> &[Shortfall] {
        &self.found.shortfalls
    }

    /// The pages that are registered, as one: whole ones, around the elements.
    #[must_use]
    pub fn registered(&self) -> Option<Span> {
        self.backing.registrations().first().copied()
    }

    pub(super) fn backing_mut(&mut self) -> &mut Backing {
        &mut self.backing
    }

    /// Ends the registration and gives the memory back. Blocks until copies that are on their way,
    /// and the device, are done.
    ///
    /// # Errors
    /// The driver's, if it will not end it: it is stranded then, together with the memory.
    pub fn close(self) -> Result<T, RegionError> {
        let (mut backing, owner) = self.into_parts();
        match backing.end() {
            Ok(charge) => {
                drop(charge);
                Ok(*owner)
            }
            Err(error) => {
                backing.keep(owner);
                backing.strand();
                Err(error)
            }
        }
    }

    /// Gives it up without ending it: that is left for [`end_retired`](super::end_retired), which
    /// drops the owner too.
    pub fn retire(self) {
        let (mut backing, owner) = self.into_parts();
        backing.keep(owner);
        super::retired::retire(backing);
    }
}

mod parts {
    #![expect(unsafe_code, reason = "moves fields out of a value with a destructor")]

    use super::{Backing, InPlace, Pinnable};
    use std::mem::ManuallyDrop;

    impl<T: Pinnable> InPlace<T> {
        pub(super) fn into_parts(self) -> (Backing, Box<T>) {
            let mut this = ManuallyDrop::new(self);
            // SAFETY: 1. `this` is not touched again, and its destructor does not run.
            unsafe { (ManuallyDrop::take(&mut this.backing), ManuallyDrop::take(&mut this.owner)) }
        }
    }

    impl<T: Pinnable> Drop for InPlace<T> {
        fn drop(&mut self) {
            // SAFETY: 1. taken here and in `into_parts`, after which this does not run.
            let (mut backing, owner) = unsafe {
                (ManuallyDrop::take(&mut self.backing), ManuallyDrop::take(&mut self.owner))
            };
            // It goes with the backing: at once, or when that can be ended.
            backing.keep(owner);
        }
    }
}

impl<T: Pinnable> fmt::Debug for InPlace<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InPlace")
            .field("registered", &self.registered())
            .field("found", &self.found)
            .finish_non_exhaustive()
    }
}

/// Pins `memory` for devices while `work` runs, which copies from it.
///
/// The registration ends before this returns, also on unwind, and nothing in it can be forgotten.
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
///     // stream.scope(|c| c.upload(data, &mut buffer)) at the speed of the link
///     assert_eq!(sim.outstanding().registrations, 1);
///     data.iter().map(|&byte| u64::from(byte)).sum::<u64>()
/// })?;
/// assert_eq!((sum, sim.outstanding().registrations), (7 << 20, 0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`InPlace::new`], and `work` has not run; the driver's if it would not end the registration
/// afterwards, which is tried again then ([`retry_stranded`](super::retry_stranded)): until it is
/// ended the memory must not be given back.
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

/// The same for memory that is copied into.
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
    // The driver finds it by its address.
    let start = elements.cast::<u8>().as_ptr().expose_provenance();
    Span { start, len: elements.len() * size_of::<T>() }
}

/// Charges, claims, populates and registers the pages that a range lies in.
fn pin(
    host: &Host,
    budget: &Budget,
    range: Span,
    mut flags: HostFlags,
) -> Result<(Backing, Found), RegionError> {
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
    let ground = fit(pages, &entries).map_err(|unfit| refused(Cause::NotInPlace(unfit)))?;
    let written = entries.iter().all(|entry| entry.writable);
    flags.read_only |= !written;
    let mut found = Found { ground, shortfalls: Vec::new() };
    if flags.write_combined {
        // How memory is cached was settled when it was mapped.
        flags.write_combined = false;
        found.shortfalls.push(Shortfall { step: Step::Request, cause: Cause::Cached });
    }
    let charge = charge(budget, pages.len)?;
    let taken = |pages| RegionError::new(Step::Register, Cause::AlreadyPinned(pages));
    claims::claim(pages).map_err(taken)?;
    // From here on the backing goes its way back when it is dropped.
    let mut backing = Backing::lent(Lent::new(pages, charge), reach);
    found.shortfalls.extend(populate(host, pages, written));
    match register(&mut backing, pages, flags, written) {
        Ok(None) => Ok((backing, found)),
        Ok(Some(shortfall)) => {
            found.shortfalls.push(shortfall);
            Ok((backing, found))
        }
        Err(cause) => Err(RegionError { step: Step::Register, cause, before: found.shortfalls }),
    }
}

/// What all of a range is, or why it cannot be registered.
fn fit(pages: Span, entries: &[MapEntry]) -> Result<Ground, Unfit> {
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
    written: bool,
) -> Result<Option<Shortfall>, Cause> {
    let told = |e: aquifer_core::DriverError| match e.code {
        ALREADY_REGISTERED => Cause::AlreadyPinned(pages),
        _ => Cause::Driver(e),
    };
    match backing.register(pages, flags) {
        Ok(()) => Ok(None),
        // Some devices cannot be kept from writing. Memory that may be written is pinned all the
        // same.
        Err(e) if flags.read_only && written && e.code != ALREADY_REGISTERED => {
            let mut lesser = flags;
            lesser.read_only = false;
            backing.register(pages, lesser).map_err(told)?;
            Ok(Some(Shortfall { step: Step::Register, cause: Cause::Writable }))
        }
        Err(e) => Err(told(e)),
    }
}

/// Has several workers take the pages that are not there yet, which the driver would take one by
/// one. If that fails the driver still does.
fn populate(host: &Host, pages: Span, written: bool) -> Option<Shortfall> {
    const PIECE: usize = super::RegionRequest::PIECE;
    let count = pages.len.div_ceil(PIECE);
    let kernel = host.kernel.clone();
    let one = move |number: usize| {
        let offset = number * PIECE;
        let part = Span { start: pages.start + offset, len: PIECE.min(pages.len - offset) };
        take_in(&kernel, part, written)
    };
    let one = Arc::new(one);
    let by_worker = one.clone();
    let fell_short = |cause| Some(Shortfall { step: Step::Populate, cause });
    let answers = match host.workers.submit(None, count, None, move |number| by_worker(number)) {
        // Waits for every piece: none is at the memory when this returns.
        Ok(job) => match job.wait(None) {
            Ok(answers) => answers,
            Err(e) => return fell_short(Cause::Job(crate::workers::RunError::NotDone(e))),
        },
        Err(_) => (0..count).map(|number| one(number)).collect(),
    };
    answers.into_iter().find_map(Result::err).and_then(|e| fell_short(Cause::System(e)))
}

fn take_in(kernel: &Kernel, part: Span, written: bool) -> Result<(), aquifer_core::SystemError> {
    if written {
        kernel.populate(part)?
    } else {
        kernel.populate_read(part)?
    };
    Ok(())
}
