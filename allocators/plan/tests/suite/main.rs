//! Properties of plans.
#![expect(clippy::expect_used, reason = "a test that cannot go on fails, wherever it is")]

mod follow;
mod made;
mod order;
mod places;
mod traces;
