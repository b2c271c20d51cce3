//! The recommended action for an out-of-memory error.

use super::OutOfMemory;
use crate::{
    Bytes, OutOfBudget,
    budget::{Holding, Raise, refusal::write_held},
};
use std::fmt;

/// The recommended action for an [`OutOfMemory`]: the first of these that applies. Its text is the
/// last line of the error.
///
/// ```
/// use aquifer::{Budget, OutOfMemory, error::Remedy};
/// let tenant = Budget::new("tenant a", 100);
/// let live = tenant.charge(80)?;
/// let mut error = OutOfMemory::new("device 0".into(), 30);
/// (error.refused, error.of_live_bytes) = (tenant.charge(30).err(), true);
/// assert!(matches!(error.remedy(), Remedy::FreeOrRaise { live: 80, missing: 10, .. }));
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Remedy<'a> {
    /// The request exceeds the total memory of the place.
    BeyondPlace {
        /// The place.
        place: &'a str,
        /// Bytes that it has.
        capacity: u64,
    },
    /// The request exceeds the limit itself.
    RaiseLimit {
        /// The limits, and their required values.
        raise: RequiredLimits<'a>,
    },
    /// A limit on live bytes is reached: memory is available, but the share of this tenant or tag
    /// is used up.
    FreeOrRaise {
        /// Live bytes of the tenant or tag.
        live: u64,
        /// Bytes that are missing.
        missing: u64,
        /// Its limit, and those of the ancestors that are too low.
        raise: RequiredLimits<'a>,
    },
    /// Enough memory is freed, but pending on the queued work of a stream.
    Synchronise {
        /// The stream that holds back enough of it, if one stream does.
        stream: Option<u32>,
        /// Bytes held back.
        bytes: u64,
    },
    /// Enough memory is free in one range, but in the cache of another stream.
    AskOn {
        /// The stream whose cache has the most.
        stream: u32,
        /// Bytes that are free there.
        bytes: u64,
    },
    /// Enough memory is free in total, but fragmented.
    AskForLess {
        /// The largest request that can succeed, in bytes.
        largest: u64,
        /// Free bytes in total.
        free: u64,
        /// The limits that could be raised instead.
        or_raise: Option<RequiredLimits<'a>>,
    },
    /// Enough memory is free in total, but the request needs whole handles or allocations of the
    /// driver, and none is free as a whole.
    FreeWholeHandles {
        /// Free bytes in total.
        free: u64,
        /// The limits that could be raised instead.
        or_raise: Option<RequiredLimits<'a>>,
    },
    /// Too much memory is live.
    Free {
        /// The tag with the most live bytes.
        holder: Holding,
        /// Bytes that are missing.
        missing: u64,
        /// The limits that could be raised instead. If there are none, the place itself is full.
        or_raise: Option<RequiredLimits<'a>>,
    },
    /// A limit is reached, and the holder of the memory is unknown.
    Raise {
        /// The limits, and their required values.
        raise: RequiredLimits<'a>,
    },
    /// The missing memory is held by other programs.
    FreeElsewhere {
        /// The place where it is missing.
        place: &'a str,
        /// Bytes that they hold, if they share it by a ledger, and otherwise 0.
        held: u64,
        /// The process that holds the most of these, with its command, if it is known.
        holder: Option<&'static str>,
    },
}

/// Limits that are too low, and their required values. All of them have to be raised.
///
/// See the example of [`Remedy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequiredLimits<'a> {
    /// The budget that refused.
    pub budget: &'a str,
    /// The required limit, in bytes.
    pub to: u64,
    /// The ancestors that would refuse next.
    pub more: &'a [Raise],
}

impl fmt::Display for RequiredLimits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "raise the limit of {} to {}", self.budget, Bytes(self.to).rounded_up())?;
        for Raise { budget, to, .. } in self.more {
            write!(f, " and that of {budget} to {}", Bytes(*to).rounded_up())?;
        }
        Ok(())
    }
}

impl OutOfMemory {
    /// Returns the recommended action.
    #[must_use]
    pub fn remedy(&self) -> Remedy<'_> {
        Remedy::for_error(self)
    }
}

impl<'a> Remedy<'a> {
    fn for_error(error: &'a OutOfMemory) -> Self {
        let requested = error.requested;
        let refused = error.refused.as_ref();
        let raise = match (error.raise.split_first(), refused) {
            (Some((first, more)), _) => {
                Some(RequiredLimits { budget: first.budget, to: first.to, more })
            }
            (None, Some(refused)) => {
                let to = refused.limit.saturating_add(refused.missing());
                Some(RequiredLimits { budget: refused.budget, to, more: &[] })
            }
            (None, None) => None,
        };
        // Raising a limit does not help where other processes hold the bytes.
        let raise = raise.filter(|_| !refused.is_some_and(OutOfBudget::is_held_elsewhere));
        let most = error.raise.iter().map(|raise| raise.by).max();
        let missing = most.or(refused.map(OutOfBudget::missing)).unwrap_or(requested);
        if error.exceeds_capacity() {
            return Self::BeyondPlace { place: &error.place, capacity: error.capacity };
        }
        if let (Some(raise), Some(_)) = (raise, refused.filter(|refused| refused.limit < requested))
        {
            return Self::RaiseLimit { raise };
        }
        if let (Some(refused), Some(raise)) = (refused.filter(|_| error.of_live_bytes), raise) {
            return Self::FreeOrRaise { live: refused.current, missing, raise };
        }
        // Raising a limit beyond the total memory of the place does not help.
        let within = |raise: &RequiredLimits<'_>| error.capacity == 0 || raise.to <= error.capacity;
        let stranded: u64 = error.stranded.iter().map(|stream| stream.cached).sum();
        let unfinished = error.pending.max(error.in_use.iter().map(|user| user.bytes).sum());
        if unfinished > 0 && unfinished.saturating_add(stranded) >= missing {
            return match error.in_use.split_first() {
                Some((user, rest)) if rest.is_empty() || user.bytes >= missing => {
                    Self::Synchronise { stream: Some(user.stream), bytes: user.bytes }
                }
                _ => Self::Synchronise { stream: None, bytes: unfinished },
            };
        }
        let free = error.cached.saturating_add(refused.map_or(0, |refused| refused.remaining));
        if error.cached > 0 && free >= requested {
            let most = error.stranded.iter().max_by_key(|stream| stream.cached);
            if let Some(most) = most.filter(|most| {
                !error.of_whole_handles
                    && error.largest_free >= requested
                    && most.cached >= requested
            }) {
                return Self::AskOn { stream: most.stream, bytes: most.cached };
            }
            if error.available > 0 {
                let largest = error.available.min(requested - 1);
                return Self::AskForLess { largest, free, or_raise: raise.filter(within) };
            }
            if error.of_whole_handles {
                return Self::FreeWholeHandles { free, or_raise: raise.filter(within) };
            }
        }
        if let Some(refused) = refused.filter(|refused| refused.is_held_elsewhere()) {
            let (held, holder) = (refused.held_elsewhere(), refused.largest_holder());
            return Self::FreeElsewhere { place: &error.place, held, holder };
        }
        match (error.holders.first(), raise) {
            (Some(&holder), raise) if error.live == 0 || error.live >= missing => {
                Self::Free { holder, missing, or_raise: raise.filter(within) }
            }
            (_, Some(raise)) => Self::Raise { raise },
            (_, None) => Self::FreeElsewhere { place: &error.place, held: 0, holder: None },
        }
    }
}

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::BeyondPlace { place, capacity } => {
                write!(f, "ask for less at a time: {place} has {} in all", Bytes(capacity))
            }
            Self::RaiseLimit { raise } => write!(f, "{raise}, or ask for less at a time"),
            Self::FreeOrRaise { live, missing, raise } => {
                let (missing, live) = (Bytes(missing).rounded_up(), Bytes(live));
                write!(
                    f,
                    "free {missing} or more of the {live} that {} holds, or {raise}",
                    raise.budget
                )
            }
            Self::Synchronise { stream: Some(stream), bytes } => {
                let bytes = Bytes(bytes);
                write!(
                    f,
                    "synchronise stream {stream}, whose work still uses {bytes} of freed blocks"
                )
            }
            Self::Synchronise { stream: None, bytes } => {
                write!(
                    f,
                    "finish or synchronise the work that still uses {} of freed blocks",
                    Bytes(bytes)
                )
            }
            Self::AskOn { stream, bytes } => {
                write!(
                    f,
                    "ask on stream {stream}: its cache has {} free and keeps them to itself",
                    Bytes(bytes)
                )
            }
            Self::AskForLess { largest, free, or_raise } => {
                let (largest, free) = (Bytes(largest).rounded_down(), Bytes(free));
                write!(
                    f,
                    "ask for at most {largest} at a time: {free} are free, and lie apart between live blocks"
                )?;
                or_raise.map_or(Ok(()), |raise| write!(f, "; or {raise}"))
            }
            Self::FreeWholeHandles { free, or_raise } => {
                write!(
                    f,
                    "free blocks that lie together: {} are free, but no handle is free as a whole",
                    Bytes(free)
                )?;
                or_raise.map_or(Ok(()), |raise| write!(f, "; or {raise}"))
            }
            Self::Free { holder, missing, or_raise } => {
                let (bytes, tag) = (Bytes(holder.bytes), holder.tag);
                write!(f, "free {} or more", Bytes(missing).rounded_up())?;
                match holder.bytes >= missing {
                    true => write!(f, " of the {bytes} that \"{tag}\" holds")?,
                    false => write!(f, " (\"{tag}\" holds most, {bytes})")?,
                }
                match or_raise {
                    Some(raise) => write!(f, ", or {raise}"),
                    None => f.write_str(": nothing else is left there"),
                }
            }
            Self::Raise { raise } => write!(f, "{raise}"),
            Self::FreeElsewhere { place, held, holder } => {
                write!(f, "free memory that other programs hold on {place}")?;
                if held == 0 {
                    return Ok(());
                }
                f.write_str(": ")?;
                write_held(f, held, holder)
            }
        }
    }
}
