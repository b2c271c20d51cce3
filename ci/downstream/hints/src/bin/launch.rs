//~ a launch cannot keep account of
//~ pass a `Block` or a `DeviceBuffer`
use aquifer::stream::TrackUses;

pub fn track(_: &impl TrackUses) {}

fn main() {
    track(&String::new());
}
