//~ cannot be owned by a transfer
//~ hand in a vector or a boxed slice by value, or borrow a slice in `Stager::try_scope`
use aquifer::{DeviceBuffer, Stager};

pub fn upload(stager: &Stager, host: &'static [u8], device: DeviceBuffer<u8>) {
    let _ = stager.upload(host, device);
}

fn main() {}
