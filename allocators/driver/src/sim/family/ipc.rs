//! Memory sharing of the simulated machine, within a process and between processes of one user.
//!
//! A file descriptor is real, so it can be duplicated and sent over a socket. It is a memory file
//! that contains the numbers of the machine and the memory, like the name on a fabric, and where
//! another process finds the bytes.
//!
//! A simulated machine exists in one process. In another one, imported bytes are the same, but take
//! nothing of a device, and the oracle orders only the accesses of each process. They can be
//! imported while the process that has created them lives, and are mapped beyond its end.
#![expect(unsafe_code, reason = "creates handles")]

use crate::{
    Call, DeviceId, ExportTypes, FabricHandle, Ipc, PhysicalHandle, Result,
    sim::{
        codes::{self, ErrorCode},
        machine::{Machine, error_of},
        machine_state::MachineState,
        store::ExtentName,
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

/// What a name says of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct ObjectName {
    process: u32,
    machine_id: u64,
    handle: u64,
    bytes: u64,
    /// Of the store's file, or zero if no other process can have the bytes.
    descriptor: u32,
    offset: u64,
}

impl ObjectName {
    fn encode(&self) -> FabricHandle {
        let mut bytes = [0; 64];
        bytes[..16].copy_from_slice(MAGIC);
        let processes = u64::from(self.process) << 32 | u64::from(self.descriptor);
        let words = [self.machine_id, self.handle, processes, self.bytes, self.offset];
        for (place, word) in bytes[16..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        FabricHandle(bytes)
    }

    fn decode(name: &FabricHandle) -> Option<Self> {
        let mut words = [0; 5];
        for (word, place) in words.iter_mut().zip(name.0[16..].chunks_exact(8)) {
            *word = place.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        }
        let [machine_id, handle, processes, bytes, offset] = words;
        let (process, descriptor) = ((processes >> 32) as u32, processes as u32);
        (name.0[..16] == *MAGIC).then_some(Self {
            process,
            machine_id,
            handle,
            bytes,
            descriptor,
            offset,
        })
    }
}

impl MachineState {
    /// Returns the name of memory that was created for the export.
    fn export(
        &mut self,
        machine_id: u64,
        handle: PhysicalHandle,
        export_type: ExportTypes,
    ) -> Result<FabricHandle, ErrorCode> {
        self.handle(handle)?;
        let handle = handle.handle();
        let created_for = self.space.object(handle).map(|object| object.export_types);
        if created_for.is_none_or(|types| !types.covers(export_type)) {
            return Err(codes::INVALID_VALUE);
        }
        let process = std::process::id();
        let (bytes, descriptor, offset) = match self.space.name(handle) {
            Some((bytes, name)) => (bytes, name.descriptor, name.offset),
            None => (0, 0, 0),
        };
        Ok(ObjectName { process, machine_id, handle, bytes, descriptor, offset }.encode())
    }

    fn import(
        &mut self,
        machine_id: u64,
        device: DeviceId,
        name: &FabricHandle,
    ) -> Result<u64, ErrorCode> {
        self.virtual_memory(device)?;
        let name = ObjectName::decode(name).ok_or(codes::INVALID_VALUE)?;
        if name.process == std::process::id() && name.machine_id == machine_id {
            self.space.import(device, name.handle)?;
            return Ok(name.handle);
        }
        if name.process == std::process::id() || name.descriptor == 0 {
            return Err(codes::INVALID_VALUE);
        }
        let ObjectName { process, bytes, descriptor, offset, .. } = name;
        let place = ExtentName { process, descriptor, offset };
        self.space.import_from_elsewhere(device, bytes, &place)
    }
}

impl Machine {
    fn import(&self, device: DeviceId, name: &FabricHandle) -> Result<PhysicalHandle> {
        let call = Call::HandleImport;
        let mut state = self.enter(call, Some(device))?;
        let handle = state.import(self.machine_id, device, name).map_err(error_of(call))?;
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
        // SAFETY: 1. The handle belongs to the memory that was just allocated.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }

    fn is_legacy_ipc_capable(&self, device: DeviceId, address: u64) -> Result<bool> {
        let call = Call::PointerAttribute;
        let state = self.enter(call, Some(device))?;
        let capable = state.space.is_plain_allocation(device, address);
        capable.ok_or_else(|| error_of(call)(codes::INVALID_VALUE))
    }

    /// Refused: no other driver could map simulated memory.
    fn dma_buf_export(&self, device: DeviceId, _address: u64, _bytes: u64) -> Result<OwnedFd> {
        let call = Call::DmaBufExport;
        drop(self.enter(call, Some(device))?);
        Err(error_of(call)(codes::NOT_SUPPORTED))
    }

    fn handle_export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        let call = Call::HandleExport;
        let mut state = self.enter(call, Some(handle.device()))?;
        let name = state.export(self.machine_id, handle, ExportTypes::POSIX_FD);
        let name = name.map_err(error_of(call))?;
        let refused = error_of(call)(codes::OPERATING_SYSTEM);
        let file =
            memfd_create("aquifer-sim-export", MFdFlags::MFD_CLOEXEC).map_err(|_| refused)?;
        let file = File::from(file);
        file.write_all_at(&name.0, 0).map_err(|_| refused)?;
        Ok(file.into())
    }

    fn handle_export_fabric(&self, handle: PhysicalHandle) -> Result<FabricHandle> {
        let call = Call::HandleExport;
        let mut state = self.enter(call, Some(handle.device()))?;
        let name = state.export(self.machine_id, handle, ExportTypes::FABRIC);
        let name = name.map_err(error_of(call))?;
        Ok(name)
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
