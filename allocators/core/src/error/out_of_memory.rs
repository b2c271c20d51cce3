//! Out of memory, explained.

use super::{DriverError, Remedy, json};
use crate::{
    Bytes, OutOfBudget,
    budget::{Holding, Raise},
};
use std::{error, fmt};

/// One step that was tried before giving up, and what it gave.
///
/// Its example is that of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tried {
    /// The step, as the allocation chain calls it.
    pub step: &'static str,
    /// Bytes it made usable for the request, though not enough.
    pub gave: u64,
}

/// Memory that a stream's cache holds.
///
/// Its example is that of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stranded {
    /// The stream's number in its pool.
    pub stream: u32,
    /// Free bytes in its cache.
    pub cached: u64,
    /// Bytes that wait for uses on other streams.
    pub pending: u64,
}

/// Freed memory that a stream's queued work still uses.
///
/// Its example is that of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InUse {
    /// The stream's number in its pool.
    pub stream: u32,
    /// Bytes of freed blocks. Those that several streams use count at each.
    pub bytes: u64,
}

/// What the live blocks of one tenant come to.
///
/// Its example is that of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantHolding {
    /// The name of its budget.
    pub name: &'static str,
    /// Bytes in live blocks, of every pool that charges this tenant.
    pub live: u64,
    /// Its limit, in bytes.
    pub limit: u64,
}

/// Out of memory, with everything needed to see why. Its text ends in one action a person can take,
/// [`Remedy`].
///
/// ```
/// use aquifer_core::{Budget, OutOfMemory};
/// let device = Budget::new("the device", 100);
/// let mut error = OutOfMemory::new("device 0".into(), 300);
/// error.refused = device.charge(300).err();
/// assert!(error.to_string().ends_with("raise the limit of the device to 300 B, or ask for less at a time"));
/// assert!(error.to_json().starts_with(r#"{"place":"device 0","requested":300,"refused":{"budget":"the device","#));
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// Where: `device 0`, `node 1`.
    pub place: String,
    /// Bytes asked for.
    pub requested: u64,
    /// The budget's refusal, if one stood in the way.
    pub refused: Option<OutOfBudget>,
    /// Whether `refused` limits live bytes, of a tenant or a tag: what the pool has free is no
    /// help then, and nothing of it was tried.
    pub of_live_bytes: bool,
    /// The driver's refusal, if one stood in the way.
    pub driver: Option<DriverError>,
    /// The limits that are too low, the one that refused first: with all of them raised the
    /// request would fit, as far as limits go. Empty where that is not known.
    pub raise: Vec<Raise>,
    /// Bytes of memory that the place has in all; 0 where that is not known.
    pub capacity: u64,
    /// Bytes in live blocks.
    pub live: u64,
    /// Free bytes in caches.
    pub cached: u64,
    /// Bytes that wait for uses on other streams.
    pub pending: u64,
    /// Bytes of `physical` held for graphs, live or free: nobody else is given them before the
    /// graphs are gone.
    pub graphs: u64,
    /// Bytes held from the driver or the kernel.
    pub physical: u64,
    /// The largest free range, in bytes.
    pub largest_free: u64,
    /// The most that a smaller request of the same kind could have now, in bytes; 0 where that is
    /// nothing or not known.
    pub available: u64,
    /// What each other stream's cache holds, largest first.
    pub stranded: Vec<Stranded>,
    /// Whose queued work uses freed bytes still, pending or cached, most first.
    pub in_use: Vec<InUse>,
    /// Which tags hold most, largest first, memory with addresses of its own included.
    pub holders: Vec<Holding>,
    /// Which tenants and limited tags hold most, largest first.
    pub tenants: Vec<TenantHolding>,
    /// The steps of the chain, in order.
    pub tried: Vec<Tried>,
}

impl OutOfMemory {
    /// An error with no figures but the request's; fill in what is known.
    #[must_use]
    pub fn new(place: String, requested: u64) -> Self {
        Self {
            place,
            requested,
            refused: None,
            of_live_bytes: false,
            driver: None,
            raise: Vec::new(),
            capacity: 0,
            live: 0,
            cached: 0,
            pending: 0,
            physical: 0,
            graphs: 0,
            largest_free: 0,
            available: 0,
            stranded: Vec::new(),
            in_use: Vec::new(),
            holders: Vec::new(),
            tenants: Vec::new(),
            tried: Vec::new(),
        }
    }

    /// Returns whether more was asked for than the place has in all.
    pub(super) fn is_beyond(&self) -> bool {
        self.capacity > 0 && self.requested > self.capacity
    }

    /// The one thing to do about it.
    #[must_use]
    pub fn remedy(&self) -> Remedy<'_> {
        Remedy::of(self)
    }

    /// All of it as one JSON object on one line: for logs that a program reads. Every field by its
    /// name, bytes as whole numbers, what there is none of as `null` or an empty list, all entries
    /// of a list where the text has the first few, and the [remedy](OutOfMemory::remedy)'s text
    /// under `do`.
    #[must_use]
    pub fn to_json(&self) -> String {
        json::of(self)
    }
}

/// Entries of a list that the text shows.
const SHOWN: usize = 3;

crate::__debug_as_display!(OutOfMemory);

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "out of memory on {}: {} requested", self.place, Bytes(self.requested))?;
        if let Some(refused) = &self.refused {
            let live = if self.of_live_bytes { " (of live bytes)" } else { "" };
            writeln!(f, "  refused by  {refused}{live}")?;
        }
        if let Some(driver) = &self.driver {
            writeln!(f, "  refused by  {driver}")?;
        }
        if self.is_beyond() {
            writeln!(f, "  refused by  {}, which has {} in all", self.place, Bytes(self.capacity))?;
        }
        writeln!(
            f,
            "  held        {} live, {} cached, {} pending, {} physical",
            Bytes(self.live),
            Bytes(self.cached),
            Bytes(self.pending),
            Bytes(self.physical)
        )?;
        if self.graphs > 0 {
            writeln!(f, "  graphs      {} held for them, live or free", Bytes(self.graphs))?;
        }
        writeln!(f, "  largest     {} free in one range", Bytes(self.largest_free))?;
        for holder in self.holders.iter().take(SHOWN) {
            let unit = if holder.blocks == 1 { "block" } else { "blocks" };
            let (bytes, blocks) = (Bytes(holder.bytes), holder.blocks);
            writeln!(f, "  holder      {bytes} in {blocks} {unit}: \"{}\"", holder.tag)?;
        }
        for tenant in self.tenants.iter().take(SHOWN) {
            let (live, limit) = (Bytes(tenant.live), Bytes(tenant.limit));
            writeln!(f, "  tenant      {live} of {limit}: \"{}\"", tenant.name)?;
        }
        for s in self.stranded.iter().take(SHOWN) {
            writeln!(
                f,
                "  stream {:<4} {} cached, {} pending",
                s.stream,
                Bytes(s.cached),
                Bytes(s.pending)
            )?;
        }
        for s in self.in_use.iter().take(SHOWN) {
            writeln!(f, "  stream {:<4} still uses {} of freed blocks", s.stream, Bytes(s.bytes))?;
        }
        if !self.tried.is_empty() {
            f.write_str("  tried       ")?;
            for (i, tried) in self.tried.iter().enumerate() {
                let comma = if i == 0 { "" } else { "; " };
                write!(f, "{comma}{}: {}", tried.step, Bytes(tried.gave))?;
            }
            writeln!(f)?;
        }
        write!(f, "  do          {}", self.remedy())
    }
}

impl error::Error for OutOfMemory {}
