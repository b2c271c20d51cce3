//~ is not device memory with elements of one type
//~ `DeviceBuffer::from_block` gives a `Block` a type
use aquifer::Typed;

pub fn elements(block: &aquifer::Block) -> usize {
    fn length(memory: &impl Typed) -> usize {
        memory.len()
    }
    length(block)
}

fn main() {}
