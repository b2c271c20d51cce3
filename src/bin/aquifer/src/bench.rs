//! `aquifer bench`: what calls cost here, beside their peers, in one run.
//!
//! | module | holds |
//! |---|---|
//! | `arena` | what is measured of arenas |
//! | `budget` | what is measured of budgets |
//! | `device` | what is measured of device memory |
//! | `global` | what the global allocator adds to those it wraps |
//! | `pinned` | what is measured of pinned memory |
//! | `placement` | what picking a device costs |
//! | `stage` | what is measured of staging |
//! | `lap` | how time is taken |
//! | `row` | one figure and its peer's |
//! | `sheet` | what has been found so far, and which rows are wanted |
//! | `host` | what the figures were taken on, and when |
//! | `report` | the page, and JSON |
//!
//! A figure alone says little: the machine, its clock and its neighbours are in it. So what is
//! compared takes turns, lap by lap, within one run, and the ratio is what can be carried
//! elsewhere.

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
