//! What this process has allocated, and the steps before and after a call of the driver.
//!
//! A request is charged before its call, and recorded after it has succeeded; a free is recorded
//! before its call, since another thread can get the same address as soon as the driver has it
//! back. No lock is held over a call.
#![expect(unsafe_code, reason = "calls the CUDA driver, and adds a handler for forks")]

use crate::{
    blocks::{Block, Blocks, Memory},
    callers,
    guest::{self, NoSignals, lock},
    holder::{Holder, PAGE},
    log::{Log, Subject},
    pools::{AskedOfPool, DriverPool, Pools},
    real::{Code, NOT_INITIALIZED, OUT_OF_MEMORY, Opaque, Real, SUCCESS, real},
    settings::Settings,
    virtual_memory::{Physical, VirtualMemory},
};
use aquifer_core::{
    Charge, DeviceId, Tag,
    event::{Action, BlockKind, MemoryLocation},
    panics::contain,
};
use nix::libc;
use std::{
    ffi::c_int,
    ptr::{self, null_mut},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// How many devices a process may have.
const DEVICES: usize = 64;
/// How often what waits is written to the trace.
const WRITTEN_EACH: Duration = Duration::from_millis(10);
/// How often the figures are published, in rounds of that.
const PUBLISHED_EACH: u32 = 10;
/// Where the numbers of handles begin, which stand for addresses: no address is so high.
const HANDLES: u64 = 1 << 60;
/// Stands for the address of what graphs hold of a device.
const GRAPHS: u64 = HANDLES - PAGE;

/// A request that does not fit: its failure is recorded.
pub(crate) struct Refused;

/// Set once nothing is to be done but to call the driver: after an error, in a forked child, and
/// when the process ends.
static PASSES: AtomicBool = AtomicBool::new(false);
/// Whether any function of this library was called.
static CALLED: AtomicBool = AtomicBool::new(false);
static SESSION: OnceLock<Option<Session>> = OnceLock::new();

/// By which function of the driver memory is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Alloc,
    Pitch,
    Managed,
    Async,
    Array,
    HostAlloc,
    HostRegister,
    Create,
    Served,
}

impl By {
    const NAMES: [&str; 9] = [
        "cuMemAlloc",
        "cuMemAllocPitch",
        "cuMemAllocManaged",
        "cuMemAllocAsync",
        "cuArrayCreate",
        "cuMemHostAlloc",
        "cuMemHostRegister",
        "cuMemCreate",
        "cuMemAllocAsync, served",
    ];

    /// Returns the tag of its blocks, without the callers.
    fn tag(self) -> Tag {
        static TAGS: OnceLock<[Tag; 9]> = OnceLock::new();
        TAGS.get_or_init(|| Self::NAMES.map(Tag::named))[self as usize]
    }

    pub(crate) fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// What this process has.
pub(crate) struct Session {
    pub(crate) real: &'static Real,
    pub(crate) settings: Settings,
    pub(crate) log: Option<Log>,
    pub(crate) pools: Pools,
    devices: [OnceLock<Holder>; DEVICES],
    pinned: OnceLock<Holder>,
    blocks: Blocks,
    virtual_memory: Mutex<VirtualMemory>,
    handles: AtomicU64,
    /// The primary context of each device, if the program has retained one.
    primary: [AtomicU64; DEVICES],
    /// The pool that each device's allocations come from, or null if it is to be asked for.
    current_pools: [AtomicPtr<DriverPool>; DEVICES],
}

/// A request whose call has not returned.
pub(crate) struct Begun {
    what: Subject,
    context: usize,
    ahead: Ahead,
}

/// What was charged before the call.
enum Ahead {
    Charge(Charge),
    /// Of a kind of memory whose size the driver does not tell, with what the device had in use.
    Measured(Charge, u64),
    /// Of a block whose pages its address tells. `None` if no page fits.
    Pages(Option<Charge>),
    Pool(AskedOfPool),
    Nothing,
}

/// Returns this process's session, which the first call begins, or `None` if calls are passed on.
pub(crate) fn session() -> Option<&'static Session> {
    CALLED.store(true, Ordering::Relaxed);
    if PASSES.load(Ordering::Relaxed) {
        return None;
    }
    SESSION.get_or_init(|| contain(Session::begin).flatten()).as_ref()
}

/// Notes that a function of this library was called, which begins no session.
pub(crate) fn note_call() {
    CALLED.store(true, Ordering::Relaxed);
}

/// Performs a step of this library. After a panic in it calls are passed on, which is reported
/// once.
pub(crate) fn step<R>(work: impl FnOnce() -> R) -> Option<R> {
    let done = contain(work);
    if done.is_none() && !PASSES.swap(true, Ordering::Relaxed) {
        guest::report("an internal error: from here on nothing is recorded or limited");
    }
    done
}

extern "C" fn pass_in_child() {
    PASSES.store(true, Ordering::Relaxed);
}

/// Called when the process ends: writes what waits.
pub(crate) extern "C" fn end() {
    let was_passing = PASSES.swap(true, Ordering::Relaxed);
    if let Some(session) = SESSION.get().and_then(Option::as_ref) {
        if !was_passing {
            contain(|| session.write(true));
        }
        return;
    }
    contain(report_escape);
}

/// Reports a driver that was used, if no call of it came here.
fn report_escape() {
    let Some(real) = real().filter(|_| !CALLED.load(Ordering::Relaxed)) else { return };
    let mut count: c_int = 0;
    // SAFETY: 1. A local.
    if unsafe { (real.cuDeviceGetCount)(&raw mut count) } == NOT_INITIALIZED {
        return;
    }
    guest::report(
        "this program has opened the CUDA driver past this library: nothing was recorded or limited",
    );
    if Settings::read().is_ok_and(|settings| settings.limits_anything()) {
        // SAFETY: 1. Null stands for all streams.
        unsafe { libc::fflush(null_mut()) };
        // SAFETY: 1. Ends the process, as it was about to.
        unsafe { libc::_exit(2) };
    }
}

impl Session {
    fn begin() -> Option<Self> {
        let real = real()?;
        let settings = Settings::read()
            .inspect_err(|(name, value)| {
                guest::report(&format!(
                    "{name} is {value}, which makes no sense: nothing is recorded or limited"
                ));
            })
            .ok()?;
        let log = settings.record.clone().map(Log::new);
        // SAFETY: 1. The handler only sets a flag.
        unsafe { libc::pthread_atfork(None, None, Some(pass_in_child)) };
        // A folder that cannot be used is reported by the call, and changes nothing else.
        let _started = aquifer_status::start();
        start_thread();
        Some(Self {
            real,
            settings,
            log,
            pools: Pools::default(),
            devices: std::array::from_fn(|_| OnceLock::new()),
            pinned: OnceLock::new(),
            blocks: Blocks::new(),
            virtual_memory: Mutex::default(),
            handles: AtomicU64::new(HANDLES),
            primary: std::array::from_fn(|_| AtomicU64::new(0)),
            current_pools: std::array::from_fn(|_| AtomicPtr::default()),
        })
    }

    /// Returns what is held of a memory. Its first call for a device measures the driver's own
    /// memory.
    pub(crate) fn holder(&'static self, place: MemoryLocation) -> Option<&'static Holder> {
        match place {
            MemoryLocation::Device(DeviceId(device)) => {
                let holder = self.devices.get(device as usize)?;
                Some(holder.get_or_init(|| {
                    let _blocked = NoSignals::new();
                    let holder = Holder::device(self.real, &self.settings, &self.pools, device);
                    self.log.iter().for_each(|log| holder.tell_start(log));
                    holder
                }))
            }
            _ => Some(self.pinned.get_or_init(|| Holder::pinned(&self.settings))),
        }
    }

    /// Returns the device of the calling thread's context.
    pub(crate) fn current_device(&self) -> Option<u32> {
        let mut device: c_int = 0;
        // SAFETY: 1. A local.
        let code = unsafe { (self.real.cuCtxGetDevice)(&raw mut device) };
        (code == SUCCESS).then(|| u32::try_from(device).ok()).flatten()
    }

    fn current_place(&self) -> Option<MemoryLocation> {
        self.current_device().map(|device| MemoryLocation::Device(DeviceId(device)))
    }

    /// Returns whether the calling thread's context is its device's primary one.
    pub(crate) fn is_in_primary(&self) -> bool {
        let context = self.current_context() as u64;
        let is_primary = |primary: &AtomicU64| primary.load(Ordering::Relaxed) == context;
        context != 0 && self.primary.iter().any(is_primary)
    }

    fn current_context(&self) -> usize {
        let mut context: Opaque = null_mut();
        // SAFETY: 1. A local.
        unsafe { (self.real.cuCtxGetCurrent)(&raw mut context) };
        context as usize
    }

    pub(crate) fn tag(&self, by: By) -> Tag {
        if self.settings.stacks { callers::tag(by.name()) } else { by.tag() }
    }

    /// Charges a request. Returns `Err` if it does not fit, and `None` if it is not counted: the
    /// driver will refuse it.
    pub(crate) fn begin_linear(
        &'static self,
        by: By,
        bytes: u64,
    ) -> Option<Result<Begun, Refused>> {
        if bytes == 0 {
            return None;
        }
        let (place, kind) = match by {
            By::HostAlloc | By::HostRegister => (MemoryLocation::Host(None), BlockKind::Pinned),
            By::Array => (self.current_place()?, BlockKind::Stable),
            _ => (self.current_place()?, BlockKind::Cached),
        };
        let what = Subject { place, kind, stream: 0, bytes, tag: self.tag(by) };
        let holder = self.holder(place)?;
        let pages = bytes.checked_next_multiple_of(PAGE)?;
        let ahead = match by {
            By::Managed => Ahead::Nothing,
            // It may lie on a page that is charged already.
            By::Alloc | By::Pitch if bytes < PAGE => Ahead::Pages(holder.budget.charge(PAGE).ok()),
            _ => {
                let taken = if kind == BlockKind::Pinned { bytes } else { pages };
                let Some(charge) = holder.charge(taken) else {
                    return Some(Err(self.refuse(holder, what)));
                };
                match by {
                    By::Alloc | By::Pitch => Ahead::Pages(Some(charge)),
                    By::Array => Ahead::Measured(charge, self.used()),
                    _ => Ahead::Charge(charge),
                }
            }
        };
        Some(Ok(Begun { what, context: self.current_context(), ahead }))
    }

    /// Charges a request of a pool. Returns `None` if it is not counted: memory of a graph, which
    /// the stream captures, or of another process's pool.
    pub(crate) fn begin_pooled(
        &'static self,
        bytes: u64,
        pool: Option<Opaque>,
        stream: Opaque,
    ) -> Option<Result<Begun, Refused>> {
        if bytes == 0 || self.captures(stream) {
            return None;
        }
        let device = self.current_device()?;
        let pool = match pool {
            Some(pool) => self.known_pool(device, pool as usize),
            None => self.pool_of(device),
        }?;
        let place = pool.place;
        let (tag, kind) = (self.tag(By::Async), BlockKind::Cached);
        let what = Subject { place, kind, stream: self.number_of(stream), bytes, tag };
        let holder = self.holder(place)?;
        Some(match pool.ask(&holder.budget, holder.is_limited(), bytes) {
            Ok(asked) => Ok(Begun { what, context: 0, ahead: Ahead::Pool(asked) }),
            Err(()) => Err(self.refuse(holder, what)),
        })
    }

    /// Returns whether a stream captures. One that cannot be asked now is taken to.
    pub(crate) fn captures(&self, stream: Opaque) -> bool {
        let mut status = 0;
        // SAFETY: 1. A stream of the program's, and a local.
        let code = unsafe { (self.real.cuStreamIsCapturing)(stream, &raw mut status) };
        code != SUCCESS || status != 0
    }

    /// Returns what the current device has in use, by the driver's count.
    pub(crate) fn used(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: 1. Locals.
        unsafe { (self.real.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        (total - free) as u64
    }

    /// Returns the pool that a device's allocations come from.
    fn pool_of(&self, device: u32) -> Option<&'static DriverPool> {
        let known = self.current_pools.get(device as usize)?;
        // SAFETY: 1. Null, or a pool that is never destroyed.
        if let Some(pool) = unsafe { known.load(Ordering::Acquire).as_ref() } {
            return Some(pool);
        }
        let mut pool: Opaque = null_mut();
        // SAFETY: 1. A local.
        let code = unsafe { (self.real.cuDeviceGetMemPool)(&raw mut pool, device as c_int) };
        let pool = (code == SUCCESS).then(|| self.known_pool(device, pool as usize)).flatten()?;
        known.store(ptr::from_ref(pool).cast_mut(), Ordering::Release);
        Some(pool)
    }

    /// Returns a pool that the program has created, or the device's own.
    fn known_pool(&self, device: u32, pool: usize) -> Option<&'static DriverPool> {
        let is_default = || self.default_pool(device) == Some(pool);
        let add = || self.pools.add(pool, MemoryLocation::Device(DeviceId(device)));
        self.pools.find(pool).or_else(|| is_default().then(add))
    }

    /// Forgets a device's pool, which the program has changed.
    pub(crate) fn forget_pool(&self, device: c_int) {
        if let Some(known) = self.current_pools.get(device as usize) {
            known.store(null_mut(), Ordering::Release);
        }
    }

    /// Forgets the pools of all devices.
    pub(crate) fn forget_pools(&self) {
        self.current_pools.iter().for_each(|known| known.store(null_mut(), Ordering::Release));
    }

    fn default_pool(&self, device: u32) -> Option<usize> {
        let mut pool: Opaque = null_mut();
        // SAFETY: 1. A local.
        let code = unsafe { (self.real.cuDeviceGetDefaultMemPool)(&raw mut pool, device as c_int) };
        (code == SUCCESS).then_some(pool as usize)
    }

    /// Returns the number of a stream in the trace.
    pub(crate) fn number_of(&self, stream: Opaque) -> u32 {
        if self.log.is_none() {
            return 0;
        }
        let mut id = 0;
        // SAFETY: 1. A stream of the program's, and a local.
        let code = unsafe { (self.real.cuStreamGetId)(stream, &raw mut id) };
        if code == SUCCESS { id as u32 } else { 0 }
    }

    /// Notes that a request does not fit.
    fn refuse(&self, holder: &Holder, what: Subject) -> Refused {
        holder.count_failure();
        if let Some(log) = &self.log {
            log.add_failure(what, Some(holder.budget.name()));
        }
        Refused
    }

    /// Notes that the driver, or a pool of this library, has no memory for a request.
    pub(crate) fn note_failure(&'static self, what: Subject) {
        if let Some(holder) = self.holder(what.place) {
            holder.count_failure();
        }
        if let Some(log) = &self.log {
            log.add_failure(what, None);
        }
    }

    /// Ends a request. Returns the code for the program. `free` gives memory back that turns out
    /// not to fit.
    pub(crate) fn finish(
        &'static self,
        begun: Begun,
        code: Code,
        address: u64,
        free: impl FnOnce(),
    ) -> Code {
        let Begun { what, context, ahead } = begun;
        let Some(holder) = self.holder(what.place) else { return code };
        let memory = match ahead {
            Ahead::Measured(charge, before) if code == SUCCESS => {
                let taken = self.used().saturating_sub(before);
                Some(Memory::Own(holder.match_taken(charge, taken)))
            }
            Ahead::Charge(charge) | Ahead::Measured(charge, _) => Some(Memory::Own(charge)),
            Ahead::Pages(ahead) if code == SUCCESS => holder.add_pages(address, what.bytes, ahead),
            Ahead::Nothing | Ahead::Pages(_) => Some(Memory::Managed),
            Ahead::Pool(asked) => {
                asked.settle(self.real, &holder.budget, code == SUCCESS).map(Memory::Pool)
            }
        };
        match memory {
            _ if code == OUT_OF_MEMORY => self.note_failure(what),
            _ if code != SUCCESS => {}
            Some(memory) => self.add(address, Block { what, context, memory }),
            None => {
                free();
                // A pool may have grown for it.
                self.pools.trim(self.real, holder.place, &holder.budget);
                self.refuse(holder, what);
                return OUT_OF_MEMORY;
            }
        }
        code
    }

    /// Adds a block, and records it.
    pub(crate) fn add(&'static self, address: u64, block: Block) {
        let what = block.what;
        let before = self.blocks.insert(address, block);
        self.record_new(address, what);
        if let Some(before) = before {
            self.release(before);
        }
    }

    fn record_new(&'static self, address: u64, what: Subject) {
        if let Some(log) = &self.log {
            log.add(Action::Allocate, address, what);
        }
        if let Some(holder) = self.holder(what.place) {
            holder.count_alloc(what.bytes);
        }
    }

    /// Takes a block whose memory is about to be freed, and records that.
    pub(crate) fn take(&'static self, address: u64, stream: Option<Opaque>) -> Option<Block> {
        let block = self.blocks.remove(address)?;
        let stream = stream.map_or(block.what.stream, |stream| self.number_of(stream));
        self.record_end(address, Subject { stream, ..block.what });
        Some(block)
    }

    fn record_end(&self, address: u64, what: Subject) {
        if let Some(log) = &self.log {
            log.add(Action::Free, address, what);
        }
    }

    /// Ends a block that the driver has freed.
    pub(crate) fn release(&'static self, block: Block) {
        let Some(holder) = self.holder(block.what.place) else { return };
        holder.count_free(block.what.bytes);
        match block.memory {
            Memory::Pages { edges, .. } => {
                edges.into_iter().flatten().for_each(|page| holder.leave_page(page));
            }
            Memory::Pool(pool) => pool.free(block.what.bytes),
            _ => {}
        }
    }

    /// Puts a block back that the driver has not freed.
    pub(crate) fn put_back(&'static self, address: u64, block: Block) {
        if let Some(holder) = self.holder(block.what.place) {
            // `add` counts it again.
            holder.count_free(block.what.bytes);
        }
        self.add(address, block);
    }

    /// Ends the blocks of a context that was destroyed.
    pub(crate) fn end_context(&'static self, context: usize) {
        for (address, block) in self.blocks.remove_of(context) {
            self.record_end(address, block.what);
            self.release(block);
        }
    }

    /// Notes a device's primary context.
    pub(crate) fn note_primary(&self, device: c_int, context: Opaque) {
        if let Some(primary) = self.primary.get(device as usize) {
            primary.store(context as u64, Ordering::Relaxed);
        }
    }

    /// Ends the blocks of a device's primary context, if it has ended.
    pub(crate) fn end_primary(&'static self, device: c_int) {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: 1. Locals.
        let code = unsafe {
            (self.real.cuDevicePrimaryCtxGetState)(device, &raw mut flags, &raw mut active)
        };
        let primary =
            self.primary.get(device as usize).map_or(0, |primary| primary.load(Ordering::Relaxed));
        if code == SUCCESS && active == 0 && primary != 0 {
            self.end_context(primary as usize);
        }
    }

    fn virtual_memory(&self) -> MutexGuard<'_, VirtualMemory> {
        lock(&self.virtual_memory)
    }

    /// Charges a handle, whose memory is at `place`.
    pub(crate) fn begin_handle(
        &'static self,
        bytes: u64,
        place: MemoryLocation,
    ) -> Option<Result<(Charge, Subject), Refused>> {
        let kind = match place {
            MemoryLocation::Device(_) => BlockKind::Stable,
            _ => BlockKind::Pinned,
        };
        let what = Subject { place, kind, stream: 0, bytes, tag: self.tag(By::Create) };
        let holder = self.holder(place)?;
        let charge = holder.charge(bytes);
        Some(charge.map(|charge| (charge, what)).ok_or_else(|| self.refuse(holder, what)))
    }

    /// Adds a handle that was created.
    pub(crate) fn add_handle(&'static self, handle: u64, charge: Charge, what: Subject) {
        let number = self.handles.fetch_add(PAGE, Ordering::Relaxed);
        let memory = Arc::new(Physical { number, what, charge });
        self.virtual_memory().open(handle, Some(memory));
        self.record_new(number, what);
    }

    /// Adds a handle of another process, or one more reference to that of the memory at an address.
    pub(crate) fn add_reference(&self, handle: u64, address: Option<u64>) {
        let mut virtual_memory = self.virtual_memory();
        let memory = address.and_then(|address| virtual_memory.memory_at(address));
        virtual_memory.open(handle, memory);
    }

    pub(crate) fn add_mapping(&self, address: u64, bytes: u64, handle: u64) {
        self.virtual_memory().map(address, bytes, handle);
    }

    /// Ends a reference of a handle.
    pub(crate) fn release_handle(&'static self, handle: u64) {
        let ended = self.virtual_memory().release(handle);
        ended.into_iter().for_each(|memory| self.end_physical(memory));
    }

    /// Ends the mappings of a range.
    pub(crate) fn remove_mappings(&'static self, address: u64, bytes: u64) {
        let ended = self.virtual_memory().unmap(address, bytes);
        ended.into_iter().for_each(|memory| self.end_physical(memory));
    }

    fn end_physical(&'static self, memory: Physical) {
        let Physical { number, what, charge } = memory;
        self.record_end(number, what);
        if let Some(holder) = self.holder(what.place) {
            holder.count_free(what.bytes);
        }
        drop(charge);
    }

    /// Returns the free and total bytes of the current device within its limit.
    pub(crate) fn info(&'static self, free: usize, total: usize) -> Option<(usize, usize)> {
        let device = self.current_device()?;
        let holder = self.holder(MemoryLocation::Device(DeviceId(device)))?;
        let limit = usize::try_from(holder.limit?).unwrap_or(usize::MAX);
        self.pools.refresh(self.real, holder.place, &holder.budget);
        let left = usize::try_from(holder.budget.remaining()).unwrap_or(usize::MAX);
        Some((free.min(left), total.min(limit)))
    }

    /// Returns what a device has within its limit.
    pub(crate) fn total(&self, device: c_int, total: usize) -> usize {
        let limit = u32::try_from(device).ok().and_then(|device| self.settings.limits.of(device));
        limit.map_or(total, |limit| total.min(usize::try_from(limit).unwrap_or(usize::MAX)))
    }

    /// Reads what graphs hold of a device.
    fn refresh_graphs(&'static self, holder: &Holder) {
        /// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
        const RESERVED: u32 = 2;
        let MemoryLocation::Device(DeviceId(device)) = holder.place else { return };
        let mut now = 0u64;
        // SAFETY: 1. Room for the value's 8 bytes.
        let code = unsafe {
            (self.real.cuDeviceGetGraphMemAttribute)(
                device as c_int,
                RESERVED,
                (&raw mut now).cast(),
            )
        };
        let mut graphs = lock(&holder.graphs);
        let before = graphs.0;
        if code != SUCCESS || now == before {
            return;
        }
        // What does not fit is held all the same: no call of the program asks for it.
        *graphs = (now, None);
        graphs.1 = holder.budget.charge(now).ok();
        if let Some(log) = &self.log {
            let (place, tag) = (holder.place, Tag::named("graphs"));
            let of = |bytes| Subject { place, kind: BlockKind::Graph, stream: 0, bytes, tag };
            if before > 0 {
                log.add(Action::Free, GRAPHS, of(before));
            }
            if now > 0 {
                log.add(Action::Allocate, GRAPHS, of(now));
            }
        }
    }

    /// Writes what waits, and with `all` publishes the figures as well.
    fn write(&'static self, all: bool) {
        if all {
            let opened = self.devices.iter().filter_map(OnceLock::get).chain(self.pinned.get());
            for holder in opened {
                self.pools.refresh(self.real, holder.place, &holder.budget);
                self.refresh_graphs(holder);
                holder.publish(self.log.as_ref());
            }
        }
        if let Some(log) = &self.log {
            log.write();
        }
    }
}

/// Starts the thread that writes and publishes.
fn start_thread() {
    let work = || {
        let mut rounds = 0u32;
        while !PASSES.load(Ordering::Relaxed) {
            thread::sleep(WRITTEN_EACH);
            rounds = rounds.wrapping_add(1);
            if let Some(session) = SESSION.get().and_then(Option::as_ref) {
                step(|| session.write(rounds.is_multiple_of(PUBLISHED_EACH)));
            }
        }
    };
    let _blocked = NoSignals::new();
    // Without it the trace is written when the process ends.
    let _started = thread::Builder::new().name("aquifer-run".to_owned()).spawn(work);
}
