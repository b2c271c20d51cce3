//! What the tables of uses need of a stream.

use super::Timeline;
use crate::use_table::{IdleTables, UseTable, UsedStream};
use std::sync::Mutex;

/// Tables of streams that no longer exist.
static SPARE_TABLES: Mutex<Vec<&'static UseTable<Timeline>>> = Mutex::new(Vec::new());

impl UsedStream for Timeline {
    #[inline]
    fn open(&self) -> u64 {
        Timeline::open(self)
    }

    #[inline]
    fn is_done(&self, epoch: u64) -> bool {
        Timeline::is_done(self, epoch)
    }

    #[inline]
    fn fences_at_once(&self) -> bool {
        Timeline::fences_at_once(self)
    }

    #[inline]
    fn idle_tables(&self) -> &IdleTables<Self> {
        &self.idle_tables
    }

    fn spare_tables() -> &'static Mutex<Vec<&'static UseTable<Self>>> {
        &SPARE_TABLES
    }
}
