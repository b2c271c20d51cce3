//! The workloads, one function each. [`WORKLOADS`](super::WORKLOADS) states what each one defeats.

use super::maker::{MadeBlock, Maker};
use crate::trace::error::Fault;
use std::collections::VecDeque;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Permanent weights, sequences with growing caches, and scratch memory of each step. A sequence
/// needs its old block until it is copied into the new one, so that both are live for a moment.
pub(super) fn growing_kv(m: &mut Maker) -> Result<(), Fault> {
    const SEQUENCES: usize = 24;
    /// The limit of all caches together. Above it the largest sequence ends.
    const ALL: u64 = 3 << 30;
    struct Sequence {
        cache: MadeBlock,
        /// The size before scaling.
        bytes: u64,
        until: u64,
    }
    for _ in 0..32 {
        m.allocate(32 * MIB, 0)?;
    }
    let mut running: Vec<Sequence> = Vec::new();
    for _ in 0..m.steps(4000) {
        let sum: u64 = running.iter().map(|sequence| sequence.bytes).sum();
        if running.len() < SEQUENCES && sum < ALL - 512 * MIB {
            let bytes = m.spread(MIB, 4) & !(64 * KIB - 1);
            let until = m.spread(32 * MIB, 4);
            running.push(Sequence { cache: m.allocate(bytes, 0)?, bytes, until });
        }
        let pick = m.below(running.len() as u64) as usize;
        if running[pick].bytes >= running[pick].until || sum > ALL {
            let ends = (0..running.len()).max_by_key(|&at| running[at].bytes).filter(|_| sum > ALL);
            let ended = running.swap_remove(ends.unwrap_or(pick));
            m.free(ended.cache)?;
        } else {
            // 1.25 to 2 times, in steps of 64 KiB.
            let bytes = (running[pick].bytes * m.between(80, 128) / 64) & !(64 * KIB - 1);
            let larger = m.allocate(bytes, 0)?;
            running[pick].bytes = bytes;
            let old = std::mem::replace(&mut running[pick].cache, larger);
            m.free(old)?;
        }
        let (bytes, more) = (m.spread(256 * KIB, 5), m.spread(4 * KIB, 6));
        let scratch = [m.allocate(bytes, 0)?, m.allocate(more, 0)?];
        m.free_all(scratch)?;
    }
    m.free_all(running.into_iter().map(|sequence| sequence.cache).collect::<Vec<_>>())
}

/// Frees random blocks until the next block fits below the peak, and allocates it.
pub(super) fn near_limit(m: &mut Maker) -> Result<(), Fault> {
    let most = m.scaled(4 << 30);
    let mut held = Vec::new();
    for _ in 0..m.steps(12_000) {
        // 512 B to 256 MiB.
        let bytes = m.spread(512, 19);
        while m.live + m.scaled(bytes) > most && !held.is_empty() {
            m.free_any(&mut held)?;
        }
        held.push(m.allocate(bytes, 0)?);
    }
    m.free_all(held)
}

/// Phases of small, huge and medium blocks on four streams. In every phase but the huge one, one
/// block in twenty-five outlives the next phase.
pub(super) fn phases(m: &mut Maker) -> Result<(), Fault> {
    const STREAMS: u64 = 4;
    let mut survivors: VecDeque<Vec<MadeBlock>> = VecDeque::from([Vec::new(), Vec::new()]);
    for round in 0..m.steps(8) {
        for phase in 0..3 {
            let mut held = Vec::new();
            let blocks = [2000, 6, 160][phase];
            for block in 0..blocks {
                let bytes = match phase {
                    0 => m.spread(512, 11),
                    1 => m.between(384 * MIB, 640 * MIB),
                    _ => m.spread(4 * MIB, 4),
                };
                held.push(m.allocate(bytes, (block + round) % STREAMS)?);
            }
            let mut stay = Vec::new();
            for block in held {
                if phase != 1 && m.below(25) == 0 {
                    stay.push(block);
                } else {
                    m.free(block)?;
                }
            }
            survivors.push_back(stay);
            let over = survivors.pop_front().unwrap_or_default();
            m.free_all(over)?;
        }
    }
    survivors.into_iter().try_for_each(|over| m.free_all(over))
}

/// Large blocks that are freed again, each followed by a small block that stays. From time to time
/// a huge block needs the space.
pub(super) fn pinned(m: &mut Maker) -> Result<(), Fault> {
    /// The number of small blocks that are live at the same time.
    const SMALL: usize = 400;
    let most = m.scaled(1536 * MIB);
    let (mut large, mut small) = (VecDeque::new(), VecDeque::new());
    for step in 1..=m.steps(4000) {
        let bytes = m.spread(4 * MIB, 6);
        large.push_back(m.allocate(bytes, 0)?);
        let bytes = m.between(512, 4 * KIB);
        small.push_back(m.allocate(bytes, 0)?);
        while m.live > most || large.len() > 24 {
            let Some(oldest) = large.pop_front() else { break };
            m.free(oldest)?;
        }
        if small.len() > SMALL
            && let Some(oldest) = small.pop_front()
        {
            m.free(oldest)?;
        }
        if step.is_multiple_of(200) {
            m.free_all(std::mem::take(&mut large))?;
            let bytes = m.between(1280 * MIB, 1536 * MIB);
            let huge = m.allocate(bytes, 0)?;
            m.free(huge)?;
        }
    }
    m.free_all(large)?;
    m.free_all(small)
}

/// Each stream in turn fills 1.25 GiB, churns, and frees all of it.
pub(super) fn idle_streams(m: &mut Maker) -> Result<(), Fault> {
    const STREAMS: u64 = 16;
    let most = m.scaled(1280 * MIB);
    for turn in 0..m.steps(3 * STREAMS) {
        let stream = turn % STREAMS;
        let mut held = Vec::new();
        for _ in 0..150 {
            let bytes = m.spread(2 * KIB, 15);
            while m.live + m.scaled(bytes) > most && !held.is_empty() {
                m.free_any(&mut held)?;
            }
            held.push(m.allocate(bytes, stream)?);
        }
        m.free_all(held)?;
    }
    Ok(())
}

/// Streams that are created, work concurrently with the previous stream, hand it their last result
/// and end. The last row of a stream frees its last block.
pub(super) fn dying_streams(m: &mut Maker) -> Result<(), Fault> {
    let most = m.scaled(1536 * MIB);
    let mut before: Option<(u64, Vec<MadeBlock>)> = None;
    // The replay holds a handle per stream, so their number is limited.
    for stream in 0..m.steps(40).min(200) {
        let mut held = Vec::new();
        for step in 0..200 {
            let bytes = m.spread(8 * KIB, 13);
            while m.live + m.scaled(bytes) > most && !held.is_empty() {
                m.free_any(&mut held)?;
            }
            held.push(m.allocate(bytes, stream)?);
            // The previous stream frees its blocks meanwhile.
            if let Some((_, theirs)) = before.as_mut().filter(|_| step % 2 == 0) {
                m.free_any(theirs)?;
            }
        }
        if let Some((on, theirs)) = before.take() {
            m.free_all(theirs)?;
            // The last row of the previous stream: it used the result of the new one.
            if let Some(result) = held.pop() {
                m.free_on(result, on)?;
            }
        }
        while m.live > most / 2 && !held.is_empty() {
            m.free_any(&mut held)?;
        }
        before = Some((stream, held));
    }
    before.map_or(Ok(()), |(_, held)| m.free_all(held))
}

/// Everything is allocated. Then a block is freed and a slightly larger one allocated, and the
/// reverse.
pub(super) fn edge(m: &mut Maker) -> Result<(), Fault> {
    let mut held = VecDeque::new();
    for _ in 0..32 {
        held.push_back(m.allocate(64 * MIB, 0)?);
    }
    for step in 0..m.steps(3000) {
        if let Some(oldest) = held.pop_front() {
            m.free(oldest)?;
        }
        // One handle more than is held, a few bytes more, and back.
        let bytes = match step % 4 {
            0 => 66 * MIB,
            1 => 62 * MIB,
            2 => 64 * MIB + 512,
            _ => 64 * MIB - 512,
        };
        let taken = m.allocate(bytes, 0)?;
        let scratch = m.allocate(2 * MIB + step % 7 * 512, 0)?;
        m.free(scratch)?;
        held.push_back(taken);
    }
    m.free_all(held)
}

/// Weights, their moments, and identical steps: activations forward, gradients backward, an update.
pub(super) fn steady(m: &mut Maker) -> Result<(), Fault> {
    const LAYERS: u64 = 48;
    for layer in 0..LAYERS {
        let weights = (6 + layer % 5) * MIB;
        for bytes in [weights, weights, weights, 16 * KIB] {
            m.allocate(bytes, 0)?;
        }
    }
    for _ in 0..m.steps(40) {
        let mut activations = Vec::new();
        for layer in 0..LAYERS {
            for bytes in [12 * MIB, (16 + layer % 3 * 4) * MIB, 3 * MIB + 512, 192 * KIB] {
                activations.push(m.allocate(bytes, 0)?);
            }
            let scratch = m.allocate((24 + layer % 7) * MIB, 0)?;
            m.free(scratch)?;
        }
        let mut gradients = Vec::new();
        for layer in (0..LAYERS).rev() {
            let bytes = (6 + layer % 5) * MIB;
            gradients.push((m.allocate(bytes, 0)?, bytes));
            let scratch = m.allocate(16 * MIB, 0)?;
            let done = activations.split_off(activations.len().saturating_sub(4));
            m.free_all(done)?;
            m.free(scratch)?;
        }
        for (gradient, bytes) in gradients {
            let update = m.allocate(bytes / 2, 0)?;
            m.free(gradient)?;
            m.free(update)?;
        }
    }
    Ok(())
}

/// Shards of all layers, and training steps that gather each layer on a second stream, one ahead of
/// its use. The first stream still uses a gathered layer, and the second one a gradient, when it is
/// freed.
pub(super) fn sharded(m: &mut Maker) -> Result<(), Fault> {
    const LAYERS: usize = 24;
    /// Weights of a layer, each gathered into a block of its own.
    const PARTS: usize = 9;
    /// A shard is this part of a weight.
    const RANKS: u64 = 8;
    const COMPUTE: u64 = 0;
    const GATHER: u64 = 1;
    /// The sizes in a layer, the same in each step.
    struct Layer {
        parts: Vec<u64>,
        activations: Vec<u64>,
        scratch: u64,
    }
    let mut sizes = |count: usize, low: u64, high: u64| -> Vec<u64> {
        (0..count).map(|_| m.between(low, high) & !511).collect()
    };
    let layers: Vec<Layer> = (0..LAYERS)
        .map(|_| {
            let mut activations = sizes(2, MIB, 6 * MIB);
            activations.extend(sizes(6, 512, 300 * KIB));
            let scratch = sizes(1, 20 * MIB, 70 * MIB)[0];
            Layer { parts: sizes(PARTS, 4 * MIB, 12 * MIB), activations, scratch }
        })
        .collect();
    let all = |m: &mut Maker, bytes: &[u64], stream| {
        bytes.iter().map(|&bytes| m.allocate(bytes, stream)).collect::<Result<Vec<_>, _>>()
    };
    // Weights and two moments of the optimizer.
    for part in layers.iter().flat_map(|layer| &layer.parts) {
        for _ in 0..3 {
            m.allocate(part / RANKS, COMPUTE)?;
        }
    }
    for _ in 0..m.steps(3) {
        // Freed blocks whose use on the other stream is not over.
        let mut in_use: VecDeque<MadeBlock> = VecDeque::new();
        let mut release = |m: &mut Maker, blocks: Vec<MadeBlock>, keep: usize| {
            for block in blocks {
                in_use.push_back(m.free_in_use(block)?);
            }
            while in_use.len() > keep
                && let Some(oldest) = in_use.pop_front()
            {
                m.complete(oldest)?;
            }
            Ok(())
        };
        let mut activations = Vec::new();
        let mut gathered = all(m, &layers[0].parts, GATHER)?;
        for (at, layer) in layers.iter().enumerate() {
            let next = layers.get(at + 1).map_or(Ok(Vec::new()), |l| all(m, &l.parts, GATHER))?;
            activations.push(all(m, &layer.activations, COMPUTE)?);
            let scratch = m.allocate(layer.scratch, COMPUTE)?;
            m.free(scratch)?;
            release(m, std::mem::replace(&mut gathered, next), PARTS)?;
        }
        let mut reduced = Vec::new();
        gathered = all(m, &layers[LAYERS - 1].parts, GATHER)?;
        for (at, layer) in layers.iter().enumerate().rev() {
            let next = match at.checked_sub(1) {
                Some(before) => all(m, &layers[before].parts, GATHER)?,
                None => Vec::new(),
            };
            let gradients = all(m, &layer.parts, COMPUTE)?;
            let scratch = m.allocate(layer.scratch, COMPUTE)?;
            m.free_all(activations.pop().unwrap_or_default())?;
            m.free(scratch)?;
            for part in &layer.parts {
                reduced.push((m.allocate(part / RANKS, GATHER)?, part / 2));
            }
            release(m, gradients, usize::MAX)?;
            release(m, std::mem::replace(&mut gathered, next), PARTS)?;
        }
        release(m, Vec::new(), 0)?;
        for (shard, bytes) in reduced {
            let update = m.allocate(bytes, COMPUTE)?;
            m.free_on(shard, COMPUTE)?;
            m.free(update)?;
        }
    }
    Ok(())
}
