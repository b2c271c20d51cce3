//! Memory sharing of the simulated machine. All users are in this process, since a simulated
//! machine exists only there.
//!
//! A file descriptor is real, so it can be duplicated and sent over a socket. It is a memory file
//! that contains the numbers of the machine and the memory, like the name on a fabric.
#![expect(unsafe_code, reason = "makes handles")]

use crate::{
    Call, DeviceId, ExportTypes, FabricHandle, Ipc, PhysicalHandle, Result,
    sim::{
        codes,
        shared::{Shared, at},
        state::{Refused, State},
    },
};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    fs::File,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
};

/// The first bytes of a name, to detect other files.
const MAGIC: &[u8; 16] = b"aquifer-sim-name";

/// Returns the name of an object of a machine.
fn name(machine: u64, handle: u64) -> FabricHandle {
    let mut bytes = [0; 64];
    bytes[..16].copy_from_slice(MAGIC);
    bytes[16..24].copy_from_slice(&machine.to_le_bytes());
    bytes[24..32].copy_from_slice(&handle.to_le_bytes());
    FabricHandle(bytes)
}

/// Returns the object of a name on this machine.
fn named(machine: u64, name: &FabricHandle) -> Result<u64, Refused> {
    let (head, rest) = name.0.split_at(16);
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&rest[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    if head == MAGIC && number(0) == machine { Ok(number(8)) } else { Err(codes::INVALID_VALUE) }
}

impl State {
    /// Refuses the export of memory that was not created for it.
    fn exportable(&self, handle: PhysicalHandle, way: ExportTypes) -> Result<(), Refused> {
        self.handle(handle)?;
        let made_for = self.space.object(handle.handle()).map(|object| object.types);
        if made_for.is_some_and(|types| types.covers(way)) {
            Ok(())
        } else {
            Err(codes::INVALID_VALUE)
        }
    }
}

impl Shared {
    fn import(&self, device: DeviceId, name: &FabricHandle) -> Result<PhysicalHandle> {
        let call = Call::HandleImport;
        let mut state = self.enter(call, Some(device))?;
        state.virtual_memory(device).map_err(at(call))?;
        let handle = named(self.machine, name).map_err(at(call))?;
        state.space.import(device, handle).map_err(at(call))?;
        self.cost(call, 0);
        // SAFETY: 1. The object has one more handle, which is this one.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}

// SAFETY: 1. Handles are stored under numbers that are not reused, with their bytes. 2. Errors are
// detected before anything changes.
unsafe impl Ipc for Shared {
    fn handle_create_exportable(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle> {
        let call = Call::HandleCreate;
        let mut state = self.enter(call, Some(device))?;
        if !state.device(device).map_err(at(call))?.info.export_types.covers(types) {
            return Err(at(call)(codes::NOT_SUPPORTED));
        }
        let handle = state.create(device, bytes, types).map_err(at(call))?;
        self.cost(call, bytes);
        // SAFETY: 1. The handle belongs to the memory that was just allocated.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        let call = Call::HandleExport;
        let state = self.enter(call, Some(handle.device()))?;
        state.exportable(handle, ExportTypes::POSIX_FD).map_err(at(call))?;
        self.cost(call, 0);
        let refused = at(call)(codes::OPERATING_SYSTEM);
        let file =
            memfd_create("aquifer-sim-export", MFdFlags::MFD_CLOEXEC).map_err(|_| refused)?;
        let file = File::from(file);
        file.write_all_at(&name(self.machine, handle.handle()).0, 0).map_err(|_| refused)?;
        Ok(file.into())
    }

    fn handle_export_fabric(&self, handle: PhysicalHandle) -> Result<FabricHandle> {
        let call = Call::HandleExport;
        let state = self.enter(call, Some(handle.device()))?;
        state.exportable(handle, ExportTypes::FABRIC).map_err(at(call))?;
        self.cost(call, 0);
        Ok(name(self.machine, handle.handle()))
    }

    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle> {
        let mut name = FabricHandle([0; 64]);
        let read =
            fd.try_clone_to_owned().and_then(|fd| File::from(fd).read_exact_at(&mut name.0, 0));
        // A file without a valid name is refused.
        if read.is_err() {
            name.0 = [0; 64];
        }
        self.import(device, &name)
    }

    unsafe fn handle_import_fabric(
        &self,
        device: DeviceId,
        name: &FabricHandle,
    ) -> Result<PhysicalHandle> {
        self.import(device, name)
    }
}
