//! Properties of plans.

mod follow;
mod made;
mod order;
mod places;
mod traces;
