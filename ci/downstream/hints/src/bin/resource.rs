//~ is not a source of device memory
//~ memory of your own is a `SourcePool` over a `RangeSource`
use aquifer::Resource;

pub fn serve(_: impl Resource) {}

fn main() {
    serve(String::new());
}
