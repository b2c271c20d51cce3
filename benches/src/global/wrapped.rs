//! An allocator, and this library over it.

use super::plan::{Around, Plan};
use crate::lap::Contender;
use aquifer_global::{Counted, Global, Tracked, Uncounted};
use std::alloc::{GlobalAlloc, System};

/// What a contender allocates from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Layer {
    /// The allocator itself.
    Bare,
    /// This library over it, without counting.
    Uncounted,
    /// The same with the account of the process.
    Counted,
    /// The same with the tag of each block.
    Tracked,
}

/// An allocator of any type, and this library over it in each of its configurations.
pub(super) trait Wrapped {
    /// Returns a contender that works through a plan with one of them.
    fn contender<'a>(&'static self, plan: &'a Plan, layer: Layer, around: Around) -> Contender<'a>;
}

/// This library over an allocator, in each of its configurations.
pub(super) struct Ours<A: 'static> {
    pub(super) bare: A,
    pub(super) uncounted: Global<A, Uncounted>,
    pub(super) counted: Global<A, Counted>,
    pub(super) tracked: Global<A, Tracked>,
}

pub(super) static OVER_SYSTEM: Ours<System> = Ours {
    bare: System,
    uncounted: Global::over(System),
    counted: Global::over(System),
    tracked: Global::over(System),
};

impl<A: GlobalAlloc + Sync> Wrapped for Ours<A> {
    fn contender<'a>(&'static self, plan: &'a Plan, layer: Layer, around: Around) -> Contender<'a> {
        match layer {
            Layer::Bare => plan.contender(&self.bare, around),
            Layer::Uncounted => plan.contender(&self.uncounted, around),
            Layer::Counted => plan.contender(&self.counted, around),
            Layer::Tracked => plan.contender(&self.tracked, around),
        }
    }
}
