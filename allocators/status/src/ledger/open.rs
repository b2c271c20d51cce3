//! An open ledger: its mapped file, its live slots and its dead ones.

use crate::ledger::{
    error::LedgerError,
    file,
    forks::OwnFile,
    layout::{SLOTS, header, slot},
    protocol::{self, Dead, Table, held, put, wish},
    system::LockRange,
    system::Mapping,
    system::now_ns,
};
use crate::{StatusError, folder, text::read_text};
use std::{
    fmt, fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU32, AtomicU64, AtomicUsize,
            Ordering::{Acquire, Relaxed},
        },
    },
};

/// The ledger of one memory, open for reading or for [joining](crate::ledger::Share::join).
///
/// ```
/// use aquifer_status::ledger::{Ledger, Share};
/// # let folder = std::env::temp_dir().join(format!("aquifer-ledger-doc-{}", std::process::id()));
/// let member = Share::new().guarantee(40).join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// member.claim(30)?;
///
/// // Another process, such as `aquifer top`.
/// let figures = Ledger::existing(&folder, "GPU-1")?.figures();
/// assert_eq!((figures.capacity, figures.claimed(), figures.free()), (100, 30, 70));
/// assert_eq!(figures.members[0].guarantee, 40);
/// # drop(member);
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Ledger {
    pub(crate) file: OwnFile,
    map: Mapping,
    path: PathBuf,
    name: String,
    /// The capacity that [`Ledger::open`] was called with.
    asked: Option<u64>,
    /// The largest number of slots that this handle has seen in use, see [`Table`].
    seen: AtomicUsize,
    /// The slot whose lock this handle has, or [`SLOTS`].
    own: AtomicUsize,
    /// Held while this process has, or tries for, the right to join.
    membership: Mutex<()>,
}

impl Ledger {
    /// Opens the ledger of a memory of `capacity` bytes, and creates it, and the folder, if it does
    /// not exist. `name` identifies the memory on the machine, such as the UUID of a GPU.
    ///
    /// The first member sets the capacity. A member that joins later with a lower one is limited to
    /// that by itself.
    ///
    /// # Errors
    /// [`LedgerError::BadName`]; [`LedgerError::NoCapacity`]; [`LedgerError::File`].
    pub fn open(folder: &Path, name: &str, capacity: u64) -> Result<Self, LedgerError> {
        if capacity == 0 {
            return Err(LedgerError::NoCapacity);
        }
        let path = file::path_of(folder, name)?;
        folder::create(folder)?;
        let file = file::open_or_create(&path, capacity)?;
        Self::of_file(file, path, name, Some(capacity))
    }

    /// Opens a ledger that exists, with the capacity that it has.
    ///
    /// # Errors
    /// [`LedgerError::BadName`]; [`LedgerError::File`].
    pub fn existing(folder: &Path, name: &str) -> Result<Self, LedgerError> {
        let path = file::path_of(folder, name)?;
        folder::check(folder)?;
        let file = file::open(&path)?;
        Self::of_file(file, path, name, None)
    }

    /// Returns the names of the ledgers in a folder, none if it does not exist.
    ///
    /// # Errors
    /// [`LedgerError::File`].
    pub fn names(folder: &Path) -> Result<Vec<String>, LedgerError> {
        file::names(folder)
    }

    fn of_file(
        file: fs::File,
        path: PathBuf,
        name: &str,
        asked: Option<u64>,
    ) -> Result<Self, LedgerError> {
        let refused = |error| StatusError::System { path: path.clone(), error };
        // A mapping keeps the description that it was made by open, in forked children too, and with
        // it the locks that were taken by it. So it has one of its own.
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        let own = fs::File::options().read(true).write(true).open(own);
        let map = Mapping::new(own.as_ref().unwrap_or(&file)).map_err(refused)?;
        let file = OwnFile::new(file).map_err(refused)?;
        Ok(Self {
            file,
            map,
            name: name.to_owned(),
            path,
            asked,
            seen: AtomicUsize::new(0),
            own: AtomicUsize::new(SLOTS),
            membership: Mutex::new(()),
        })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the figures of the live members, with a system call for each slot that is in use.
    ///
    /// In a child of a fork it opens the file again. If that fails, slots of dead members that are
    /// not cleared yet are shown too.
    #[must_use]
    pub fn figures(&self) -> LedgerFigures {
        if !self.file.is_of_this_process()
            && let Ok(again) = self.open_again()
        {
            return again.figures();
        }
        let table = self.table();
        let member = |number: usize| {
            let slot: Vec<u64> = table.slot(number).iter().map(|word| word.load(Acquire)).collect();
            let priority = i32::try_from(slot[slot::PRIORITY].cast_signed()).unwrap_or_default();
            MemberFigures {
                process: slot[slot::PROCESS] as u32,
                command: read_text(&slot, slot::COMMAND, slot::COMMAND_BYTES),
                claimed: held(slot[slot::PENDING], slot[slot::CLAIMED]).0,
                guarantee: slot[slot::GUARANTEE],
                is_reserved: slot[slot::RESERVED] > 0,
                limit: slot[slot::LIMIT],
                priority,
                reclaimable: slot[slot::RECLAIMABLE],
                wanted: wish(table.slot(number), now_ns).map_or(0, |wish| wish.bytes),
            }
        };
        LedgerFigures {
            name: self.name.clone(),
            capacity: table.header[header::CAPACITY].load(Relaxed),
            unaccounted: table.header[header::UNACCOUNTED].load(Relaxed),
            members: (0..table.used()).filter(|number| self.is_live(*number)).map(member).collect(),
        }
    }

    pub(crate) fn table(&self) -> Table<'_, AtomicU64> {
        self.map.table(&self.seen)
    }

    pub(crate) fn futex(&self, at: usize) -> &AtomicU32 {
        self.map.futex(at)
    }

    pub(crate) fn asked(&self) -> Option<u64> {
        self.asked
    }

    /// Returns this ledger, opened again if it was opened before a fork.
    pub(crate) fn of_this_process(self) -> Result<Self, LedgerError> {
        if self.file.is_of_this_process() { Ok(self) } else { self.open_again() }
    }

    /// Opens the file again: a child of a fork has it closed, and another file may have its number.
    fn open_again(&self) -> Result<Self, LedgerError> {
        Self::of_file(file::open(&self.path)?, self.path.clone(), &self.name, self.asked)
    }

    /// Returns whether an open ledger, this one or another, has the slot locked. If the system
    /// refuses to say, and in a child of a fork, it counts as live.
    pub(crate) fn is_live(&self, number: usize) -> bool {
        number == self.own.load(Relaxed)
            || !self.file.is_of_this_process()
            || LockRange::Slot(number).is_locked(&self.file).unwrap_or(true)
    }

    /// Locks the slot until this handle is dropped, unless another handle has it.
    pub(crate) fn take_slot(&self, number: usize) -> io::Result<bool> {
        let taken = LockRange::Slot(number).try_lock(&self.file)?;
        if taken {
            self.own.store(number, Relaxed);
        }
        Ok(taken)
    }

    /// Returns the slots of dead members that matter to claims. They are cleared, unless another
    /// process has the right to join.
    pub(crate) fn dead(&self) -> Vec<Dead> {
        let table = self.table();
        let dead = |number: usize| {
            // Before the look at the lock: invariant 5 of the protocol.
            let joined = table.slot(number)[slot::JOINED].load(Acquire);
            (self.has_bytes(number) && !self.is_live(number)).then_some(Dead { number, joined })
        };
        let found: Vec<Dead> = (0..table.used()).filter_map(dead).collect();
        if !found.is_empty()
            && let Ok(Some(_membership)) = self.try_membership()
        {
            // With the right to join, no process can take a slot that is found dead.
            let numbers = found.iter().map(|dead| dead.number);
            numbers.filter(|number| !self.is_live(*number)).for_each(|number| self.clear(number));
        }
        found
    }

    /// Returns whether a slot matters to claims.
    fn has_bytes(&self, number: usize) -> bool {
        let slot = self.table().slot(number);
        [slot::PENDING, slot::CLAIMED, slot::RESERVED, slot::WANTED, slot::GUARANTEE]
            .iter()
            .any(|at| slot[*at].load(Acquire) != 0)
    }

    /// Clears a slot that no other process writes to.
    pub(crate) fn clear(&self, number: usize) {
        protocol::clear(self.table().slot(number));
    }

    /// Takes the right to join, if no other process and no other thread has it.
    pub(crate) fn try_membership(&self) -> io::Result<Option<Membership<'_>>> {
        let guard = self.membership.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = LockRange::Membership.try_lock(&self.file)?;
        Ok(taken.then(|| {
            put(&self.table().header[header::JOINING], u64::from(process::id()), Relaxed);
            Membership { ledger: self, _guard: guard }
        }))
    }
}

/// The right to join, given back when it is dropped.
pub(crate) struct Membership<'a> {
    ledger: &'a Ledger,
    _guard: MutexGuard<'a, ()>,
}

impl Drop for Membership<'_> {
    fn drop(&mut self) {
        put(&self.ledger.table().header[header::JOINING], 0, Relaxed);
        LockRange::Membership.unlock(&self.ledger.file);
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The figures of a ledger, read one after another while members change them. All are in bytes
/// unless noted.
///
/// See the example of [`Ledger`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LedgerFigures {
    /// The name of the ledger.
    pub name: String,
    /// The capacity of the memory.
    pub capacity: u64,
    /// What processes that are no members use, as last measured.
    pub unaccounted: u64,
    /// The live members.
    pub members: Vec<MemberFigures>,
}

/// The figures of a live member. All are in bytes unless noted.
///
/// See the example of [`Ledger`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemberFigures {
    /// The process, as it has named itself.
    pub process: u32,
    /// Its command.
    pub command: String,
    /// What it has claimed.
    pub claimed: u64,
    /// Its guarantee.
    pub guarantee: u64,
    /// Whether the guarantee is kept for it while it does not use it.
    pub is_reserved: bool,
    /// Its limit.
    pub limit: u64,
    /// Its priority (a number).
    pub priority: i32,
    /// What it could give back soon, as it has last estimated.
    pub reclaimable: u64,
    /// What it waits for, or 0.
    pub wanted: u64,
}

impl LedgerFigures {
    /// Returns the sum of the members' claims.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.members.iter().fold(0, |sum, member| sum.saturating_add(member.claimed))
    }

    /// Returns the bytes that no process has claimed or is known to use.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.unaccounted).saturating_sub(self.claimed())
    }
}
