//! What a person can do about memory that is not there.

use super::OutOfMemory;
use crate::{Bytes, budget::Holding};
use std::fmt;

/// The one thing to do about an [`OutOfMemory`]: the first of these whose case it is. Its text is the error's last line.
///
/// ```
/// use aquifer_core::{Budget, OutOfMemory, error::Remedy};
/// let tenant = Budget::new("tenant a", 100);
/// let live = tenant.charge(80)?;
/// let mut error = OutOfMemory::new("device 0".into(), 30);
/// (error.refused, error.of_live_bytes) = (tenant.charge(30).err(), true);
/// assert_eq!(error.remedy(), Remedy::FreeOrRaise { name: "tenant a", live: 80, missing: 10 });
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Remedy<'a> {
    /// More was asked than the limit has in all.
    RaiseLimit {
        /// Whose limit.
        budget: &'a str,
        /// To how many bytes at least.
        to: u64,
    },
    /// A limit on live bytes has been met: no memory is missing, this tenant's or tag's share is used up.
    FreeOrRaise {
        /// Whose share and limit.
        name: &'a str,
        /// Bytes that it holds.
        live: u64,
        /// Bytes that are missing.
        missing: u64,
    },
    /// Enough is freed, and waits for a stream's queued work.
    Synchronise {
        /// The stream that keeps most of it, where that is known.
        stream: Option<u32>,
        /// Bytes that it keeps.
        bytes: u64,
    },
    /// Enough is free in one range, in the cache of a stream that keeps it from others.
    Trim {
        /// The stream that has most.
        stream: u32,
        /// Bytes that are free there.
        bytes: u64,
    },
    /// Enough is free, and lies apart.
    AskForLess {
        /// The largest free range, in bytes.
        largest: u64,
        /// Bytes free in all.
        free: u64,
    },
    /// What is live is too much.
    Free {
        /// The tag that holds most.
        holder: Holding,
        /// The budget whose limit could be raised instead, and by how many bytes. Without one the place itself is full.
        or_raise: Option<(&'a str, u64)>,
    },
    /// A limit is met, by something that is not known here.
    RaiseBy {
        /// Whose limit.
        budget: &'a str,
        /// By how many bytes.
        by: u64,
    },
    /// What is missing is not here.
    FreeElsewhere {
        /// Where it is missing.
        place: &'a str,
    },
}

impl<'a> Remedy<'a> {
    pub(super) fn of(error: &'a OutOfMemory) -> Self {
        let requested = error.requested;
        let refused = error.refused.as_ref();
        let missing = requested.saturating_sub(refused.map_or(0, |refused| refused.remaining));
        if let Some(refused) = refused.filter(|refused| refused.limit < requested) {
            return Self::RaiseLimit { budget: refused.budget, to: requested };
        }
        if let Some(refused) = refused.filter(|_| error.of_live_bytes) {
            return Self::FreeOrRaise { name: refused.budget, live: refused.current, missing };
        }
        let others: u64 = error.stranded.iter().map(|stream| stream.cached).sum();
        if error.pending > 0 && error.pending + others >= missing {
            return match error.in_use.first() {
                Some(user) => Self::Synchronise { stream: Some(user.stream), bytes: user.bytes },
                None => Self::Synchronise { stream: None, bytes: error.pending },
            };
        }
        let free = error.cached.saturating_add(refused.map_or(0, |refused| refused.remaining));
        if error.cached > 0 && free >= requested {
            return match error.stranded.iter().max_by_key(|stream| stream.cached) {
                Some(most) if error.largest_free >= requested && most.cached >= requested => {
                    Self::Trim { stream: most.stream, bytes: most.cached }
                }
                _ => Self::AskForLess { largest: error.largest_free.min(requested - 1), free },
            };
        }
        match (error.holders.first(), refused) {
            (Some(&holder), refused) => {
                Self::Free { holder, or_raise: refused.map(|refused| (refused.budget, missing)) }
            }
            (None, Some(refused)) => Self::RaiseBy { budget: refused.budget, by: missing },
            (None, None) => Self::FreeElsewhere { place: &error.place },
        }
    }
}

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::RaiseLimit { budget, to } => {
                write!(f, "raise the limit of {budget} to {}, or ask for less at a time", Bytes(to))
            }
            Self::FreeOrRaise { name, live, missing } => write!(
                f,
                "free some of the {} that {name} holds, or raise its limit by {}",
                Bytes(live),
                Bytes(missing)
            ),
            Self::Synchronise { stream: Some(stream), bytes } => {
                let bytes = Bytes(bytes);
                write!(f, "synchronise stream {stream}, whose work still uses {bytes} of freed blocks")
            }
            Self::Synchronise { stream: None, bytes } => {
                write!(f, "finish or synchronise the work that still uses {} of freed blocks", Bytes(bytes))
            }
            Self::Trim { stream, bytes } => write!(
                f,
                "trim the pool, or ask on stream {stream}: its cache has {} free and keeps them to itself",
                Bytes(bytes)
            ),
            Self::AskForLess { largest, free } => write!(
                f,
                "ask for at most {} at a time: {} are free, and lie apart between live blocks",
                Bytes(largest),
                Bytes(free)
            ),
            Self::Free { holder, or_raise } => {
                write!(f, "free some of the {} that \"{}\" holds", Bytes(holder.bytes), holder.tag)?;
                match or_raise {
                    Some((budget, by)) => write!(f, ", or raise the limit of {budget} by {}", Bytes(by)),
                    None => f.write_str(": nothing else is left there"),
                }
            }
            Self::RaiseBy { budget, by } => write!(f, "raise the limit of {budget} by {}", Bytes(by)),
            Self::FreeElsewhere { place } => write!(f, "free memory that other programs hold on {place}"),
        }
    }
}
