use crate::{
    Direction, FixedMemory, FixedRange, MemoryPlace, Nixl, NixlAgent, NixlError, RegisteredPool,
    RemoteRange,
    simulated::{nixl, world},
};
use aquifer_core::{Budget, random::SplitMix64};
use aquifer_device::{DevicePool, PoolConfig, Request};
use aquifer_driver::{DeviceId, sim::Sim};
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use std::{error::Error, path::Path, sync::Arc, time::Duration};

type Tested = Result<(), Box<dyn Error>>;

const MIB: u64 = 1 << 20;

fn agent(name: &str) -> Result<NixlAgent, NixlError> {
    let agent = NixlAgent::new(&nixl(), name)?;
    agent.add_backend("UCX", &[("num_threads", "1")])?;
    Ok(agent)
}

fn pinned() -> Result<PinnedPool, Box<dyn Error>> {
    let host = Host::new(Topology::read()?, Kernel::new());
    Ok(PinnedPool::new(&host, &Budget::new("pinned", 64 * MIB), PinnedConfig::default())?)
}

fn registered(name: &str) -> usize {
    world(|world| world.registered.get(name).map_or(0, Vec::len))
}

/// Two agents whose pools have some bytes, and all that one does with the other's.
fn exchange(pinned: &PinnedPool) -> Tested {
    let (client, server) = (agent("client")?, agent("server")?);
    let (ours, theirs) =
        (RegisteredPool::new(&client, pinned, MIB)?, RegisteredPool::new(&server, pinned, MIB)?);
    let (read, written) = (ours.allocate(1001)?, ours.allocate(24)?);
    let (source, target) = (theirs.allocate(1001)?, theirs.allocate(24)?);
    let content: Vec<u8> = (0..1001u32).map(|n| (n * 7 % 251) as u8).collect();
    source.copy_from(0, &content)?;
    written.copy_from(0, b"what the client has sent")?;
    let peer = client.add_peer(&server.metadata()?)?;
    assert_eq!(peer.name(), "server");
    let location = RemoteRange::from_bytes(source.part().location().to_bytes())?;
    let parts = [read.part().clone()];
    client
        .transfer(Direction::Read, &peer, &parts, &[location], None)?
        .wait(Duration::from_secs(1))?;
    let mut found = vec![0; 1001];
    read.copy_to(0, &mut found)?;
    assert_eq!(found, content);
    let (parts, target_at) = ([written.part().clone()], [target.part().location()]);
    let sent =
        client.transfer(Direction::Write, &peer, &parts, &target_at, Some(b"it is there"))?;
    assert!(sent.is_done()?);
    let messages = server.messages()?;
    assert_eq!(messages.len(), 1);
    assert_eq!((&*messages[0].peer, &*messages[0].message), ("client", &b"it is there"[..]));
    let mut found = [0; 24];
    target.copy_to(0, &mut found)?;
    assert_eq!(&found, b"what the client has sent");
    client.remove_peer(&peer)?;
    Ok(())
}

#[test]
fn agents_read_and_write_each_others_memory_and_nothing_is_left() -> Tested {
    let pinned = pinned()?;
    exchange(&pinned)?;
    assert_eq!(pinned.stats().memory.live, 0);
    assert_eq!(world(|world| world.live), 0, "a value of NIXL's is left");
    Ok(())
}

#[test]
fn a_failed_call_leaves_nothing_behind() -> Tested {
    let pinned = pinned()?;
    exchange(&pinned)?;
    let mut calls = world(|world| std::mem::take(&mut world.calls));
    calls.sort_unstable();
    calls.dedup();
    // Ends are the subject of other tests.
    calls.retain(|call| {
        !["destroy", "deregister", "release"].iter().any(|end| call.starts_with(end))
    });
    assert!(calls.len() > 20, "{calls:?}");
    for call in calls {
        world(|world| world.fails = Some(call));
        let refused = exchange(&pinned);
        world(|world| world.fails = None);
        let refused = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains(call), "{call}: {refused}");
        assert_eq!(world(|world| world.live), 0, "{call}");
        assert_eq!(pinned.stats().memory.live, 0, "{call}");
    }
    Ok(())
}

/// Memory that notes whether it was registered when it was dropped.
struct Watched {
    bytes: Box<[u8]>,
}

#[expect(unsafe_code, reason = "promises that memory stays in place")]
// SAFETY: 1. the box is the value's, and no reference to its bytes exists.
unsafe impl FixedMemory for Watched {
    fn fixed_range(&self) -> FixedRange {
        let (address, bytes) = (self.bytes.as_ptr() as u64, self.bytes.len() as u64);
        FixedRange { place: MemoryPlace::Host, address, bytes }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        assert_eq!(registered("watching"), 0, "the memory is freed while it is registered");
    }
}

fn watched(bytes: usize) -> Arc<Watched> {
    Arc::new(Watched { bytes: vec![7; bytes].into() })
}

#[test]
fn a_registration_ends_before_its_memory_is_freed() -> Tested {
    let agent = agent("watching")?;
    let registration = agent.register(watched(100))?;
    assert_eq!(registered("watching"), 1);
    let part = registration.part(10, 20)?;
    drop(registration);
    assert_eq!(registered("watching"), 1, "a part keeps the registration");
    drop(part);
    assert_eq!(registered("watching"), 0);
    Ok(())
}

#[test]
fn memory_whose_registration_does_not_end_is_kept_as_long_as_the_agent() -> Tested {
    let agent = agent("keeping")?;
    let registration = agent.register(watched(100))?;
    let memory = watched(50);
    let second = agent.register(memory.clone())?;
    world(|world| world.fails = Some("deregister_mem"));
    drop(second);
    world(|world| world.fails = None);
    assert_eq!(Arc::strong_count(&memory), 2, "the agent keeps it");
    drop((registration, agent));
    assert_eq!(Arc::strong_count(&memory), 1);
    assert_eq!(world(|world| world.live), 0);
    Ok(())
}

#[test]
fn a_transfer_that_cannot_be_aborted_keeps_its_memory_until_it_is_over() -> Tested {
    let pinned = pinned()?;
    let (client, server) = (agent("client")?, agent("server")?);
    let (ours, theirs) =
        (RegisteredPool::new(&client, &pinned, MIB)?, RegisteredPool::new(&server, &pinned, MIB)?);
    let (block, other, there) =
        (ours.allocate(MIB / 2)?, ours.allocate(512)?, theirs.allocate(MIB / 2)?);
    let peer = client.add_peer(&server.metadata()?)?;
    world(|world| world.is_slow = true);
    let parts = [block.part().clone()];
    let slow = client.transfer(Direction::Read, &peer, &parts, &[there.part().location()], None)?;
    let late = slow.wait(Duration::from_millis(2));
    assert!(matches!(late, Err(NixlError::Late { .. })), "{late:?}");
    let free = ours.free_bytes();
    drop((parts, block));
    assert_eq!(ours.free_bytes(), free, "the transfer may still write to the block");
    // What is over ends with the next transfer.
    world(|world| world.is_slow = false);
    let range = RemoteRange(FixedRange { bytes: 512, ..there.part().range() });
    client.transfer(Direction::Read, &peer, &[other.part().clone()], &[range], None)?;
    assert_eq!(ours.free_bytes(), free + MIB / 2);
    world(|world| (world.is_slow, world.aborts) = (true, true));
    drop(client.transfer(Direction::Read, &peer, &[other.part().clone()], &[range], None)?);
    drop(other);
    assert_eq!(ours.free_bytes(), MIB, "an aborted transfer keeps nothing");
    drop((ours, theirs, there, peer, client, server));
    assert_eq!(world(|world| world.live), 0);
    assert_eq!(pinned.stats().memory.live, 0);
    Ok(())
}

#[test]
fn a_transfer_that_is_over_is_freed_by_a_poll_for_messages_and_by_the_drop_of_its_agent() -> Tested
{
    let pinned = pinned()?;
    for polls in [true, false] {
        let (client, server) = (agent("client")?, agent("server")?);
        let (ours, theirs) = (
            RegisteredPool::new(&client, &pinned, MIB)?,
            RegisteredPool::new(&server, &pinned, MIB)?,
        );
        let (block, there) = (ours.allocate(MIB)?, theirs.allocate(MIB)?);
        let peer = client.add_peer(&server.metadata()?)?;
        world(|world| world.is_slow = true);
        let (parts, range) = ([block.part().clone()], [there.part().location()]);
        drop(client.transfer(Direction::Read, &peer, &parts, &range, None)?);
        drop((parts, block));
        assert_eq!(client.messages()?.len(), 0);
        assert_eq!(ours.free_bytes(), 0, "the transfer may still write to the block");
        world(|world| world.is_slow = false);
        if polls {
            assert_eq!(client.messages()?.len(), 0);
            assert_eq!(ours.free_bytes(), MIB);
        }
        drop((ours, theirs, there, peer, client, server));
        assert_eq!(world(|world| world.live), 0);
        assert_eq!(pinned.stats().memory.live, 0);
    }
    Ok(())
}

#[test]
fn a_registered_stable_block_stays_where_it_is_after_its_free() -> Tested {
    let sim = Sim::h200(1);
    let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    let stream = pool.stream()?;
    let block = pool.alloc_stable(&stream, Request::bytes(3 * MIB))?;
    let agent = agent("device")?;
    let registration = agent.register(Arc::new(block.register()))?;
    assert_eq!(registration.range().place, MemoryPlace::Device(0));
    assert_eq!(registration.range().address, block.address());
    drop(block);
    pool.trim(0)?;
    assert_eq!(pool.stats().physical, 4 * MIB);
    drop(registration);
    pool.trim(0)?;
    assert_eq!(pool.stats().physical, 0);
    assert!(sim.violations().is_empty());
    Ok(())
}

#[test]
fn a_pool_is_one_registration_and_freed_ranges_join() -> Tested {
    let pinned = pinned()?;
    let agent = agent("pool")?;
    let pool = RegisteredPool::new(&agent, &pinned, 3 * MIB - 5)?;
    assert_eq!((registered("pool"), pool.registration().range().bytes), (1, 3 * MIB));
    let blocks = [100, MIB, 1, MIB].map(|bytes| pool.allocate(bytes));
    let blocks: Vec<_> = blocks.into_iter().collect::<Result<_, _>>()?;
    for (at, block) in blocks.iter().enumerate() {
        assert!(block.part().range().address.is_multiple_of(256));
        block.copy_from(0, &vec![at as u8; block.bytes() as usize])?;
    }
    for (at, block) in blocks.iter().enumerate() {
        let mut found = vec![0; block.bytes() as usize];
        block.copy_to(0, &mut found)?;
        assert!(found.iter().all(|byte| *byte == at as u8), "blocks do not overlap");
    }
    let full = pool.allocate(2 * MIB);
    assert!(matches!(full, Err(NixlError::PoolFull { .. })), "{full:?}");
    drop(blocks);
    assert_eq!((pool.free_bytes(), registered("pool")), (3 * MIB, 1));
    let whole = pool.allocate(3 * MIB)?;
    drop((pool, agent));
    whole.copy_from(3 * MIB - 1, &[1])?;
    assert_eq!(registered("pool"), 1, "a block keeps its pool");
    drop(whole);
    assert_eq!((registered("pool"), pinned.stats().memory.live), (0, 0));
    Ok(())
}

#[test]
fn random_programs_find_their_bytes_and_leave_one_free_range() -> Tested {
    let pinned = pinned()?;
    let agent = agent("random")?;
    for seed in 0..20 {
        let pool = RegisteredPool::new(&agent, &pinned, MIB)?;
        let (mut random, mut live) = (SplitMix64::new(seed), Vec::new());
        for step in 0..400u32 {
            if live.is_empty() || random.next_u64() % 5 < 3 {
                let bytes = 1 + random.next_u64() % (1 << (random.next_u64() % 18));
                match pool.allocate(bytes) {
                    Ok(block) => {
                        block.copy_from(0, &vec![step as u8; bytes as usize])?;
                        live.push((block, step as u8));
                    }
                    Err(NixlError::PoolFull { free, .. }) => assert_eq!(free, pool.free_bytes()),
                    Err(other) => return Err(other.into()),
                }
            } else {
                let at = random.next_u64() as usize % live.len();
                let (block, byte) = live.swap_remove(at);
                let mut found = vec![0; block.bytes() as usize];
                block.copy_to(0, &mut found)?;
                assert!(found.iter().all(|other| *other == byte), "seed {seed}, step {step}");
            }
        }
        drop(live);
        assert_eq!(pool.allocate(MIB)?.bytes(), MIB, "seed {seed}");
    }
    Ok(())
}

#[test]
fn copies_from_and_to_any_offset_are_exact() -> Tested {
    let pinned = pinned()?;
    let pool = RegisteredPool::new(&agent("copies")?, &pinned, MIB)?;
    let block = pool.allocate(64)?;
    let content: Vec<u8> = (0..64).collect();
    for offset in 0..24 {
        for bytes in 0..24 {
            block.copy_from(0, &[0; 64])?;
            block.copy_from(offset, &content[..bytes])?;
            let (mut all, mut found) = ([0; 64], vec![0; bytes]);
            block.copy_to(offset, &mut found)?;
            assert_eq!(found, content[..bytes]);
            block.copy_to(0, &mut all)?;
            let outside = all
                .iter()
                .enumerate()
                .filter(|(at, _)| !(offset as usize..offset as usize + bytes).contains(at));
            assert!(outside.map(|(_, byte)| byte).all(|byte| *byte == 0));
        }
    }
    for (offset, bytes) in [(64, 1), (60, 5), (u64::MAX, 2)] {
        let refused = block.copy_from(offset, &content[..bytes]);
        assert!(matches!(refused, Err(NixlError::OutOfBounds { .. })), "{refused:?}");
        let refused = block.copy_to(offset, &mut vec![0; bytes]);
        assert!(matches!(refused, Err(NixlError::OutOfBounds { .. })), "{refused:?}");
    }
    Ok(())
}

#[test]
fn bad_requests_are_refused_and_change_nothing() -> Tested {
    let pinned = pinned()?;
    let (client, server) = (agent("client")?, agent("server")?);
    let pool = RegisteredPool::new(&client, &pinned, MIB)?;
    let theirs = RegisteredPool::new(&server, &pinned, MIB)?;
    let peer = client.add_peer(&server.metadata()?)?;
    for name in ["", "a\0b"] {
        assert!(matches!(NixlAgent::new(&nixl(), name), Err(NixlError::BadName { .. })));
        assert!(matches!(client.add_backend(name, &[]), Err(NixlError::BadName { .. })));
        assert!(matches!(
            client.add_backend("UCX", &[(name, "1")]),
            Err(NixlError::BadName { .. })
        ));
    }
    assert!(matches!(client.add_backend("CARRIER", &[]), Err(NixlError::Call { .. })));
    assert!(matches!(client.add_peer(b"no metadata"), Err(NixlError::Call { .. })));
    assert!(matches!(client.register(watched(0)), Err(NixlError::OutOfBounds { .. })));
    for bytes in [0, u64::MAX, u64::MAX - 4095] {
        let refused = RegisteredPool::new(&client, &pinned, bytes);
        assert!(matches!(refused, Err(NixlError::OutOfBounds { .. })), "{refused:?}");
    }
    let refused = RegisteredPool::new(&client, &pinned, 1 << 40);
    assert!(matches!(refused, Err(NixlError::Memory(_))), "{refused:?}");
    assert!(matches!(pool.allocate(0), Err(NixlError::OutOfBounds { .. })));
    assert!(matches!(pool.allocate(u64::MAX), Err(NixlError::PoolFull { .. })));
    for (offset, bytes) in [(0, 0), (0, MIB + 1), (MIB, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let refused = pool.registration().part(offset, bytes);
        assert!(matches!(refused, Err(NixlError::OutOfBounds { .. })), "{refused:?}");
    }
    let (ours, there) = (pool.allocate(512)?, theirs.allocate(512)?);
    let (part, range) = (ours.part().clone(), there.part().location());
    let shorter = pool.registration().part(0, 511)?;
    let on_device = FixedRange { place: MemoryPlace::Device(0), ..range.range() };
    let both = [range, RemoteRange(on_device)];
    for (local, remote) in [
        (&[][..], &[][..]),
        (&[part.clone()][..], &[][..]),
        (&[part.clone(), part.clone()][..], &[range][..]),
        (&[shorter][..], &[range][..]),
        (&[part.clone(), part.clone()][..], &both[..]),
    ] {
        let refused = client.transfer(Direction::Read, &peer, local, remote, None);
        assert!(matches!(refused, Err(NixlError::Unpaired { .. })), "{refused:?}");
    }
    let foreign = there.part().clone();
    let refused = client.transfer(Direction::Read, &peer, &[foreign], &[range], None);
    assert!(matches!(refused, Err(NixlError::OtherAgent)), "{refused:?}");
    let refused =
        server.transfer(Direction::Read, &peer, std::slice::from_ref(&part), &[range], None);
    assert!(matches!(refused, Err(NixlError::OtherAgent)), "{refused:?}");
    assert!(matches!(server.remove_peer(&peer), Err(NixlError::OtherAgent)));
    let unknown = RemoteRange(FixedRange { address: 4096, ..range.range() });
    let refused = client.transfer(Direction::Read, &peer, &[part], &[unknown], None);
    assert!(matches!(refused, Err(NixlError::Call { status: -6, .. })), "{refused:?}");
    Ok(())
}

#[test]
fn a_location_survives_its_way_and_other_bytes_are_refused() -> Tested {
    for place in [MemoryPlace::Host, MemoryPlace::Device(0), MemoryPlace::Device(u32::MAX)] {
        let range = RemoteRange(FixedRange { place, address: 0x7f00_dead_b000, bytes: 12345 });
        assert_eq!(RemoteRange::from_bytes(range.to_bytes())?, range);
    }
    let good =
        RemoteRange(FixedRange { place: MemoryPlace::Host, address: 1, bytes: 1 }).to_bytes();
    for (at, byte) in [(8, 0), (20, 2), (23, 1), (16, 1)] {
        let mut bad = good;
        bad[at] = byte;
        let refused = RemoteRange::from_bytes(bad);
        assert!(matches!(refused, Err(NixlError::BadLocation)), "{at}: {refused:?}");
    }
    let around = RemoteRange(FixedRange { place: MemoryPlace::Host, address: u64::MAX, bytes: 1 });
    assert!(matches!(RemoteRange::from_bytes(around.to_bytes()), Err(NixlError::BadLocation)));
    Ok(())
}

#[test]
#[expect(unsafe_code, reason = "opens files that are no NIXL")]
fn a_library_that_is_not_there_or_is_another_one_is_refused() {
    for file in ["/nowhere/libnixl_capi.so", "libc.so.6", ""] {
        // SAFETY: 1. there is none, or it is the C library, which is loaded already.
        let refused = unsafe { Nixl::open_file(Path::new(file)) };
        let Err(NixlError::Library { reason }) = refused else { panic!("{file}: {refused:?}") };
        assert!(
            file.is_empty() || reason.contains(file) || reason.contains("nixl_capi"),
            "{reason}"
        );
    }
}
