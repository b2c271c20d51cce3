//! What readers see of a ledger.

/// The figures of a ledger, read one after another while members change them. All are in bytes
/// unless noted.
///
/// See the example of [`Ledger`](crate::Ledger).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LedgerFigures {
    /// The name of the ledger.
    pub name: String,
    /// The capacity of the memory.
    pub capacity: u64,
    /// What processes that are no members use, as last measured.
    pub unaccounted: u64,
    /// The live members.
    pub members: Vec<MemberFigures>,
}

/// The figures of a live member. All are in bytes unless noted.
///
/// See the example of [`Ledger`](crate::Ledger).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MemberFigures {
    /// The process, as it has named itself.
    pub process: u32,
    /// Its command.
    pub command: String,
    /// What it has claimed.
    pub claimed: u64,
    /// Its guarantee.
    pub guarantee: u64,
    /// Whether the guarantee is kept for it while it does not use it.
    pub is_reserved: bool,
    /// Its limit.
    pub limit: u64,
    /// Its priority (a number).
    pub priority: i32,
    /// What it could give back soon, as it has last estimated.
    pub reclaimable: u64,
    /// What it waits for, or 0.
    pub wanted: u64,
}

impl LedgerFigures {
    /// Returns the sum of the members' claims.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        self.members.iter().fold(0, |sum, member| sum.saturating_add(member.claimed))
    }

    /// Returns the bytes that no process has claimed or is known to use.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.unaccounted).saturating_sub(self.claimed())
    }
}
