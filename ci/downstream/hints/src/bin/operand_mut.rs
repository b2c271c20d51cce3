//~ is not device memory that may be written
//~ a `DeviceSlice` can only be read
use aquifer::{DeviceSlice, MemoryError, Stream};

pub fn fill(stream: &Stream, mut slice: DeviceSlice<'_, u8>) -> Result<(), MemoryError> {
    stream.fill(&mut slice, 0_u8)
}

fn main() {}
