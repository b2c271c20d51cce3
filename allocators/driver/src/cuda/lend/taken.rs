//! cudarc's memory in our hands.
#![expect(unsafe_code, reason = "makes the promises of foreign memory")]

use super::{code_error, device_of, keep_alive, name};
use crate::{DeviceRange, Foreign, KeepAlive, RawStream};
use aquifer_core::Result;
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};

// SAFETY: 1. the slice owns its allocation, which ends when it is dropped. 2. cudarc makes the
// stream that it hands an address to wait for the slice's reads and writes elsewhere, where it
// keeps account of them; a context that keeps none has one stream, or its owner has promised the
// order. 3. cudarc frees on the slice's stream; and with the address it records the slice's events
// there, which its other streams wait for.
unsafe impl<T: 'static> Foreign for CudaSlice<T> {
    type Item = T;

    fn range(&self) -> DeviceRange {
        // Of the slice's own stream, so that there is nothing to wait for.
        let (address, _done) = self.device_ptr(self.stream());
        DeviceRange { device: device_of(self.stream()), address, bytes: self.num_bytes() as u64 }
    }

    fn stream(&self) -> (RawStream, Option<KeepAlive>) {
        (name(self.stream()), Some(keep_alive(self.stream())))
    }

    fn enter(&mut self) -> Result<()> {
        touch(self)
    }

    fn leave(&mut self) -> Result<()> {
        touch(self)
    }
}

/// Makes the slice's stream wait for what it has been used for elsewhere, and records there that it
/// has been written.
fn touch<T>(slice: &mut CudaSlice<T>) -> Result<()> {
    let stream = CudaSlice::stream(slice).clone();
    drop(slice.device_ptr_mut(&stream));
    // cudarc has no room for an error there, and leaves it in the context.
    stream.context().check_err().map_err(|e| code_error(&e, device_of(&stream)))
}
