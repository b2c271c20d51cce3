//! The driver trait.

use crate::{
    CallCounts, Driver, Observer,
    sim::{Sim, machine::Machine},
};
use std::sync::{Arc, atomic::Ordering};

impl Sim {
    /// Returns the driver of this machine.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.machine) as Arc<dyn Driver>
    }
}

// SAFETY: 1. All families share one state.
#[expect(unsafe_code, reason = "implements a trusted trait; holds no unsafe block")]
unsafe impl Driver for Machine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn calls(&self) -> &CallCounts {
        &self.calls
    }

    fn observer(&self) -> Option<&dyn Observer> {
        if self.oracle_on.load(Ordering::Relaxed) { Some(self) } else { None }
    }

    fn machine(&self) -> u64 {
        self.machine_id + 1
    }

    fn simulator(self: Arc<Self>) -> Option<Sim> {
        Some(Sim { machine: self })
    }
}
