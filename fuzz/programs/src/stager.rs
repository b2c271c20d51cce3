//! Programs over a stager: transfers that borrow and that own, sources that fail, tickets that are
//! dropped, cancelled and never waited for, failing driver calls, work that runs late, and a device
//! that is lost.
//!
//! Workers are real threads and the GPU is simulated, so a program may run in several ways. The
//! invariants hold for all of them:
//!
//! - a successful transfer has moved every byte;
//! - a failed one reports it, returns what it owned, and does not affect others;
//! - no copy touches memory out of order: the oracle checks all copies, and every slot that is
//!   filled;
//! - at the end everything is freed.

use crate::{
    pinned::shared_host,
    program::{Bytes, Process, Program},
    rig::assert_silent,
};
use aquifer_core::Budget;
use aquifer_device::{DeviceBuffer, DevicePool, PoolConfig};
use aquifer_driver::{
    Access, Call, DeviceId, Operand, OperandMut,
    sim::{Sim, SimKernel},
};
use aquifer_host::{
    Failed, PinnedConfig, PinnedPool, Source, StageError, Stager, StagerConfig, Ticket,
    kernel::Kernel as System,
    pool,
    region::{Host, PageTier, retry_stranded},
    topology::Topology,
};
use aquifer_stream::Stream;
use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

/// Maximum number of tickets, and of operands.
const MOST: usize = 5;
const GPU: DeviceId = DeviceId(0);
const SLOT: usize = 16 << 10;
/// Maximum bytes of an operand.
const LARGEST: usize = 12 * SLOT;
/// Longer than any operation takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// Device memory and its expected contents, or `None` after a failed transfer.
struct Held {
    buffer: DeviceBuffer<u8>,
    bytes: Option<Vec<u8>>,
}

/// A transfer that owns both sides.
enum Flying {
    Up(Ticket<(Vec<u8>, DeviceBuffer<u8>)>),
    Down(Ticket<(DeviceBuffer<u8>, Vec<u8>)>, Option<Vec<u8>>),
}

pub(crate) struct Machine {
    sim: Sim,
    budget: Budget,
    pinned: PinnedPool,
    pool: DevicePool,
    stager: Stager,
    home: Stream,
    operands: Vec<Held>,
    flying: Vec<Flying>,
    next: u8,
    /// Whether a fault was ever planned. Handles that the driver would not destroy may then be
    /// left.
    faulty: bool,
    lost: bool,
    /// Tickets whose result is never taken. They are dropped last.
    forgotten: Vec<Flying>,
}

/// A source of a pattern that fails at one offset.
struct Odd {
    bytes: Vec<u8>,
    at: u64,
    accident: u8,
}

impl Source for Odd {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        if (offset..offset + into.len() as u64).contains(&self.at) {
            match self.accident {
                0 => return Err(io::ErrorKind::BrokenPipe.into()),
                1 => std::panic::resume_unwind(Box::new("on purpose")),
                2 => return Ok(0),
                _ => {}
            }
        }
        let some = into.len().min(5000);
        self.bytes[..].read_at(offset, &mut into[..some])
    }

    fn alignment(&self) -> usize {
        if self.accident == 3 { 512 } else { 1 }
    }
}

impl Program for Machine {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let settings = bytes.u8();
        let sim = Sim::h200(1).capacity(64 << 20);
        let sim = match settings & 3 {
            0 => sim.stepped(),
            1 => sim,
            _ => sim.seeded(bytes.u64()).paced(1 << (settings & 3)),
        };
        let driver = sim.driver();
        let host = Host::new(Topology::clone(&shared_host().topology), System::new())
            .with_driver(driver.clone(), GPU);
        let budget = Budget::new("fuzz", 8 << 20);
        let mut near = PinnedConfig::default();
        near.chunk = 2 << 20;
        near.pages = PageTier::Base;
        near.patience = Duration::ZERO;
        let pinned = PinnedPool::new(&host, &budget, near).ok()?;
        let pool = DevicePool::open(driver, GPU, PoolConfig::default()).ok()?;
        let mut config = StagerConfig::default();
        (config.up_workers, config.down_workers) =
            (1 + usize::from(settings >> 2 & 1), 1 + usize::from(settings >> 3 & 1));
        (config.slot, config.least_chunk) = (SLOT, 4096);
        (config.direct, config.down_direct) = (1024, 512);
        (config.alone, config.down_alone) = (4096, 3072);
        (config.slots, config.depth) = (1 + usize::from(settings >> 4 & 1), 2 * MOST);
        let stager = Stager::new(&host, &pinned, pool.streams(), config).ok()?;
        let home = pool.stream().ok()?;
        Some(Self {
            sim,
            budget,
            pinned,
            pool,
            stager,
            home,
            operands: Vec::new(),
            flying: Vec::new(),
            next: 1,
            faulty: false,
            lost: false,
            forgotten: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(20) {
            0..=2 => self.allocate(bytes),
            3 | 4 => self.borrow_up(bytes),
            5 | 6 => self.borrow_down(bytes),
            7 => self.read(bytes),
            8 => self.pieces(bytes),
            9 | 10 => self.own(bytes),
            11..=13 => self.wait(bytes),
            14 => self.part(bytes),
            15 => self.kernel(bytes),
            16 => self.plan_fault(bytes),
            17 => self.late(bytes),
            18 => drop(self.operand(bytes)),
            _ => self.slots(bytes),
        }
    }

    fn check(&mut self) {
        assert_silent(&self.sim);
    }

    fn finish(mut self) {
        self.sim.clear_failures();
        let mut rest = Bytes::new(&[]);
        while !self.flying.is_empty() {
            self.wait(&mut rest);
        }
        for x in std::mem::take(&mut self.operands) {
            let mut down = vec![0; x.buffer.range().bytes as usize];
            let outcome = self.stager.scope(|s| s.download(&x.buffer, &mut down).map(drop));
            let well = self.went_well(outcome.and_then(|taken| taken), false);
            assert!(well || self.lost, "all is well again, and a transfer failed");
            if well && let Some(expected) = x.bytes {
                assert!(down == expected, "bytes were lost");
            }
        }
        self.check();
        let Self { sim, budget, pinned, pool, stager, home, lost, forgotten, .. } = self;
        drop((stager, home, pool));
        sim.run_all();
        // Workers may still be returning slots. Per-thread counters agree once all threads are
        // idle.
        let quiet = Instant::now() + PATIENCE;
        while cfg!(debug_assertions) && !pinned.is_consistent() {
            assert!(Instant::now() < quiet, "the books of the pinned pool disagree");
            thread::yield_now();
        }
        drop((pinned, forgotten));
        // Memory that a lost device may still access is kept permanently.
        let deadline = Instant::now() + PATIENCE;
        loop {
            pool::sweep();
            let (stranded, left) = (retry_stranded(), sim.outstanding());
            if lost || (budget.used() == 0 && left.registrations == 0 && left.host_allocations == 0)
            {
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{} charged, {stranded} stranded, {left}",
                budget.used()
            );
            thread::yield_now();
        }
        assert_silent(&sim);
    }
}

impl Machine {
    /// Returns a size of at most several slots, small in most cases.
    fn size(bytes: &mut Bytes<'_>) -> usize {
        (usize::from(bytes.small()) << bytes.choice(4)).clamp(1, LARGEST)
    }

    fn pattern(&mut self, len: usize) -> Vec<u8> {
        self.next = self.next.wrapping_add(1);
        (0..len).map(|at| (at * 7 + at / 251) as u8 ^ self.next).collect()
    }

    fn allocate(&mut self, bytes: &mut Bytes<'_>) {
        let len = Self::size(bytes);
        if self.operands.len() + self.flying.len() < MOST
            && let Ok(buffer) = self.pool.buffer(&self.home, len)
        {
            self.operands.push(Held { buffer, bytes: None });
        }
    }

    /// Removes and returns an operand.
    fn operand(&mut self, bytes: &mut Bytes<'_>) -> Option<Held> {
        let which = usize::from(bytes.u8()).checked_rem(self.operands.len())?;
        Some(self.operands.swap_remove(which))
    }

    /// Returns whether a transfer succeeded. Panics on an error that the program has not caused.
    fn went_well(&self, outcome: Result<(), StageError>, cancelled: bool) -> bool {
        match outcome {
            Ok(()) => true,
            Err(StageError::Cancelled) => {
                assert!(cancelled, "nobody cancelled it");
                false
            }
            Err(error) if error.is_device_lost() => {
                assert!(self.lost, "the device is not lost");
                false
            }
            Err(error) => {
                assert!(matches!(error, StageError::Memory(_)), "{error}");
                assert!(self.faulty || self.lost, "{error}");
                false
            }
        }
    }

    fn borrow_up(&mut self, bytes: &mut Bytes<'_>) {
        let Some(mut x) = self.operand(bytes) else { return };
        let (up, cancels) = (self.pattern(x.buffer.range().bytes as usize), bytes.choice(4) == 0);
        let outcome = self.stager.scope(|s| {
            let staged = s.upload(&up, &mut x.buffer)?;
            if cancels {
                staged.cancel();
            }
            Ok(())
        });
        let well = self.went_well(outcome.and_then(|taken| taken), cancels);
        x.bytes = well.then_some(up);
        self.operands.push(x);
    }

    fn borrow_down(&mut self, bytes: &mut Bytes<'_>) {
        let Some(x) = self.operand(bytes) else { return };
        let mut down = vec![0; x.buffer.range().bytes as usize];
        let outcome = self.stager.scope(|s| s.download(&x.buffer, &mut down).map(drop));
        if self.went_well(outcome.and_then(|taken| taken), false)
            && let Some(expected) = &x.bytes
        {
            assert!(down == *expected, "bytes were lost on the way down");
        }
        self.operands.push(x);
    }

    fn read(&mut self, bytes: &mut Bytes<'_>) {
        let Some(mut x) = self.operand(bytes) else { return };
        let (len, skip) = (x.buffer.range().bytes as usize, usize::from(bytes.u16()) % 5000);
        let accident = bytes.choice(8);
        let source = Odd {
            bytes: self.pattern(len + skip),
            at: (skip + usize::from(bytes.u16()) % len) as u64,
            accident,
        };
        let outcome = self.stager.scope(|s| s.read(&source, skip as u64, &mut x.buffer).map(drop));
        let outcome = outcome.and_then(|taken| taken);
        let told = matches!(
            (&outcome, accident),
            (Err(StageError::Source { .. }), 0)
                | (Err(StageError::SourcePanicked { .. }), 1)
                | (Err(StageError::SourceEnded { .. }), 2)
        );
        assert!(outcome.is_err() || accident > 2, "nobody was told of the accident");
        let well = !told && self.went_well(outcome, false);
        x.bytes = well.then(|| source.bytes[skip..].to_vec());
        self.operands.push(x);
    }

    /// Transfers many pieces through few slots, in both directions, with two operands.
    fn pieces(&mut self, bytes: &mut Bytes<'_>) {
        let (Some(mut x), Some(y)) = (self.operand(bytes), self.operand(bytes)) else { return };
        let up = self.pattern(x.buffer.range().bytes as usize);
        let mut down = vec![0; y.buffer.range().bytes as usize];
        let piece = 1 + usize::from(bytes.u16()) % 3000;
        let outcome = self.stager.scope(|s| {
            s.gather(up.chunks(piece), &mut x.buffer)?;
            s.scatter(&y.buffer, down.chunks_mut(piece + 1)).map(drop)
        });
        let well = self.went_well(outcome.and_then(|taken| taken), false);
        if well && let Some(expected) = &y.bytes {
            assert!(down == *expected, "pieces were lost on the way down");
        }
        x.bytes = well.then_some(up);
        self.operands.extend([x, y]);
    }

    /// Begins a transfer that owns both sides.
    fn own(&mut self, bytes: &mut Bytes<'_>) {
        let Some(x) = self.operand(bytes) else { return };
        let len = x.buffer.range().bytes as usize;
        let Some(permit) = self.stager.try_permit() else {
            assert!(self.flying.len() + self.forgotten.len() > 0, "permits are lost");
            return self.operands.push(x);
        };
        if bytes.flag() {
            let up = self.pattern(len);
            match permit.upload(up, x.buffer) {
                Ok(ticket) => self.flying.push(Flying::Up(ticket)),
                Err(failed) => self.refused(failed, |(_, buffer)| buffer, None),
            }
        } else {
            match permit.download(x.buffer, vec![0; len]) {
                Ok(ticket) => self.flying.push(Flying::Down(ticket, x.bytes)),
                Err(failed) => self.refused(failed, |(buffer, _)| buffer, x.bytes),
            }
        }
    }

    fn refused<T>(
        &mut self,
        failed: Failed<T>,
        buffer: fn(T) -> DeviceBuffer<u8>,
        bytes: Option<Vec<u8>>,
    ) {
        let back = failed.back.map(buffer);
        assert!(!self.went_well(Err(failed.error), true) && back.is_some(), "it did not come back");
        self.operands.extend(back.map(|buffer| Held { buffer, bytes }));
    }

    /// Waits for a ticket, in one of the possible ways.
    fn wait(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = usize::from(bytes.u8()).checked_rem(self.flying.len()) else { return };
        let how = bytes.choice(6);
        match self.flying.swap_remove(which) {
            Flying::Up(ticket) => match waited(ticket, how) {
                Ok(Ok((up, buffer))) => self.operands.push(Held { buffer, bytes: Some(up) }),
                Ok(Err(failed)) => self.refused(failed, |(_, buffer)| buffer, None),
                Err(ticket) => self.flying.push(Flying::Up(ticket)),
            },
            Flying::Down(ticket, expected) => match waited(ticket, how) {
                Ok(Ok((buffer, down))) => {
                    assert!(
                        expected.as_ref().is_none_or(|expected| *expected == down),
                        "bytes were lost"
                    );
                    self.operands.push(Held { buffer, bytes: expected });
                }
                Ok(Err(failed)) => self.refused(failed, |(buffer, _)| buffer, expected),
                Err(ticket) => self.flying.push(Flying::Down(ticket, expected)),
            },
        }
    }

    /// Drops or detaches a ticket before its transfer ends, or keeps it without taking its result.
    fn part(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = usize::from(bytes.u8()).checked_rem(self.flying.len()) else { return };
        let flying = self.flying.swap_remove(which);
        match (bytes.choice(4), flying) {
            (0, flying) => self.forgotten.push(flying),
            (1, Flying::Up(ticket)) => ticket.detach(),
            (1, Flying::Down(ticket, _)) => ticket.detach(),
            (_, flying) => drop(flying),
        }
    }

    /// Runs a kernel on the home stream that writes an operand.
    fn kernel(&mut self, bytes: &mut Bytes<'_>) {
        let Some(mut x) = self.operand(bytes) else { return };
        let (byte, range) = (bytes.u8(), x.buffer.range());
        if x.buffer.order_mut(self.home.raw(), None, Access::Write).is_ok() {
            let fill = SimKernel::new("fill")
                .writes(range, None)
                .run(move |memory| memory.write(0).fill(byte));
            let filled = self.sim.launch(self.home.raw(), fill).is_ok();
            x.bytes = filled.then(|| vec![byte; range.bytes as usize]);
        }
        self.operands.push(x);
    }

    fn plan_fault(&mut self, bytes: &mut Bytes<'_>) {
        const CALLS: [Call; 13] = [
            Call::StreamCreate,
            Call::StreamWaitEvent,
            Call::StreamIsCapturing,
            Call::StreamSynchronize,
            Call::ExchangeCaptureMode,
            Call::DeviceSynchronize,
            Call::EventCreate,
            Call::EventRecord,
            Call::EventQuery,
            Call::EventSynchronize,
            Call::HostRegister,
            Call::CopyToDevice,
            Call::CopyToHost,
        ];
        let (which, nth) = (bytes.choice(16), 1 + u64::from(bytes.choice(12)));
        match CALLS.get(usize::from(which)) {
            Some(&call) if nth % 5 == 0 => self.sim.fail_every(call, nth, 999),
            Some(&call) => self.sim.fail(call, nth, 999),
            None => return self.sim.clear_failures(),
        }
        self.faulty = true;
    }

    /// Runs pending work, or loses the device.
    fn late(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(24) {
            0 => {
                self.sim.lose_device(GPU);
                self.lost = true;
            }
            1..=3 => self.sim.run_all(),
            steps => {
                for _ in 0..steps {
                    self.sim.step(self.home.raw());
                }
            }
        }
    }

    fn slots(&mut self, bytes: &mut Bytes<'_>) {
        if bytes.flag() {
            let warmed = self.stager.warm();
            assert!(warmed.is_ok() || self.faulty || self.lost, "{warmed:?}");
        } else {
            let given = self.stager.trim();
            assert_eq!(given % SLOT as u64, 0);
        }
    }
}

/// Waits in one of the possible ways. Returns the ticket if its transfer is not complete.
fn waited<T>(mut ticket: Ticket<T>, how: u8) -> Result<Result<T, Failed<T>>, Ticket<T>> {
    match how {
        1 => ticket.try_wait(),
        2 => ticket.wait_until(Instant::now() + Duration::from_micros(50)),
        3 => match Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(outcome) => Ok(outcome),
            Poll::Pending => Err(ticket),
        },
        4 => {
            ticket.cancel();
            Err(ticket)
        }
        _ => {
            let begun = Instant::now();
            let ended = ticket.wait_until(begun + PATIENCE);
            assert!(ended.is_ok(), "a transfer hangs");
            ended
        }
    }
}
