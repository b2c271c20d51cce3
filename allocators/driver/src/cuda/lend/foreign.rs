//! cudarc's slices as foreign memory.
#![expect(unsafe_code, reason = "implements an unsafe trait for cudarc's slices")]

use super::{
    keep_alive, memory_error,
    stream::{device_of, raw_handle},
};
use crate::{DeviceRange, Foreign, KeepAlive, RawStream};
use aquifer_core::Result;
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};

// SAFETY: 1. The slice owns its allocation, which ends when the slice is dropped. 2. cudarc makes
// the stream that it passes an address for wait for the slice's reads and writes elsewhere, if the
// context tracks them. A context that does not track them has one stream, or its owner has promised
// the order. 3. cudarc frees on the slice's stream. With the address it also records the slice's
// events there, and its other streams wait for those events.
unsafe impl<T: 'static> Foreign for CudaSlice<T> {
    type Item = T;

    fn range(&self) -> DeviceRange {
        // On the slice's own stream, so that nothing has to wait.
        let (address, _done) = self.device_ptr(self.stream());
        DeviceRange { device: device_of(self.stream()), address, bytes: self.num_bytes() as u64 }
    }

    fn stream(&self) -> (RawStream, Option<KeepAlive>) {
        (raw_handle(self.stream()), Some(keep_alive(self.stream())))
    }

    fn enter(&mut self) -> Result<()> {
        order_and_record_write(self)
    }

    fn leave(&mut self) -> Result<()> {
        order_and_record_write(self)
    }
}

/// Makes the slice's stream wait for the slice's uses elsewhere, and records a write on it.
fn order_and_record_write<T>(slice: &mut CudaSlice<T>) -> Result<()> {
    let stream = CudaSlice::stream(slice).clone();
    drop(slice.device_ptr_mut(&stream));
    // cudarc cannot return an error there and stores it in the context.
    stream.context().check_err().map_err(|e| memory_error(&e, device_of(&stream)))
}
