//! The registration of a hook or a reclaimer.

use super::node::{Budget, Node};

/// A registered hook or reclaimer, removed when this is dropped. Another thread may still be
/// running it at that time.
///
/// See the example of [`Budget::on_need`](super::Budget::on_need).
#[must_use = "a registration that is dropped at once removes what it has registered"]
pub struct HookRegistration {
    pub(super) budget: Budget,
    pub(super) number: u64,
    pub(super) is_level_hook: bool,
}

impl std::fmt::Debug for HookRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("budget", &self.budget.name()).finish_non_exhaustive()
    }
}

impl HookRegistration {
    /// Returns whether this is the reclaimer with this number at `node`.
    pub(super) fn is(&self, node: &Node, number: u64) -> bool {
        !self.is_level_hook && self.number == number && std::ptr::eq(self.budget.node, node)
    }
}

impl Drop for HookRegistration {
    fn drop(&mut self) {
        let node = self.budget.node;
        if self.is_level_hook {
            node.level_hooks.remove(self.number);
        } else {
            node.reclaimers.remove(self.number);
        }
    }
}
