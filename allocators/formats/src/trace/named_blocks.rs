//! The lives of named blocks, and which rows are impossible, for a trace and for a history.

use super::error::{Fault, Name};
use std::collections::HashMap;

/// The last block of each name. Names of completed blocks are kept, so that a second free is
/// distinguished from a free of an unknown block.
#[derive(Debug, Default)]
pub(crate) struct NamedBlocks {
    names: HashMap<u64, NamedBlock>,
}

#[derive(Debug)]
struct NamedBlock {
    block: u32,
    bytes: u64,
    /// The row of its allocation.
    allocated: u64,
    state: LifeState,
}

/// How far a life is, with the row of the free.
#[derive(Clone, Copy, Debug)]
enum LifeState {
    Live,
    Freed(u64),
    Completed(u64),
}

impl NamedBlocks {
    /// Returns the last block of a name.
    pub(crate) fn block(&self, id: Name) -> Option<u32> {
        self.names.get(&key(id)).map(|life| life.block)
    }

    /// Refuses the allocation of a block whose name is in use.
    pub(crate) fn check_new(&self, id: Name) -> Result<(), Fault> {
        match self.names.get(&key(id)).map(|life| (life.state, life.allocated)) {
            Some((LifeState::Live, first)) => Err(Fault::TwiceAllocated { id, first }),
            Some((LifeState::Freed(freed), _)) => Err(Fault::StillInUse { id, freed }),
            Some((LifeState::Completed(_), _)) | None => Ok(()),
        }
    }

    /// Records an allocation, which was [checked](Self::check_new).
    pub(crate) fn allocate(&mut self, id: Name, block: u32, bytes: u64, row: u64) {
        debug_assert!(self.check_new(id).is_ok(), "{id:?} is in use");
        self.names
            .insert(key(id), NamedBlock { block, bytes, allocated: row, state: LifeState::Live });
    }

    /// Records a free, and returns its block.
    pub(crate) fn free(&mut self, id: Name, bytes: u64, row: u64) -> Result<u32, Fault> {
        let life = self.life(id, "freed")?;
        if let LifeState::Freed(first) | LifeState::Completed(first) = life.state {
            return Err(Fault::TwiceFreed { id, first });
        }
        life.check_size(id, bytes)?;
        life.state = LifeState::Freed(row);
        Ok(life.block)
    }

    /// Records the completion of a free, and returns its block.
    pub(crate) fn complete(&mut self, id: Name, bytes: u64) -> Result<u32, Fault> {
        let life = self.life(id, "completed")?;
        let freed = match life.state {
            LifeState::Live => return Err(Fault::CompleteBeforeFree { id }),
            LifeState::Completed(_) => return Err(Fault::TwiceCompleted { id }),
            LifeState::Freed(row) => row,
        };
        life.check_size(id, bytes)?;
        life.state = LifeState::Completed(freed);
        Ok(life.block)
    }

    fn life(&mut self, id: Name, done: &'static str) -> Result<&mut NamedBlock, Fault> {
        self.names.get_mut(&key(id)).ok_or(Fault::Unknown { id, done })
    }
}

impl NamedBlock {
    fn check_size(&self, id: Name, now: u64) -> Result<(), Fault> {
        let allocated = (self.bytes, self.allocated);
        if self.bytes == now { Ok(()) } else { Err(Fault::SizeChanged { id, allocated, now }) }
    }
}

/// Ids and pointers never occur in the same trace.
fn key(id: Name) -> u64 {
    match id {
        Name::Id(id) | Name::Pointer(id) => id,
    }
}

/// Converts a row number for a step or a column. Saturates.
pub(crate) fn short(row: u64) -> u32 {
    u32::try_from(row).unwrap_or(u32::MAX)
}
