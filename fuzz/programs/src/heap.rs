//! Programs over one heap, checked against a naive model after every operation.
//!
//! The model and the invariants are those of the heap's property tests. Here bytes select the
//! operations, so that a coverage-guided fuzzer can search for unexpected sequences.

mod shadow;

use crate::program::{Bytes, MAX_OPS};
use shadow::{Op, Shadow};

/// Runs the program that `bytes` encodes. Panics if the heap violates an invariant.
pub(crate) fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let configs = Shadow::configs();
    let config = configs[usize::from(bytes.choice(configs.len() as u8))];
    let mut shadow = Shadow::new(config);
    shadow.apply(Op::Add {
        window: bytes.u8(),
        at: 0,
        units: u16::MAX,
        stamp: 0,
        segment: bytes.flag(),
    });
    bytes.steps(MAX_OPS, |bytes| shadow.apply(op(bytes)));
    shadow.finish();
}

fn op(bytes: &mut Bytes<'_>) -> Op {
    match bytes.choice(16) {
        0 => {
            let (window, at, units) = place(bytes);
            Op::Add { window, at, units, stamp: bytes.u16(), segment: bytes.flag() }
        }
        1 => {
            let (window, at, units) = place(bytes);
            Op::Remove { window, at, units }
        }
        2..=6 => Op::Alloc { units: bytes.small(), short: bytes.u8(), align: 0 },
        7 => Op::Alloc { units: bytes.small(), short: bytes.u8(), align: bytes.u8() },
        8 => {
            let (window, at, units) = place(bytes);
            Op::AllocAt { window, at, units }
        }
        9..=12 => Op::Free { which: bytes.u16(), stamp: bytes.u16(), by_note: bytes.flag() },
        13 => Op::FreeAnywhere { window: bytes.u8(), at: bytes.u16(), inside: bytes.u8() },
        14 => Op::FreeStale { which: bytes.u16() },
        _ => Op::Resize {
            which: bytes.u16(),
            units: bytes.small(),
            short: bytes.u8(),
            stamp: bytes.u16(),
        },
    }
}

fn place(bytes: &mut Bytes<'_>) -> (u8, u16, u16) {
    (bytes.u8(), bytes.u16(), bytes.small())
}
