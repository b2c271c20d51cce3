//~ cannot hold a freed block back until a device is done with it
//~ memory of other allocators is copied by `Stream::try_scope`
use aquifer::{DeviceBuffer, Stream, vec::Vec};

pub fn upload(stream: &Stream, host: Vec<u8>, device: &mut DeviceBuffer<u8>) {
    let _ = stream.upload(host, device);
}

fn main() {}
