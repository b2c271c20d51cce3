//! `aquifer bench`: measures the cost of calls, together with their peers in the same run.
//!
//! | module | contents |
//! |---|---|
//! | `arena` | arenas |
//! | `budget` | budgets |
//! | `device` | device memory |
//! | `global` | the overhead of the global allocator over those it wraps |
//! | `pinned` | pinned memory |
//! | `placement` | choosing a device |
//! | `stage` | staging |
//! | `lap` | timing |
//! | `row` | a result and that of its peer |
//! | `sheet` | the results so far, and which rows are selected |
//! | `host` | the machine and the date |
//! | `report` | the page, and JSON |
//!
//! An absolute time depends on the machine, its clock and its other load. Contenders therefore take
//! turns, lap by lap, within one run. The ratio of their times is what is comparable across
//! machines.

pub(crate) mod arena;
pub(crate) mod budget;
pub(crate) mod device;
pub(crate) mod global;
pub(crate) mod host;
mod lap;
pub(crate) mod pinned;
pub(crate) mod placement;
mod report;
pub(crate) mod row;
mod sheet;
pub(crate) mod stage;
