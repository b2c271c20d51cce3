//! Physical handles (`cuMemCreate`) and where they are mapped. A handle keeps its memory until it
//! is released and unmapped everywhere.

use crate::log::Subject;
use aquifer_core::Charge;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The memory behind a handle. Dropping the last reference ends it.
pub(crate) struct Physical {
    /// Its number in the record, in place of an address: it may be mapped at none or at several.
    pub(crate) number: u64,
    pub(crate) what: Subject,
    pub(crate) charge: Charge,
}

struct OpenHandle {
    /// Creations, retains and imports that no release has ended.
    references: u32,
    /// `None` if another process has exported it, which holds its memory.
    memory: Option<Arc<Physical>>,
}

/// A mapping: its length, its handle, and the memory.
struct Mapped {
    bytes: u64,
    memory: Option<Arc<Physical>>,
}

#[derive(Default)]
pub(crate) struct VirtualMemory {
    handles: HashMap<u64, OpenHandle>,
    mappings: BTreeMap<u64, Mapped>,
}

impl VirtualMemory {
    /// Adds a handle that was created, or imported (`None`), or one more reference to an open one.
    pub(crate) fn open(&mut self, handle: u64, memory: Option<Arc<Physical>>) {
        let open = self.handles.entry(handle).or_insert(OpenHandle { references: 0, memory: None });
        open.references += 1;
        if memory.is_some() {
            open.memory = memory;
        }
    }

    /// Ends a reference. Returns the memory if nothing else keeps it.
    pub(crate) fn release(&mut self, handle: u64) -> Option<Physical> {
        let open = self.handles.get_mut(&handle)?;
        open.references = open.references.saturating_sub(1);
        if open.references > 0 {
            return None;
        }
        self.handles.remove(&handle)?.memory.and_then(Arc::into_inner)
    }

    /// Adds a mapping.
    pub(crate) fn map(&mut self, address: u64, bytes: u64, handle: u64) {
        let memory = self.handles.get(&handle).and_then(|open| open.memory.clone());
        self.mappings.insert(address, Mapped { bytes, memory });
    }

    /// Returns the references that a handle to the memory at an address adds to.
    pub(crate) fn memory_at(&self, address: u64) -> Option<Arc<Physical>> {
        let (start, mapped) = self.mappings.range(..=address).next_back()?;
        if address - start < mapped.bytes { mapped.memory.clone() } else { None }
    }

    /// Removes the mappings of a range. Returns the memory that nothing else keeps.
    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Vec<Physical> {
        let end = address.saturating_add(bytes);
        let within: Vec<u64> = self.mappings.range(address..end).map(|(start, _)| *start).collect();
        let removed = within.iter().filter_map(|start| self.mappings.remove(start));
        removed.filter_map(|mapped| mapped.memory.and_then(Arc::into_inner)).collect()
    }
}
