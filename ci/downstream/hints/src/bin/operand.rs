//~ is not device memory
//~ foreign memory is taken in by `Adopted`
use aquifer::Operand;

fn range(memory: &impl Operand) {
    memory.range();
}

fn main() {
    range(&vec![0_u8; 8]);
}
