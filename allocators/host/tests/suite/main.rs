//! The tests of this crate that can share one process.

mod caps;
#[path = "../../../../tests/support/counting.rs"]
mod counting;
#[path = "../../../../tests/support/faults.rs"]
mod faults;
mod giving_way;
mod headroom;
mod heap;
mod machine;
mod placement;
mod poison;
mod pool;
mod region;
mod rig;
mod seccomp;
mod stager;
mod stager_faults;
mod stager_files;
mod support;
mod topology;
