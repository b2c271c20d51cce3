//! An out-of-memory error as text: its figures, and the recommended action.

use super::OutOfMemory;
use crate::Bytes;
use std::fmt;

/// Entries of each list that the text shows.
const MAX_SHOWN: usize = 3;

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
        if self.exceeds_capacity() {
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
        for holder in self.holders.iter().take(MAX_SHOWN) {
            let unit = if holder.blocks == 1 { "block" } else { "blocks" };
            let (bytes, blocks) = (Bytes(holder.bytes), holder.blocks);
            writeln!(f, "  holder      {bytes} in {blocks} {unit}: \"{}\"", holder.tag)?;
        }
        for tenant in self.tenants.iter().take(MAX_SHOWN) {
            let (live, limit) = (Bytes(tenant.live), Bytes(tenant.limit));
            writeln!(f, "  tenant      {live} of {limit}: \"{}\"", tenant.name)?;
        }
        for s in self.stranded.iter().take(MAX_SHOWN) {
            writeln!(
                f,
                "  stream {:<4} {} cached, {} pending",
                s.stream,
                Bytes(s.cached),
                Bytes(s.pending)
            )?;
        }
        for s in self.in_use.iter().take(MAX_SHOWN) {
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
