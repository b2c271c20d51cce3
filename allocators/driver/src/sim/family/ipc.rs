//! Memory sharing of the simulated machine, within a process and between processes of one user.
//!
//! A file descriptor is real, so it can be duplicated and sent over a socket. It is a memory file
//! that contains the numbers of the machine and the memory, and where another process finds the
//! bytes.
//!
//! A simulated machine exists in one process. In another one, imported bytes are the same, but take
//! nothing of a device, and the oracle orders only the accesses of each process. They can be
//! imported while the process that has created them lives, and are mapped beyond its end.
#![expect(unsafe_code, reason = "creates handles")]

use crate::{
    Call, DeviceId, ExportTypes, Ipc, PhysicalHandle, Result,
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

/// The first word of a name, to detect other files.
const MAGIC: &str = "aquifer-sim-name";

/// More bytes than a name has.
const NAME_BYTES: usize = 160;

/// What a name says of an object, as words.
#[derive(Clone, Copy, Debug)]
struct ObjectName {
    machine_id: u64,
    handle: u64,
    bytes: u64,
    /// The descriptor is zero if no other process can have the bytes.
    place: ExtentName,
}

impl ObjectName {
    fn encode(&self) -> String {
        let Self { machine_id, handle, bytes, place } = self;
        let ExtentName { process, descriptor, offset } = place;
        format!("{MAGIC} {machine_id} {handle} {bytes} {process} {descriptor} {offset}")
    }

    fn decode(name: &str) -> Option<Self> {
        let mut words = name.strip_prefix(MAGIC)?.split_ascii_whitespace();
        let mut next = || words.next()?.parse::<u64>().ok();
        let (machine_id, handle, bytes) = (next()?, next()?, next()?);
        let (process, descriptor) = (next()?.try_into().ok()?, next()?.try_into().ok()?);
        let place = ExtentName { process, descriptor, offset: next()? };
        Some(Self { machine_id, handle, bytes, place })
    }
}

impl MachineState {
    /// Returns the name of memory that was created for the export.
    fn export(&mut self, machine_id: u64, handle: PhysicalHandle) -> Result<String, ErrorCode> {
        self.handle(handle)?;
        let handle = handle.handle();
        let created_for = self.space.object(handle).map(|object| object.export_types);
        if created_for.is_none_or(|types| !types.covers(ExportTypes::POSIX_FD)) {
            return Err(codes::INVALID_VALUE);
        }
        let nowhere = ExtentName { process: std::process::id(), descriptor: 0, offset: 0 };
        let (bytes, place) = self.space.name(handle).unwrap_or((0, nowhere));
        Ok(ObjectName { machine_id, handle, bytes, place }.encode())
    }

    fn import(&mut self, machine_id: u64, device: DeviceId, name: &str) -> Result<u64, ErrorCode> {
        self.virtual_memory(device)?;
        let name = ObjectName::decode(name).ok_or(codes::INVALID_VALUE)?;
        let is_own_process = name.place.process == std::process::id();
        if is_own_process && name.machine_id == machine_id {
            self.space.import(device, name.handle)?;
            return Ok(name.handle);
        }
        if is_own_process || name.place.descriptor == 0 {
            return Err(codes::INVALID_VALUE);
        }
        self.space.import_from_elsewhere(device, name.bytes, &name.place)
    }
}

// SAFETY: 1. Handles are stored under numbers that are not reused, with their bytes. 2. Errors are
// detected before anything changes.
unsafe impl Ipc for Machine {
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
        let name = state.export(self.machine_id, handle);
        let name = name.map_err(error_of(call))?;
        let refused = error_of(call)(codes::OPERATING_SYSTEM);
        let file =
            memfd_create("aquifer-sim-export", MFdFlags::MFD_CLOEXEC).map_err(|_| refused)?;
        let file = File::from(file);
        file.write_all_at(name.as_bytes(), 0).map_err(|_| refused)?;
        Ok(file.into())
    }

    unsafe fn handle_import(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<PhysicalHandle> {
        let mut name = [0; NAME_BYTES];
        let read = fd.try_clone_to_owned().and_then(|fd| File::from(fd).read_at(&mut name, 0));
        // A file without a valid name is refused.
        let name = str::from_utf8(&name[..read.unwrap_or(0)]).unwrap_or_default();
        let call = Call::HandleImport;
        let mut state = self.enter(call, Some(device))?;
        let handle = state.import(self.machine_id, device, name).map_err(error_of(call))?;
        // SAFETY: 1. The object has one more handle, which is this one.
        Ok(unsafe { PhysicalHandle::from_raw(device, handle) })
    }
}
