//! Programs over one heap, checked against a naive model after every operation.

mod shadow;

use crate::program::{Bytes, MAX_OPS};
use shadow::Shadow;

/// Runs the program that `bytes` encodes. Panics if the heap violates an invariant.
pub(crate) fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let configs = Shadow::configs();
    let config = configs[usize::from(bytes.choice(configs.len() as u8))];
    let mut shadow = Shadow::new(config);
    let (window, segment) = (bytes.u8(), bytes.flag());
    shadow.add(shadow.range(window, 0, u16::MAX), 0, segment);
    bytes.steps(MAX_OPS, |bytes| shadow.step(bytes));
    shadow.finish();
}
