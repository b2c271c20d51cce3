//! Errors of ledgers, and the refusal of a claim.

use crate::StatusError;
use aquifer_core::Bytes;
use std::{error, fmt, io, path::PathBuf};

/// Why a ledger cannot be opened, read or joined, as in the example of
/// [`Ledger`](crate::ledger::Ledger).
#[non_exhaustive]
pub enum LedgerError {
    /// The folder or the file is not safe to use, or is no ledger of this version.
    File(StatusError),
    /// `AQUIFER_LEDGER` is neither a path with a `/` nor `off`.
    BadSetting {
        /// Its value.
        value: String,
    },
    /// The name of a memory is empty, too long, or has characters other than letters, digits, `.`,
    /// `-` and `_`.
    BadName {
        /// The name.
        name: String,
    },
    /// The memory has no bytes.
    NoCapacity,
    /// A share guarantees more than its own limit.
    GuaranteeAboveLimit {
        /// The guarantee in bytes.
        guarantee: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The guarantees of all members would exceed the capacity.
    GuaranteesExceedCapacity {
        /// The guarantee of the share, in bytes.
        guarantee: u64,
        /// Bytes guaranteed to other members.
        others: u64,
        /// The capacity in bytes.
        capacity: u64,
    },
    /// All slots belong to live members.
    Full {
        /// The number of slots.
        slots: usize,
    },
    /// The system has no thread for answering other members.
    NoThread {
        /// Its error.
        error: io::Error,
    },
    /// Another process has held the right to join for a second. It may be stopped.
    Busy {
        /// The ledger.
        path: PathBuf,
        /// That process, as it has named itself, or 0.
        process: u32,
    },
}

impl From<StatusError> for LedgerError {
    fn from(error: StatusError) -> Self {
        Self::File(error)
    }
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(error) => write!(f, "the ledger cannot be used: {error}"),
            Self::BadSetting { value } => {
                write!(f, "AQUIFER_LEDGER is {value}, which is neither a path with a / nor off")
            }
            Self::BadName { name } => write!(f, "{name:?} is no name for a ledger"),
            Self::NoCapacity => f.write_str("a memory of no bytes cannot be shared"),
            Self::GuaranteeAboveLimit { guarantee, limit } => write!(
                f,
                "a guarantee of {} is above the limit of {}",
                Bytes(*guarantee),
                Bytes(*limit)
            ),
            Self::GuaranteesExceedCapacity { guarantee, others, capacity } => write!(
                f,
                "{} cannot be guaranteed: {} of {} are guaranteed to other processes",
                Bytes(*guarantee),
                Bytes(*others),
                Bytes(*capacity)
            ),
            Self::NoThread { error } => write!(f, "no thread answers other processes: {error}"),
            Self::Full { slots } => write!(f, "all {slots} slots belong to live processes"),
            Self::Busy { path, process } => {
                let path = path.display();
                write!(f, "{path}: process {process} has kept it locked for a second; ")?;
                f.write_str("let it go on if it is stopped, or end it")
            }
        }
    }
}

aquifer_core::__debug_as_display!(LedgerError);

impl error::Error for LedgerError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::File(error) => Some(error),
            Self::NoThread { error } => Some(error),
            _ => None,
        }
    }
}

/// The member that is most in the way of a refused claim.
///
/// See the example of [`ClaimRefused`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The process, as it has named itself.
    pub process: u32,
    /// Its command.
    pub command: String,
    /// The bytes that it has claimed, or is about to claim.
    pub bytes: u64,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, command, bytes } = self;
        // A command may have any characters, which `?` escapes.
        write!(f, "process {process} holds {} ({command:?})", Bytes(*bytes))
    }
}

/// The refusal of a claim, which has changed nothing. All figures are in bytes, of that moment.
///
/// ```
/// use aquifer_status::ledger::{Ledger, Share};
/// # let folder = std::env::temp_dir().join(format!("aquifer-refused-doc-{}", std::process::id()));
/// let holder = Share::new().join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// let other = Share::new().join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// holder.claim(70)?;
/// let refused = other.claim(40).unwrap_err();
/// assert_eq!((refused.others, refused.room(), refused.is_final()), (70, 30, false));
/// let largest = refused.largest.clone().unwrap();
/// assert_eq!((largest.process, largest.bytes), (std::process::id(), 70));
/// assert!(refused.to_string().contains(&format!("process {} holds 70 B", std::process::id())));
/// # drop((holder, other));
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ClaimRefused {
    /// What was requested.
    pub requested: u64,
    /// What the member has claimed.
    pub claimed: u64,
    /// The member's limit.
    pub limit: u64,
    /// The capacity of the memory.
    pub capacity: u64,
    /// What other members have claimed, reserved, or are about to claim.
    pub others: u64,
    /// What of `others` is guaranteed to them and not claimed.
    pub reserved: u64,
    /// What is kept for members that wait and come first.
    pub kept: u64,
    /// What is in use by processes that are no members.
    pub unaccounted: u64,
    /// The other member that has claimed the most.
    pub largest: Option<Holder>,
    /// Whether this is the child of a fork, which has no claims and must join by itself.
    pub is_forked: bool,
}

impl ClaimRefused {
    /// Returns what a claim could have taken.
    #[must_use]
    pub fn room(&self) -> u64 {
        if self.is_forked {
            return 0;
        }
        let taken = [self.unaccounted, self.others, self.kept, self.claimed];
        let free = taken.iter().fold(self.capacity, |free, taken| free.saturating_sub(*taken));
        free.min(self.limit.saturating_sub(self.claimed))
    }

    /// Returns whether no release of other members can help: the claim exceeds the member's limit.
    #[must_use]
    pub fn is_final(&self) -> bool {
        let most = self.limit.min(self.capacity);
        self.is_forked || self.claimed.checked_add(self.requested).is_none_or(|all| all > most)
    }
}

impl fmt::Display for ClaimRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_forked {
            return f.write_str("a forked child has no share of its parent's ledger");
        }
        write!(
            f,
            "{} requested with {} of the limit of {} claimed; of {}, other processes hold {}",
            Bytes(self.requested),
            Bytes(self.claimed),
            Bytes(self.limit),
            Bytes(self.capacity),
            Bytes(self.others.saturating_sub(self.reserved))
        )?;
        match self.reserved {
            0 => {}
            reserved => write!(f, ", {} are guaranteed to them", Bytes(reserved))?,
        }
        match self.kept {
            0 => {}
            kept => write!(f, ", {} are kept for those that wait", Bytes(kept))?,
        }
        match self.unaccounted {
            0 => {}
            others => write!(f, ", processes that claim nothing use {}", Bytes(others))?,
        }
        self.largest.as_ref().map_or(Ok(()), |largest| write!(f, "; {largest}"))
    }
}

aquifer_core::__debug_as_display!(ClaimRefused);

impl error::Error for ClaimRefused {}
