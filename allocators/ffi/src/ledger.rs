//! Claims of bytes from ledgers, by which the processes of a machine share a memory.
//!
//! A membership is a number, as a runtime is: it is never reused, and stays known as ended. The
//! kernel ends it with the process.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{
        CallResult, c_str_of, caller_size, enter, install_panic_hook, null, require, text,
        write_out, write_out_if_set,
    },
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    table, thread_state,
};
use aquifer::{DeviceId, MemoryError, Runtime, driver::DeviceInfo, host::Topology};
use aquifer_status::ledger::{
    ClaimRefused, Ledger, LedgerError, LedgerMemory, Member, Share, folder_of_environment,
};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    ffi::{OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    ptr,
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The number of a membership.
pub type aq_member = u64;

/// The longest wait for a claim: a deadline further away may not be a time.
const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// The terms of a new membership. Zero selects the default of a field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct aq_ledger_options {
    /// `sizeof(aq_ledger_options)`.
    pub size: usize,
    /// The folder of the ledgers; null for that of `AQUIFER_LEDGER`.
    pub folder: *const c_char,
    /// The name of the memory.
    pub name: *const c_char,
    /// Bytes of the memory; 0 for those of a ledger that exists.
    pub capacity: u64,
    /// Bytes that are guaranteed to this member.
    pub guarantee: u64,
    /// Maximum number of bytes that this member claims; 0 for the capacity.
    pub limit: u64,
    /// The order among members that wait.
    pub priority: i32,
    /// Nonzero to keep the guarantee free.
    pub reserve: u32,
}

impl Default for aq_ledger_options {
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            folder: ptr::null(),
            name: ptr::null(),
            capacity: 0,
            guarantee: 0,
            limit: 0,
            priority: 0,
            reserve: 0,
        }
    }
}

/// Live memberships.
static MEMBERS: OnceLock<RwLock<HashMap<aq_member, Arc<Member>>>> = OnceLock::new();
/// The number of the next one.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn members() -> &'static RwLock<HashMap<aq_member, Arc<Member>>> {
    MEMBERS.get_or_init(RwLock::default)
}

fn find(member: aq_member) -> CallResult<Arc<Member>> {
    let found = members().read().unwrap_or_else(PoisonError::into_inner).get(&member).cloned();
    found.ok_or_else(|| no_member(member))
}

#[cold]
fn no_member(member: aq_member) -> Failure {
    if member == 0 || member >= NEXT.load(Ordering::Relaxed) {
        return Failure::new(Status::BadArgument, format!("{member} is no membership"));
    }
    Failure::new(Status::Closed, format!("membership {member} has ended"))
}

impl From<LedgerError> for Failure {
    #[cold]
    fn from(error: LedgerError) -> Self {
        let status = match &error {
            LedgerError::BadSetting { .. } => Status::BadSetting,
            LedgerError::BadName { .. }
            | LedgerError::NoCapacity
            | LedgerError::GuaranteeAboveLimit { .. } => Status::BadArgument,
            LedgerError::GuaranteesExceedCapacity { .. } => Status::OutOfBudget,
            LedgerError::Full { .. } => Status::Capacity,
            LedgerError::Busy { .. } => Status::Busy,
            LedgerError::File(_) | LedgerError::NoThread { .. } => Status::System,
            _ => Status::Other,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ClaimRefused> for Failure {
    #[cold]
    fn from(refused: ClaimRefused) -> Self {
        let status = match (refused.is_forked, refused.is_final()) {
            (true, _) => Status::Closed,
            (false, true) => Status::OutOfBudget,
            (false, false) => Status::OutOfMemory,
        };
        Self::new(status, refused.to_string())
    }
}

/// Returns the folder of the caller, or that of the environment.
///
/// # Safety
/// 1. `folder` is null, or a zero-terminated text.
pub(crate) unsafe fn folder_of(folder: *const c_char) -> CallResult<PathBuf> {
    if folder.is_null() {
        return folder_of_environment()?.ok_or_else(|| {
            let text = "AQUIFER_LEDGER is off, and the call names no folder";
            Failure::new(Status::BadSetting, text)
        });
    }
    // SAFETY: 1. Guaranteed by the caller.
    let folder = unsafe { c_str_of(folder, "folder") }?;
    Ok(OsStr::from_bytes(folder.to_bytes()).into())
}

/// Returns the name of a memory, as the caller has it.
///
/// # Safety
/// 1. `name` is null, or a zero-terminated text.
unsafe fn name_of(name: *const c_char) -> CallResult<String> {
    // SAFETY: 1. Guaranteed by the caller.
    Ok(unsafe { c_str_of(name, "name") }?.to_string_lossy().into_owned())
}

impl aq_ledger_options {
    /// Reads the caller's options, as far as its version has them.
    ///
    /// # Safety
    /// 1. `from` is null or points to options that begin with their size in bytes.
    unsafe fn read(from: *const Self) -> CallResult<Self> {
        if from.is_null() {
            return Err(null("options"));
        }
        // SAFETY: 1. The first field is a `size_t`.
        let known = unsafe { caller_size(from.cast(), size_of::<Self>(), "options") }?;
        let mut options = Self::default();
        // SAFETY: 1. Both sides have that many bytes. 2. Any bytes are valid values of these
        // fields. 3. `options` is a local, so they do not overlap.
        unsafe {
            ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut options).cast::<u8>(), known);
        };
        // SAFETY: 1. Guaranteed by the caller.
        let size = unsafe { from.cast::<usize>().read() };
        // Fields of a newer version must be 0.
        // SAFETY: 1. The caller's struct has `size` bytes.
        if (known..size).any(|at| unsafe { from.cast::<u8>().add(at).read() } != 0) {
            let text = format!("options of {size} bytes ask for what this version does not know");
            return Err(Failure::new(Status::Version, text));
        }
        Ok(options)
    }

    /// Joins.
    ///
    /// # Safety
    /// 1. Each text is null or ends with a zero byte.
    unsafe fn join(&self) -> CallResult<Member> {
        // SAFETY: 1. Guaranteed by the caller.
        let (folder, name) = unsafe { (folder_of(self.folder)?, name_of(self.name)?) };
        let own = Some(self.limit).filter(|limit| *limit > 0);
        let limit = own.into_iter().chain(cap_of(&name)?).min().unwrap_or(u64::MAX);
        let ledger = match self.capacity {
            0 => Ledger::existing(&folder, &name)?,
            capacity => Ledger::open(&folder, &name, capacity)?,
        };
        let mut share = Share::new().guarantee(self.guarantee).limit(limit).priority(self.priority);
        if self.reserve != 0 {
            share = share.reserve();
        }
        Ok(share.join(ledger)?)
    }
}

/// Joins the ledger of a memory.
///
/// # Safety
/// 1. `options` is null, or points to a struct whose first field is its size in bytes, with texts
///    that are null or end with a zero byte.
/// 2. `member` is null, or points to an `aq_member` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_join(
    options: *const aq_ledger_options,
    member: *mut aq_member,
) -> aq_status {
    enter(|| {
        require(member, "member")?;
        install_panic_hook();
        // SAFETY: 1. Guaranteed by the caller.
        let joined = unsafe { aq_ledger_options::read(options)?.join() }?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let table = members();
        table.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(joined));
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out(member, number, "member") }
    })
}

/// Ends a membership.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ledger_leave(member: aq_member) -> aq_status {
    enter(|| {
        let removed = members().write().unwrap_or_else(PoisonError::into_inner).remove(&member);
        removed.map(drop).ok_or_else(|| no_member(member))
    })
}

/// Claims bytes.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ledger_claim(member: aq_member, bytes: u64, wait_ns: u64) -> aq_status {
    enter(|| {
        let member = find(member)?;
        let wait = Duration::from_nanos(wait_ns).min(LONGEST_WAIT);
        Ok(member.claim_by(bytes, Instant::now() + wait)?)
    })
}

/// Releases claimed bytes.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ledger_release(member: aq_member, bytes: u64) -> aq_status {
    enter(|| {
        let member = find(member)?;
        let claimed = member.claimed();
        if bytes > claimed {
            let text = format!("{bytes} bytes cannot be released of {claimed} that are claimed");
            return Err(Failure::new(Status::BadArgument, text));
        }
        member.release(bytes);
        Ok(())
    })
}

/// Stores the figures of a membership.
///
/// # Safety
/// 1. Each pointer is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_member(
    member: aq_member,
    claimed: *mut u64,
    limit: *mut u64,
    room: *mut u64,
    owed: *mut u64,
) -> aq_status {
    enter(|| {
        let member = find(member)?;
        // Repairs what another program may have written over the slot.
        member.refresh();
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            write_out_if_set(claimed, member.claimed());
            write_out_if_set(limit, member.limit());
            write_out_if_set(room, member.room());
            write_out_if_set(owed, member.owed());
        }
        Ok(())
    })
}

/// Records how much of the memory is in use by all processes.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ledger_measure(member: aq_member, in_use: u64) -> aq_status {
    enter(|| {
        find(member)?.measure(|| Some(in_use));
        Ok(())
    })
}

/// Returns the figures of a ledger as JSON.
///
/// # Safety
/// 1. `folder` is null, or a zero-terminated text. 2. So is `name`.
/// 3. `json` is null, or points to a `char *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_figures(
    folder: *const c_char,
    name: *const c_char,
    json: *mut *mut c_char,
) -> aq_status {
    enter(|| {
        require(json, "json")?;
        // SAFETY: 1. 2. Guaranteed by the caller.
        let (folder, name) = unsafe { (folder_of(folder)?, name_of(name)?) };
        let found = figures(&Ledger::existing(&folder, &name)?).to_string();
        // SAFETY: 3. Guaranteed by the caller.
        unsafe { write_out(json, text(&found), "json") }
    })
}

fn figures(ledger: &Ledger) -> Value {
    let figures = ledger.figures();
    let members = figures.members.iter().map(|member| {
        json!({
            "process": member.process,
            "command": member.command,
            "claimed": member.claimed,
            "guarantee": member.guarantee,
            "reserved": member.is_reserved,
            "limit": member.limit,
            "priority": member.priority,
            "reclaimable": member.reclaimable,
            "wanted": member.wanted,
        })
    });
    json!({
        "format": "aquifer-ledger",
        "version": 1,
        "name": figures.name,
        "capacity": figures.capacity,
        "claimed": figures.claimed(),
        "free": figures.free(),
        "unaccounted": figures.unaccounted,
        "members": members.collect::<Vec<_>>(),
    })
}

/// Returns the names of the ledgers of a folder as JSON.
///
/// # Safety
/// 1. `folder` is null, or a zero-terminated text.
/// 2. `json` is null, or points to a `char *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_names(
    folder: *const c_char,
    json: *mut *mut c_char,
) -> aq_status {
    enter(|| {
        require(json, "json")?;
        // SAFETY: 1. Guaranteed by the caller.
        let names = Ledger::names(&unsafe { folder_of(folder) }?)?;
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out(json, text(&json!(names).to_string()), "json") }
    })
}

/// Returns the name and the capacity of the ledger of a device.
///
/// # Safety
/// 1. `name` is null, or points to a `char *` that the caller may write.
/// 2. `capacity` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_of_device(
    runtime: aq_runtime,
    device: u32,
    name: *mut *mut c_char,
    capacity: *mut u64,
) -> aq_status {
    let find = |runtime: &Runtime| Ok(runtime.ledger_of_device(device as usize)?);
    // SAFETY: 1. 2. Guaranteed by the caller.
    unsafe { write_ledger(runtime, find, name, capacity) }
}

/// Returns the name and the capacity of the ledger of pinned memory.
///
/// # Safety
/// 1. `name` is null, or points to a `char *` that the caller may write.
/// 2. `capacity` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_ledger_of_pinned(
    runtime: aq_runtime,
    name: *mut *mut c_char,
    capacity: *mut u64,
) -> aq_status {
    // SAFETY: 1. 2. Guaranteed by the caller.
    unsafe { write_ledger(runtime, |runtime| Ok(runtime.ledger_of_pinned()), name, capacity) }
}

/// Stores the name and the capacity of the ledger that `find` returns.
///
/// # Safety
/// 1. `name` is null, or points to a `char *` that may be written.
/// 2. `capacity` is null, or points to a `uint64_t` that may be written.
unsafe fn write_ledger(
    runtime: aq_runtime,
    find: impl FnOnce(&Runtime) -> CallResult<(String, u64)>,
    name: *mut *mut c_char,
    capacity: *mut u64,
) -> aq_status {
    enter(|| {
        require(name, "name")?;
        let (found, bytes) = thread_state::with(runtime, |shared| find(&shared.runtime))?;
        // SAFETY: 1. 2. Guaranteed by the caller.
        unsafe {
            write_out_if_set(capacity, bytes);
            write_out(name, text(&found), "name")
        }
    })
}

/// Returns the cap of the memory that the ledger of this name is for, or `None` if there is none.
/// The memories of a program's own have none.
pub(crate) fn cap_of(name: &str) -> CallResult<Option<u64>> {
    let memory = LedgerMemory::of(name);
    if let LedgerMemory::Other(_) = memory {
        return Ok(None);
    }
    let topology = Topology::read().map_err(MemoryError::from)?;
    let cap = match memory {
        LedgerMemory::Pinned => topology.pinned_cap(),
        _ => topology.device_cap(&device_of(&memory, name, &topology)?),
    };
    Ok(cap.map_err(MemoryError::from)?.value)
}

/// Returns a device as one of this process's runtimes knows it, else with the ordinal and the
/// address that are known without one.
fn device_of(memory: &LedgerMemory, name: &str, topology: &Topology) -> CallResult<DeviceInfo> {
    for shared in table::all_open() {
        for (index, pool) in shared.runtime.devices().iter().enumerate() {
            if shared.runtime.ledger_of_device(index).is_ok_and(|(known, _)| known == name) {
                return Ok(pool.info().clone());
            }
        }
    }
    // No device has this ordinal.
    let ordinal = memory.ordinal().unwrap_or(u32::MAX);
    let mut info = DeviceInfo::new(DeviceId(ordinal), name.to_owned(), 0);
    info.pci_address = match memory.uuid() {
        Some(uuid) => {
            topology.gpu_address(&uuid).map_err(MemoryError::from)?.map(|a| a.to_string())
        }
        None => memory.address().map(str::to_owned),
    };
    Ok(info)
}
