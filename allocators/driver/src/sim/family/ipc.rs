//! Memory sharing of the simulated machine. All users are in this process, since a simulated
//! machine exists only there.
//!
//! A file descriptor is real, so it can be duplicated and sent over a socket. It is a memory file
//! that contains the numbers of the machine and the memory, like the name on a fabric.
#![expect(unsafe_code, reason = "creates handles")]

use crate::{
    Call, DeviceId, ExportTypes, FabricHandle, Ipc, PhysicalHandle, Result,
    sim::{
        codes::{self, ErrorCode},
        machine::{Machine, error_of},
        machine_state::MachineState,
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
fn name(machine_id: u64, handle: u64) -> FabricHandle {
    let mut bytes = [0; 64];
    bytes[..16].copy_from_slice(MAGIC);
    bytes[16..24].copy_from_slice(&machine_id.to_le_bytes());
    bytes[24..32].copy_from_slice(&handle.to_le_bytes());
    FabricHandle(bytes)
}

/// Returns the object of a name on this machine.
fn parse_name(machine_id: u64, name: &FabricHandle) -> Result<u64, ErrorCode> {
    let (head, rest) = name.0.split_at(16);
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&rest[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    if head == MAGIC && number(0) == machine_id { Ok(number(8)) } else { Err(codes::INVALID_VALUE) }
}

impl MachineState {
    /// Refuses the export of memory that was not created for it.
    fn check_exportable(
        &self,
        handle: PhysicalHandle,
        export_type: ExportTypes,
    ) -> Result<(), ErrorCode> {
        self.handle(handle)?;
        let created_for = self.space.object(handle.handle()).map(|object| object.export_types);
        if created_for.is_some_and(|types| types.covers(export_type)) {
            Ok(())
        } else {
            Err(codes::INVALID_VALUE)
        }
    }
}

impl Machine {
    fn import(&self, device: DeviceId, name: &FabricHandle) -> Result<PhysicalHandle> {
        let call = Call::HandleImport;
        let mut state = self.enter(call, Some(device))?;
        state.virtual_memory(device).map_err(error_of(call))?;
        let handle = parse_name(self.machine_id, name).map_err(error_of(call))?;
        state.space.import(device, handle).map_err(error_of(call))?;
        self.cost(call, 0);
        // SAFETY: 1. The object has one more handle, which is this one.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}

// SAFETY: 1. Handles are stored under numbers that are not reused, with their bytes. 2. Errors are
// detected before anything changes.
unsafe impl Ipc for Machine {
    fn handle_create_exportable(
        &self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<PhysicalHandle> {
        let call = Call::HandleCreate;
        let mut state = self.enter(call, Some(device))?;
        if !state.device(device).map_err(error_of(call))?.info.export_types.covers(types) {
            return Err(error_of(call)(codes::NOT_SUPPORTED));
        }
        let handle = state.create(device, bytes, types).map_err(error_of(call))?;
        self.cost(call, bytes);
        // SAFETY: 1. The handle belongs to the memory that was just allocated.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        let call = Call::HandleExport;
        let state = self.enter(call, Some(handle.device()))?;
        state.check_exportable(handle, ExportTypes::POSIX_FD).map_err(error_of(call))?;
        self.cost(call, 0);
        let refused = error_of(call)(codes::OPERATING_SYSTEM);
        let file =
            memfd_create("aquifer-sim-export", MFdFlags::MFD_CLOEXEC).map_err(|_| refused)?;
        let file = File::from(file);
        file.write_all_at(&name(self.machine_id, handle.handle()).0, 0).map_err(|_| refused)?;
        Ok(file.into())
    }

    fn handle_export_fabric(&self, handle: PhysicalHandle) -> Result<FabricHandle> {
        let call = Call::HandleExport;
        let state = self.enter(call, Some(handle.device()))?;
        state.check_exportable(handle, ExportTypes::FABRIC).map_err(error_of(call))?;
        self.cost(call, 0);
        Ok(name(self.machine_id, handle.handle()))
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
