//! Reads bytes as a program of a fuzz target.

use aquifer_core::random::SplitMix64;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Maximum operations of one program: those of a program of some 32,000 bytes.
pub const MAX_OPS: usize = 8_000;

/// A reader of numbers from bytes. Returns zeros after the end, so that every input is a program.
///
/// ```
/// use aquifer_programs::program::Bytes;
///
/// let mut bytes = Bytes::new(&[7, 1, 2, 9]);
/// assert_eq!(bytes.choice(5), 2);
/// assert_eq!(bytes.u16(), 0x0201);
/// assert_eq!(bytes.remaining(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct Bytes<'a> {
    rest: &'a [u8],
}

impl<'a> Bytes<'a> {
    /// Creates a reader at the start of `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Returns how many bytes are left.
    #[must_use]
    pub const fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Returns whether no bytes are left.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Runs `step` while bytes are left, at most `most` times. Returns the number of steps.
    pub fn steps(&mut self, most: usize, mut step: impl FnMut(&mut Self)) -> usize {
        for done in 0..most {
            if self.is_empty() {
                return done;
            }
            step(self);
        }
        most
    }

    /// Returns the next byte.
    pub fn u8(&mut self) -> u8 {
        match self.rest.split_first() {
            Some((&byte, rest)) => {
                self.rest = rest;
                byte
            }
            None => 0,
        }
    }

    /// Returns the next two bytes, little-endian.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    /// Returns the next four bytes, little-endian.
    pub fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    /// Returns the next eight bytes, little-endian.
    pub fn u64(&mut self) -> u64 {
        u64::from(self.u32()) | u64::from(self.u32()) << 32
    }

    /// Returns the low bit of the next byte.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// Returns a number below `of`, chosen by the next byte, or zero if `of` is zero.
    pub fn choice(&mut self, of: u8) -> u8 {
        self.u8().checked_rem(of).unwrap_or(0)
    }

    /// Returns a number below `of`, which is at most 255, chosen by the next byte.
    pub fn below(&mut self, of: usize) -> usize {
        usize::from(self.choice(of as u8))
    }

    /// Returns one of these, chosen by the next byte.
    pub fn pick<T: Copy, const COUNT: usize>(&mut self, of: [T; COUNT]) -> T {
        of[self.below(COUNT)]
    }

    /// Returns the index of one of `count` things, chosen by the next byte. Reads nothing if there
    /// are none.
    pub fn index(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| usize::from(self.u8()) % count)
    }

    /// Removes one of these, chosen by the next byte. Reads nothing if there are none.
    pub fn take<T>(&mut self, from: &mut Vec<T>) -> Option<T> {
        self.index(from.len()).map(|at| from.swap_remove(at))
    }

    /// Returns a 16-bit number that is small in most cases: the first byte selects how many bits of
    /// the next two are used.
    pub fn small(&mut self) -> u16 {
        let bits = u32::from(self.choice(17));
        let mask = (1u32 << bits) - 1;
        self.u16() & mask as u16
    }
}

/// How a program gets along with others of its process.
pub(crate) enum Process {
    /// It has nothing to do with them.
    Any,
    /// It does not run beside programs that are alone.
    Shared,
    /// It is alone.
    Alone,
}

/// A fuzz program: what it opens, its operations, what holds after each of them, and its end.
///
/// All of them panic where a promise is broken.
pub(crate) trait Program: Sized {
    const PROCESS: Process;
    /// The maximum number of operations.
    const MOST: usize = MAX_OPS;

    /// Opens what the operations work on, as the first bytes say. Returns `None` if this machine
    /// lacks it.
    fn open(bytes: &mut Bytes<'_>) -> Option<Self>;
    /// Performs one operation.
    fn step(&mut self, bytes: &mut Bytes<'_>);
    /// Checks what holds after every operation.
    fn check(&mut self);
    /// Gives everything back, and checks that nothing is left.
    fn finish(self);
}

/// Runs the program that `bytes` encodes.
pub(crate) fn run<P: Program>(bytes: &[u8]) {
    let _alone = matches!(P::PROCESS, Process::Alone).then(alone);
    let _shared = matches!(P::PROCESS, Process::Shared).then(not_beside_alone);
    let mut bytes = Bytes::new(bytes);
    if let Some(mut program) = P::open(&mut bytes) {
        steps(&mut program, &mut bytes);
        program.finish();
    }
}

/// Performs the operations of a program, and checks it after each.
pub(crate) fn steps<P: Program>(program: &mut P, bytes: &mut Bytes<'_>) {
    bytes.steps(P::MOST, |bytes| {
        program.step(bytes);
        program.check();
    });
}

/// Held for writing by programs that depend on state of the whole process, and for reading by those
/// that change some of it.
static PROCESS: RwLock<()> = RwLock::new(());

/// Locks the process for one program at a time. Stranded memory, closed pools that linger, driver
/// memory of graphs, and raw addresses (which machines without bytes share) are process-wide state.
pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
    PROCESS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps programs of [`alone`] from running beside this one: a pool that looks for memory also
/// releases what other pools of the process have left behind.
pub(crate) fn not_beside_alone() -> RwLockReadGuard<'static, ()> {
    PROCESS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the length of the program of `seed`: log-uniform over 40 to 32,000 bytes.
#[must_use]
pub fn length(seed: u64) -> usize {
    let word = u64::from_le_bytes(std::array::from_fn(|at| seeded(!seed, 8)[at]));
    let uniform = (word >> 11) as f64 / (1_u64 << 53) as f64;
    (40.0 * 800_f64.powf(uniform)) as usize
}

/// Returns `len` pseudo-random bytes, the same for the same `seed`.
#[must_use]
pub fn seeded(seed: u64, len: usize) -> Vec<u8> {
    let mut random = SplitMix64::new(seed);
    let words = std::iter::repeat_with(move || random.next_u64());
    words.flat_map(u64::to_le_bytes).take(len).collect()
}
