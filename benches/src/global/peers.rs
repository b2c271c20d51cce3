//! The peers that the feature `peers` builds: two allocators to wrap, and crates that count.

use super::{
    plan::{Around, Plan},
    tracking::{TRACKING, track},
    wrapped::Ours,
};
use crate::lap::Contender;
use aquifer_global::Global;
use cap::Cap;
use mimalloc::MiMalloc;
use stats_alloc::StatsAlloc;
use std::alloc::System;
use tikv_jemallocator::Jemalloc;

pub(super) static OVER_MIMALLOC: Ours<MiMalloc> = Ours {
    bare: MiMalloc,
    uncounted: Global::over(MiMalloc),
    counted: Global::over(MiMalloc),
    tracked: Global::over(MiMalloc),
};
pub(super) static OVER_JEMALLOC: Ours<Jemalloc> = Ours {
    bare: Jemalloc,
    uncounted: Global::over(Jemalloc),
    counted: Global::over(Jemalloc),
    tracked: Global::over(Jemalloc),
};

static STATS_ALLOC: StatsAlloc<System> = StatsAlloc::system();
static CAP: Cap<System> = Cap::new(System, usize::MAX);

/// Returns the contenders of `stats_alloc`, `cap` and `tracking-allocator`, in this order.
pub(super) fn similar(plan: &Plan) -> Vec<Contender<'_>> {
    track();
    vec![
        plan.contender(&STATS_ALLOC, Around::Nothing),
        plan.contender(&CAP, Around::Nothing),
        plan.contender(&TRACKING, Around::Group),
    ]
}
