// Made runs in the page's format: blocks from a seeded generator with phases, tags, streams and
// stacks, laid out without overlaps, and all sums that a page shows, computed here on their own.

const KIB = 1024;
const MIB = KIB * KIB;
const GIB = KIB * MIB;

function randomFrom(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

// [tag, least and greatest size, life as a share of the run, stack, weight]
const KINDS = [
  ["weights", 4 * MIB, 64 * MIB, 1, 1, 0.0004],
  ["kv cache", 256 * KIB, 2 * MIB, 0.02, 2, 0.05],
  ["activations", 64 * KIB, 8 * MIB, 0.0006, 3, 0.3],
  ["gradients", 512 * KIB, 4 * MIB, 0.001, 4, 0.05],
  ["workspace", 1 * KIB, 1 * MIB, 0.0001, 5, 0.25],
  ["", 64, 32 * KIB, 0.0003, 0, 0.2],
  ["sampling", 512, 16 * KIB, 0.00005, 6, 0.15],
];

const sizeName = (bytes) => {
  const limit = Math.max(2 ** Math.ceil(Math.log2(Math.max(bytes, 1))), 512);
  const unit = Math.min(Math.floor(Math.log2(limit) / 10), 4);
  return `≤ ${limit / 1024 ** unit} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

// A heap of powers of two with a free list each, which grows at its end.
class Heap {
  constructor() {
    this.free = new Map();
    this.top = 0;
  }

  take(size) {
    const list = this.free.get(size);
    if (list?.length > 0) return list.pop();
    this.top += size;
    return this.top - size;
  }

  put(offset, size) {
    if (!this.free.has(size)) this.free.set(size, []);
    this.free.get(size).push(offset);
  }
}

// `options`: {name, blocks, seed, scale, tags: replacement of tags by name, recorded: with addresses}
// Gives {run, events}: events are [time, order, "a" | "f" | "c", block].
export function made({ name = "made.csv", blocks: count = 2000, seed = 1, scale = 1, tags = {}, recorded = false } = {}) {
  const random = randomFrom(seed);
  const strings = [""];
  const idOf = (text) => {
    if (!strings.includes(text)) strings.push(text);
    return strings.indexOf(text);
  };
  const tagIds = KINDS.map(([tag]) => idOf(tags[tag] ?? tag));
  const streams = ["0", "1", "2", "7"].map(idOf);
  const threads = ["main", "loader"].map(idOf);
  const kind = idOf("cached");
  const frames = ["step", "forward", "attention", "mlp", "backward", "optimizer", "main"].map((frame) => `${frame} (model.py:${frame.length * 11})`);
  const stacks = [[], ...Array.from({ length: 6 }, (_, i) => [i, 5, 6].map((f) => idOf(frames[f])))];
  const end = count * 100;
  const columns = ["birth", "freed", "end", "offset", "bytes", "requested"];
  const texts = ["layer 1", "layer 2"].map(idOf);
  const ids = ["stream", "thread", "tag", "stack", "kind", "metadata"];
  const blocks = Object.fromEntries([...columns.map((c) => [c, new Float64Array(count)]), ...ids.map((c) => [c, new Uint32Array(count)])]);
  const events = []; // [time, order, what, block]
  for (let i = 0; i < count; i++) {
    const phase = 0.55 + 0.45 * Math.sin((i / count) * Math.PI * 6);
    let at = random();
    let which = 0;
    while (which < KINDS.length - 1 && at > KINDS[which][5]) at -= KINDS[which++][5];
    const [, least, most, life, stack] = KINDS[which];
    const requested = Math.max(1, Math.round(least * (most / least) ** (random() * phase) * scale));
    const birth = Math.round((i / count) * end) + Math.floor(random() * 40);
    blocks.birth[i] = birth;
    const lived = which === 0 ? Infinity : Math.max(1, Math.round(end * life * (0.2 + 2 * random())));
    blocks.freed[i] = birth + lived >= end ? Infinity : birth + lived;
    const pending = random() < 0.08 ? Math.round(lived * 0.3) + 1 : 0;
    blocks.end[i] = blocks.freed[i] + pending >= end ? (pending > 0 ? Infinity : blocks.freed[i]) : blocks.freed[i] + pending;
    blocks.requested[i] = requested;
    blocks.bytes[i] = Math.ceil(requested / 512) * 512;
    blocks.stream[i] = streams[Math.floor(random() ** 2 * streams.length)];
    blocks.thread[i] = threads[random() < 0.1 ? 1 : 0];
    blocks.tag[i] = tagIds[which];
    blocks.stack[i] = stack;
    blocks.kind[i] = kind;
    blocks.metadata[i] = texts[which % 2];
  }
  for (let i = 0; i < count; i++) {
    events.push([blocks.birth[i], 2, "a", i]);
    if (blocks.freed[i] < Infinity) events.push([blocks.freed[i], 0, "f", i]);
    if (blocks.end[i] < Infinity) events.push([blocks.end[i], 1, "c", i]);
  }
  events.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[3] - b[3]);
  return played({ name, count, end, strings, stacks, blocks, events, recorded });
}

// Plays the events: addresses, curves, the peak and who held it.
function played({ name, count, end, strings, stacks, blocks, events, recorded }) {
  const heap = new Heap();
  const size = (i) => 2 ** Math.ceil(Math.log2(blocks.bytes[i]));
  const names = ["live", "pending", "cached", "physical"];
  const points = Object.fromEntries(names.map((each) => [each, []]));
  const times = [];
  const now = { live: 0, occupied: 0, pending: 0, cached: 0, physical: 0 };
  const markers = [];
  const living = new Set();
  let peak = null;
  let peakEvent = -1;
  events.forEach(([t, , what, i], event) => {
    if (what === "a") {
      blocks.offset[i] = heap.take(size(i));
      if (heap.top > now.physical) {
        const physical = Math.ceil(heap.top / (64 * MIB)) * 64 * MIB;
        if (physical > now.physical) markers.push({ t, kind: "grow", bytes: physical - now.physical, text: "" });
        now.physical = Math.max(now.physical, physical);
      }
      now.live += blocks.requested[i];
      now.occupied += blocks.bytes[i];
    } else if (what === "f") {
      now.live -= blocks.requested[i];
      now.occupied -= blocks.bytes[i];
      if (blocks.end[i] > blocks.freed[i]) now.pending += blocks.bytes[i];
    } else {
      if (blocks.end[i] > blocks.freed[i]) now.pending -= blocks.bytes[i];
      heap.put(blocks.offset[i], size(i));
    }
    if (what === "f" && blocks.end[i] === blocks.freed[i]) return;
    now.cached = now.physical - now.occupied - now.pending;
    times.push(t);
    for (const each of names) points[each].push(now[each]);
    if (peak === null || now.live > peak.live) {
      peak = { t, event, requested: now.live, ...now };
      peakEvent = event;
    }
  });
  for (const [, , what, i] of events.slice(0, peakEvent + 1)) {
    if (what === "a") living.add(i);
    else living.delete(i);
  }
  // A block that is freed but pending at the peak has left the set by its free.
  peak.blocks = living.size;
  const t = Float64Array.from(times);
  const series = names.map((each) => ({ name: each, unit: "bytes", levels: pyramid(t, Float64Array.from(points[each])) }));
  // Taken by others on the device: 400 MiB at the peak, and more from the middle on.
  const outside = Float64Array.of(400 * MIB, 900 * MIB);
  const middle = Float64Array.of(0, Math.max(end / 2, peak.t + 1));
  series.push({ name: "outside", unit: "bytes", levels: pyramid(middle, outside) });
  series.push({ name: "limit", unit: "bytes", levels: pyramid(Float64Array.of(0), Float64Array.of(peak.physical * 1.1)) });
  // Pinned host memory, and phases: two steps, one of which is at the peak, and a part of it.
  series.push({ name: "pinned", unit: "bytes", levels: pyramid(middle, Float64Array.of(64 * MIB, 96 * MIB)) });
  const phases = [
    { t: 0, end: peak.t / 2, depth: 0, text: "step 1" }, { t: peak.t / 2, end, depth: 0, text: "step 2" },
    { t: peak.t / 2, end: peak.t, depth: 1, text: "forward" },
  ];
  const failure = { t: peak.t, event: peakEvent, bytes: 3 * GIB, text: [
    "A request of 3 GiB on stream 1 was not met.",
    "Free were 1.2 GiB; the largest extent was 96 MiB.",
    "kv cache would have had to free 2.1 GiB.",
  ] };
  markers.push({ t: peak.t, kind: "fail", bytes: failure.bytes, text: "3 GiB did not fit" });
  markers.push({ t: end / 3, kind: "finding", bytes: 0, text: "A stream waits for another one at each step." });
  markers.push({ t: end / 2, kind: "move", bytes: 2 * MIB, text: "" }, { t: end * 0.7, kind: "release", bytes: 64 * MIB, text: "" });
  markers.push({ t: end * 0.9, kind: "user", bytes: null, text: "epoch 2" });
  markers.sort((a, b) => a.t - b.t);
  const run = {
    name, format: "events", device: "0", devices: ["0", "host:0"],
    notes: recorded ? [] : ["The input has no addresses: blocks were laid out by first fit."],
    clock: "us", start: 0, end, events: events.length,
    addresses: recorded ? "recorded" : "packed",
    address_spans: recorded ? [{ start: "0x7f0000000000", bytes: heap.top, at: 0 }] : [],
    address_height: heap.top, strings, stacks, series,
    blocks, bands: null, markers, markers_left_out: { grow: 12 }, peak,
    slack: { at: peak.t, live: peak.live, rounding: peak.occupied - peak.live, pending: peak.pending, cached: peak.cached, graphs: null, pinned: 64 * MIB, outside: 400 * MIB },
    fragmentation: { at: peak.t, free: peak.cached, largest_free: Math.floor(peak.cached / 5) },
    holders: holdersOf([...living], blocks, strings, stacks),
    phases, failures: [failure, failure, failure, failure], failures_left_out: 296,
    failure_groups: [
      { tag: "kv cache", count: 200, least: MIB, most: 3 * GIB, first: peak.t, last: end },
      { tag: "", count: 100, least: 512, most: 512, first: 0, last: end },
    ],
  };
  return { run, events };
}

// The run with its largest blocks alone, and the others as bands: each cell is counted block by block.
export function merged(run, most) {
  const { blocks, end, address_height: height } = run;
  const order = Array.from(blocks.bytes.keys()).sort((a, b) => blocks.bytes[b] - blocks.bytes[a] || a - b);
  const kept = order.slice(0, most).sort((a, b) => a - b);
  const rest = order.slice(most);
  const [columns, bytes] = [40, 2 ** Math.ceil(Math.log2(height / 60))];
  const all = Array.from({ length: Math.ceil(height / bytes) }, (_, row) => row * bytes);
  const rows = all.filter((low) => rest.some((i) => blocks.offset[i] < low + bytes && blocks.offset[i] + blocks.bytes[i] > low));
  const counts = new Uint32Array(rows.length * columns);
  const shares = new Float64Array(counts.length);
  for (const i of rest) {
    rows.forEach((low, row) => {
      const inRow = Math.min(blocks.offset[i] + blocks.bytes[i], low + bytes) - Math.max(blocks.offset[i], low);
      if (inRow <= 0) return;
      for (let column = 0; column < columns; column++) {
        const [t0, t1] = [(column * end) / columns, ((column + 1) * end) / columns];
        if (blocks.birth[i] >= t1 || (blocks.end[i] <= t0 && blocks.birth[i] < t0)) continue;
        counts[row * columns + column] += 1;
        shares[row * columns + column] += (inRow * (Math.min(blocks.end[i], t1) - Math.max(blocks.birth[i], t0))) / (bytes * (t1 - t0));
      }
    });
  }
  const grid = { row_bytes: bytes, rows: Float64Array.from(rows), columns, counts, shares: Uint8Array.from(shares, (share) => Math.round(share * 255)) };
  const below = blocks.bytes[rest[0]] + 1;
  const bands = { below, count: rest.length, t: Float64Array.of(0), live: Float64Array.of(0), grid };
  const columnsOf = ([name, column]) => [name, column.constructor.from(kept, (i) => column[i])];
  return { ...run, blocks: Object.fromEntries(Object.entries(blocks).map(columnsOf)), bands };
}

export const madeRun = (options) => made(options).run;

// The events as the file of a trace, for `aquifer report`, with a limit that is lowered in the middle, and with more in
// use outside from there on.
export function traceText({ run, events }) {
  const { blocks, strings } = run;
  const lines = ["t_us,op,id,bytes,stream,kind,device,tag"];
  const limit = (t, bytes) => lines.push(`${t},l,0,${bytes},0,cached,0,`);
  const outside = (t, bytes) => lines.push(`${t},o,0,${bytes},0,cached,0,`);
  limit(0, 64 * GIB);
  outside(0, 400 * MIB);
  for (const [at, [t, , what, i]] of events.entries()) {
    if (at === events.length >> 1) {
      limit(t, 48 * GIB);
      outside(t, 900 * MIB);
    }
    lines.push(`${t},${what},${i},${blocks.requested[i]},${strings[blocks.stream[i]]},cached,0,${strings[blocks.tag[i]]}`);
  }
  return `${lines.join("\n")}\n`;
}

// Levels that merge four neighbours each.
export function pyramid(t, values) {
  const levels = [{ t, min: values, max: values, last: values }];
  while (levels.at(-1).t.length > 4) {
    const below = levels.at(-1);
    const length = Math.ceil(below.t.length / 4);
    const next = { t: new Float64Array(length), min: new Float64Array(length), max: new Float64Array(length), last: new Float64Array(length) };
    for (let i = 0; i < length; i++) {
      const [from, to] = [i * 4, Math.min(i * 4 + 4, below.t.length)];
      next.t[i] = below.t[from];
      [next.min[i], next.max[i]] = [Infinity, -Infinity];
      for (let j = from; j < to; j++) {
        if (below.min[j] < next.min[i]) next.min[i] = below.min[j];
        if (below.max[j] > next.max[i]) next.max[i] = below.max[j];
      }
      next.last[i] = below.last[to - 1];
    }
    levels.push(next);
  }
  return levels;
}

const MOST = 50;

function holdersOf(living, blocks, strings, stacks) {
  const by = (nameOf, extra = () => ({})) => {
    const sums = new Map();
    for (const i of living) {
      const key = nameOf(i);
      const sum = sums.get(key) ?? { name: key, bytes: 0, blocks: 0, ...extra(i) };
      sum.bytes += blocks.requested[i];
      sum.blocks += 1;
      sums.set(key, sum);
    }
    const all = [...sums.values()].sort((a, b) => b.bytes - a.bytes);
    const rest = all.slice(MOST);
    const total = (key) => rest.reduce((sum, each) => sum + each[key], 0);
    return rest.length > 0 ? [...all.slice(0, MOST), { name: "rest", bytes: total("bytes"), blocks: total("blocks") }] : all;
  };
  const text = (column) => (i) => strings[blocks[column][i]];
  const stackName = (i) => stacks[blocks.stack[i]].map((frame) => strings[frame]).join(" < ");
  return {
    tag: by(text("tag")), stream: by(text("stream")), thread: by(text("thread")), kind: by(text("kind")),
    size: by((i) => sizeName(blocks.requested[i])),
    stack: by(stackName, (i) => ({ stack: blocks.stack[i] })), metadata: by(text("metadata")),
  };
}

export function compared(a, b) {
  const sides = (by) => {
    const names = new Map();
    [a, b].forEach((run, side) => {
      for (const { name, bytes } of run.holders[by]) {
        if (!names.has(name)) names.set(name, { name, bytes: [0, 0] });
        names.get(name).bytes[side] += bytes;
      }
    });
    const all = [...names.values()].map((each) => ({ ...each, difference: each.bytes[1] - each.bytes[0] }));
    return all.sort((x, y) => Math.abs(y.difference) - Math.abs(x.difference)).slice(0, MOST);
  };
  return {
    peaks: [a.peak.live, b.peak.live], difference: b.peak.live - a.peak.live,
    tag: sides("tag"), size: sides("size"), stream: sides("stream"), stack: sides("stack"),
  };
}

export function madeHeader(...runs) {
  const pairs = Array.from({ length: runs.length >> 1 }, (_, i) => runs.slice(i * 2, i * 2 + 2));
  const comparisons = pairs.map(([a, b]) => ({ device: a.device, ...compared(a, b) }));
  return { version: 2, product: "aquifer made", runs, comparisons };
}
