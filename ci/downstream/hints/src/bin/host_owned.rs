//~ cannot be owned by an asynchronous copy
//~ is copied by `Stream::try_scope`, which waits before it returns
use aquifer::{DeviceBuffer, Stream};

pub fn upload(stream: &Stream, device: &mut DeviceBuffer<u8>) {
    let _ = stream.upload(vec![0_u8; 8], device);
}

fn main() {}
