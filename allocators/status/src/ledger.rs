//! Bytes of one memory, shared by the processes of a machine.
//!
//! The processes map one small file for each GPU, and one for pinned memory. Each writes what it
//! has claimed into its own slot, and claims before it takes. There is no server, no semaphore and
//! no process number that is trusted.
//!
//! | module | holds |
//! |---|---|
//! | `layout` | the layout of the file |
//! | `protocol` | how a claim is decided without a lock |
//! | `system` | the mapped file, locks on its parts, which end with their process, waits and wake-ups across processes, and the clock of wishes |
//! | `forks` | descriptors that a forked child does not keep |
//! | `error` | [`LedgerError`], [`ClaimRefused`], [`Holder`] |
//! | `file` | the files: folder, names, creation, checks |
//! | `memory` | [`LedgerMemory`]: the names of ledgers |
//! | `open` | [`Ledger`]: an open file, its live slots and dead ones, and [`LedgerFigures`] |
//! | `steps` | what tests and fuzz programs do inside a claim |
//! | `member` | [`Member`]: the share of a process, its claims and wishes |
//! | `budget` | [`SharedBudget`]: a budget that claims, and the thread that answers others |
//!
//! # Invariants
//! 1. **The live claims never exceed the capacity.** See `protocol`.
//! 2. **A dead process has no claim.** A slot counts as long as its byte range is locked by an open
//!    file description. The kernel releases the lock when the process dies. Before a claim is
//!    refused, the slots of dead members are left out, and cleared if no process is joining.
//! 3. **No wait and no system call happens under a lock** of the process or of the file, except
//!    the calls that check and clear slots under the right to join.
//! 4. **A failed call has changed nothing.**
//! 5. **A stopped process delays the claims of others by no more than 100 ms**, wherever it stops.
//!    What it has claimed stays claimed, and the refusal of a claim names the process that holds
//!    most. While it has the right to join, others cannot join, and the error names it.
//!
//! # Guarantees are lent
//! A guarantee is not set aside while its member does not use it: others may claim it, and give it
//! back on the member's need. To set it aside would leave the memory idle that sharing is for. A
//! claim within the guarantee comes before all others, and what others hold above their own
//! guarantees is what they are asked for. They give back what their reclaimers can release; memory
//! in use stays. A member that cannot take this risk [reserves](Share::reserve) its guarantee.
//!
//! # Waiting
//! A member that waits writes a wish into its slot. Until the wish is served or withdrawn, bytes
//! that are released are kept for it: a claim of a lower rank is granted only beside the wish.
//! Claims within a guarantee come first, then higher priorities, then earlier wishes. So a wish is
//! passed by at most
//!
//! - one claim per member that was being decided when the wish was written,
//! - claims of a higher rank: earlier wishes, higher priorities, and claims within guarantees,
//!   which together never exceed the capacity.
//!
//! A wish that is not renewed for 100 ms no longer counts. A member whose threads do not run for so
//! long can be passed.
//!
//! # What is trusted
//! Members are processes of one user. Noise in a slot is repaired by its owner when it claims,
//! releases or [answers](Member::refresh). A process of the user that shortens the file kills the
//! members by a signal, as with any mapped file.

mod budget;
mod error;
mod file;
mod forks;
mod layout;
mod member;
mod memory;
mod open;
mod protocol;
#[cfg(any(test, feature = "steps"))]
#[doc(hidden)]
pub mod steps;
mod system;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use budget::SharedBudget;
pub use error::{ClaimRefused, Holder, LedgerError};
pub use file::{VARIABLE, folder_of_environment};
pub use member::{Member, Share};
pub use memory::LedgerMemory;
pub use open::{Ledger, LedgerFigures, MemberFigures};
