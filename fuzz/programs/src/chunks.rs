//! Programs over registered device memory: parts on several streams, work, prepared uses, limits,
//! failing calls, and a transport that refuses, with chunks of either kind.
//!
//! Invariants after every operation: parts lie apart and within chunks that are registered, chunks
//! do not move, and each is registered once. The oracle reports nothing. At the end nothing is
//! registered, and the device has everything back.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, Process, Program},
    rig::{IDLE, Open, Rig, assert_apart, simulated},
};
use aquifer_core::{Budget, MemoryError, Opaque};
use aquifer_device::{
    AddressRegistration, Block, PoolConfig, RegisteredDevicePool, Registrar, Request,
};
use aquifer_driver::{Access, Call, DeviceRange, ExportTypes, Operand};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

const FAULTS: [Call; 10] = [
    Call::MemAlloc,
    Call::MemFree,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::HandleCreate,
    Call::HandleRelease,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
];

/// A transport: what is registered by address, whether it refuses, and how it exports chunks.
#[derive(Clone, Debug)]
struct Transport(Arc<Mutex<(BTreeMap<u64, DeviceRange>, bool)>>, ExportTypes);

impl Transport {
    fn lock(&self) -> MutexGuard<'_, (BTreeMap<u64, DeviceRange>, bool)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registrar for Transport {
    type Handle = u64;
    fn register(&self, memory: &AddressRegistration) -> Result<u64, i32> {
        let (mut state, range) = (self.lock(), memory.range());
        if state.1 {
            return Err(7);
        }
        assert_eq!(state.0.insert(range.address, range), None, "registered twice");
        Ok(range.address)
    }
    fn export(&self) -> ExportTypes {
        self.1
    }
    fn unregister(&self, _: &AddressRegistration, handle: &u64) -> Result<(), i32> {
        let mut state = self.lock();
        if state.1 {
            return Err(7);
        }
        state.0.remove(handle).map(drop).ok_or(1)
    }
}

pub(crate) struct World {
    rig: Rig,
    transport: Transport,
    pool: RegisteredDevicePool<Transport>,
    blocks: Vec<(usize, Block)>,
}

impl Program for World {
    const PROCESS: Process = Process::Shared;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let sim = simulated(bytes.flag()).symbolic().seeded(bytes.u64());
        let mut config = PoolConfig::with_budget(Budget::new("the fuzzed device", 32 << 20));
        config.wait = Duration::from_micros(300);
        let rig = Rig::open(sim, config, 3);
        let size = bytes.u8();
        let export = if size & 1 == 0 { ExportTypes::NONE } else { ExportTypes::POSIX_FD };
        let transport = Transport(Arc::default(), export);
        let pool = RegisteredDevicePool::new(&rig.pool, u64::from(size) << 16, transport.clone())
            .expect(IDLE);
        Some(Self { rig, transport, pool, blocks: Vec::new() })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        match bytes.choice(12) {
            0..=2 => {
                let size = 1 + u64::from(bytes.u32()) % (1 << (4 + bytes.choice(20)));
                let got = self.pool.allocate(&self.rig.streams[stream], Request::bytes(size));
                match got {
                    Ok(block) => self.blocks.push((stream, block)),
                    Err(MemoryError::Registration { code: 7, .. }) => {
                        assert!(self.transport.lock().1, "the transport has not refused");
                    }
                    Err(MemoryError::Driver(_) | MemoryError::OutOfMemory(_)) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
            3 | 4 => drop(bytes.take(&mut self.blocks)),
            5..=7 => {
                let Some(at) = bytes.index(self.blocks.len()) else { return };
                let (own, block) = &self.blocks[at];
                let stream = &self.rig.streams[if bytes.flag() { *own } else { stream }];
                let Ok(used) = block.prepare(stream, Access::Write) else { return };
                let open = Open::of(used, block, stream, Access::Write);
                if bytes.flag() {
                    let _ = open.work(&self.rig.sim);
                } else {
                    self.rig.open.push(open);
                }
            }
            8 => self.rig.end_one(bytes),
            9 => self.rig.fail_one(bytes, FAULTS),
            10 => self.transport.lock().1 = bytes.flag(),
            _ if bytes.flag() => self.rig.go_on(bytes),
            _ => _ = self.pool.trim(0),
        }
    }

    fn check(&mut self) {
        self.rig.check(None, None);
        let ranges: Vec<_> = self.blocks.iter().map(|(_, block)| block.range()).collect();
        let registered = self.transport.lock().0.clone();
        for part in &ranges {
            let around = registered.range(..=part.address).next_back().map(|(_, chunk)| *chunk);
            let chunk = around.expect("a part of no chunk");
            assert!(part.address + part.bytes <= chunk.address + chunk.bytes, "{part:?}");
        }
        let chunks = self.pool.chunks();
        assert!(chunks.iter().all(|chunk| registered.get(&chunk.address) == Some(chunk)));
        assert_apart(ranges);
    }

    fn finish(mut self) {
        self.rig.sim.clear_failures();
        self.transport.lock().1 = false;
        self.rig.work_all();
        self.blocks.clear();
        self.rig.streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
        self.pool.trim(0).expect(IDLE);
        assert!(self.transport.lock().0.is_empty(), "a registration is left");
        drop(self.pool);
        self.rig.finish();
    }
}
