// Reading: the base64 text of the page becomes runs whose columns are typed arrays. Everything is
// checked before anything is drawn, so that the rest of the script can rely on it.

class DamagedPage extends Error {}

const ARRAY_TYPES = {
  f64: Float64Array, f32: Float32Array, u32: Uint32Array, u16: Uint16Array, u8: Uint8Array,
};

function need(holds, what) {
  if (!holds) throw new DamagedPage(what);
}

function decodeBase64(text) {
  const clean = text.trim();
  need(clean.length > 0 && !clean.startsWith("<"), "it holds no data");
  try {
    if (typeof Uint8Array.fromBase64 === "function") return Uint8Array.fromBase64(clean);
    const padding = clean.endsWith("==") ? 2 : clean.endsWith("=") ? 1 : 0;
    const bytes = new Uint8Array(Math.floor((clean.length * 3) / 4) - padding);
    let at = 0;
    for (let from = 0; from < clean.length; from += 1 << 20) {
      const part = atob(clean.slice(from, from + (1 << 20)));
      for (let i = 0; i < part.length; i++) bytes[at++] = part.charCodeAt(i);
    }
    need(at === bytes.length, "its data is no base64 text");
    return bytes;
  } catch (error) {
    throw error instanceof DamagedPage ? error : new DamagedPage("its data is no base64 text");
  }
}

async function inflate(bytes) {
  if (typeof DecompressionStream !== "function") {
    throw new DamagedPage("this browser is too old to open it (it has no DecompressionStream)");
  }
  const stream = new DecompressionStream("deflate");
  const writer = stream.writable.getWriter();
  // What goes wrong is met while reading.
  writer.write(bytes).catch(() => {});
  writer.close().catch(() => {});
  const parts = [];
  let length = 0;
  try {
    for await (const part of partsOf(stream.readable.getReader())) {
      parts.push(part);
      length += part.length;
    }
  } catch {
    throw new DamagedPage("its data is cut off or changed (the zlib stream does not end well)");
  }
  const all = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all.buffer;
}

async function* partsOf(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// Gives typed views of the arrays that a header refers to.
class Arrays {
  constructor(buffer, base) {
    this.buffer = buffer;
    this.base = base;
  }

  view(reference, what) {
    need(reference !== null && typeof reference === "object", `${what} is missing`);
    const { type, at, len } = reference;
    need(Object.hasOwn(ARRAY_TYPES, type), `${what} has an unknown type`);
    const kind = ARRAY_TYPES[type];
    const fits = Number.isSafeInteger(at) && Number.isSafeInteger(len) && at >= 0 && len >= 0
      && at % 8 === 0 && this.base + at + len * kind.BYTES_PER_ELEMENT <= this.buffer.byteLength;
    need(fits, `${what} lies outside of the data`);
    return new kind(this.buffer, this.base + at, len);
  }
}

async function readPayload(text) {
  const buffer = await inflate(decodeBase64(text));
  need(buffer.byteLength >= 4, "its data is empty");
  const length = new DataView(buffer).getUint32(0, true);
  need(length <= buffer.byteLength - 4 && (length + 4) % 8 === 0, "its header is cut off");
  let header;
  try {
    const utf8 = new TextDecoder("utf-8", { fatal: true });
    header = JSON.parse(utf8.decode(new Uint8Array(buffer, 4, length)));
  } catch {
    throw new DamagedPage("its header is not readable");
  }
  need(header !== null && typeof header === "object", "its header is not readable");
  need(header.version === 2, `its format is ${JSON.stringify(header.version)}, and this page reads 2`);
  const count = Array.isArray(header.runs) ? header.runs.length : 0;
  need(count === 1 || (count > 0 && count % 2 === 0), "it holds neither one run nor pairs of them");
  const arrays = new Arrays(buffer, 4 + length);
  header.runs.forEach((run, index) => openRun(run, index, arrays));
  return header;
}

const isCount = (value) => typeof value === "number" && Number.isFinite(value) && value >= 0;
const isList = (value) => Array.isArray(value);
const isText = (value) => typeof value === "string";

// Checks a run and replaces its references by arrays.
function openRun(run, index, arrays) {
  need(run !== null && typeof run === "object", "a run is missing");
  const whose = `run ${index + 1}`;
  need(isText(run.name), `${whose} has no name`);
  need(run.clock === "us" || run.clock === "events", `${whose} has an unknown clock`);
  need(Number.isFinite(run.start) && Number.isFinite(run.end) && run.end >= run.start,
    `${whose} has no span of time`);
  need(isCount(run.events) && isCount(run.address_height), `${whose} lacks its counts`);
  need(isList(run.strings) && run.strings.length > 0 && run.strings.every(isText),
    `the texts of ${whose} are damaged`);
  need(isList(run.stacks) && run.stacks.length > 0
    && run.stacks.every((stack) => isList(stack) && stack.every((id) => id < run.strings.length)),
  `the stacks of ${whose} are damaged`);
  for (const list of ["notes", "devices", "markers", "phases", "failures", "failure_groups", "series", "address_spans"]) {
    run[list] ??= [];
    need(isList(run[list]), `the list ${list} of ${whose} is damaged`);
  }
  need(run.notes.every(isText), `the notes of ${whose} are damaged`);
  const { peak } = run;
  need(peak !== null && typeof peak === "object" && isCount(peak.live) && Number.isFinite(peak.t),
    `${whose} has no peak`);
  for (const marker of run.markers) {
    need(Number.isFinite(marker?.t) && isText(marker.kind), `a marker of ${whose} is damaged`);
  }
  for (const phase of run.phases) {
    need(isCount(phase?.t) && phase.end >= phase.t && isCount(phase.depth) && isText(phase.text), `a phase of ${whose} is damaged`);
  }
  for (const failure of run.failures) {
    need(isList(failure?.text) && failure.text.every(isText), `a failure of ${whose} is damaged`);
  }
  run.slack ??= {};
  run.fragmentation ??= {};
  run.holders ??= {};
  run.markers_left_out ??= {};
  run.series.forEach((series) => openSeries(series, whose, arrays));
  openBlocks(run, whose, arrays);
  if (run.bands) {
    run.bands.t = arrays.view(run.bands.t, `the bands of ${whose}`);
    run.bands.live = arrays.view(run.bands.live, `the bands of ${whose}`);
    need(run.bands.t.length === run.bands.live.length, `the bands of ${whose} are damaged`);
    if (run.bands.grid) openGrid(run.bands.grid, `the bands of ${whose}`, arrays);
  }
}

function openGrid(grid, what, arrays) {
  for (const column of ["rows", "counts", "shares"]) grid[column] = arrays.view(grid[column], what);
  const { rows, columns, row_bytes: bytes, counts, shares } = grid;
  need(Number.isSafeInteger(columns) && columns > 0 && isCount(bytes) && bytes > 0, `${what} are damaged`);
  need(counts.length === rows.length * columns && shares.length === counts.length,
    `${what} have columns of different lengths`);
  need(ascends(rows), `${what} are out of order`);
}

function openSeries(series, whose, arrays) {
  const what = `a curve of ${whose}`;
  need(isText(series?.name) && isList(series.levels) && series.levels.length > 0, `${what} is damaged`);
  for (const level of series.levels) {
    for (const column of ["t", "min", "max", "last"]) {
      level[column] = arrays.view(level[column], what);
      need(level[column].length === level.t.length, `${what} has columns of different lengths`);
    }
    need(ascends(level.t), `${what} is out of order`);
  }
}

const BLOCK_TIMES = ["birth", "freed", "end"];
const BLOCK_SIZES = ["offset", "bytes", "requested"];
const BLOCK_IDS = ["stream", "thread", "tag", "stack", "kind", "metadata"];

function openBlocks(run, whose, arrays) {
  const what = `the blocks of ${whose}`;
  need(run.blocks !== null && typeof run.blocks === "object", `${what} are missing`);
  const blocks = run.blocks;
  for (const column of [...BLOCK_TIMES, ...BLOCK_SIZES, ...BLOCK_IDS]) {
    blocks[column] = arrays.view(blocks[column], what);
    need(blocks[column].length === blocks.birth.length, `${what} have columns of different lengths`);
  }
  blocks.count = blocks.birth.length;
  need(ascends(blocks.birth), `${what} are out of order`);
  for (const column of BLOCK_IDS) {
    const bound = column === "stack" ? run.stacks.length : run.strings.length;
    need(blocks[column].every((id) => id < bound), `${what} name texts that are not there`);
  }
}

function ascends(times) {
  for (let i = 1; i < times.length; i++) {
    if (!(times[i] >= times[i - 1])) return false;
  }
  return times.length === 0 || Number.isFinite(times[0]);
}
