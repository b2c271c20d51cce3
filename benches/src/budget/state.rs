//! The state of the benchmark.

use crate::{lap::Pace, sheet::Sheet};

/// The state of a benchmark.
pub(super) struct BudgetBench {
    pub(super) pace: Pace,
    pub(super) sheet: Sheet,
}
