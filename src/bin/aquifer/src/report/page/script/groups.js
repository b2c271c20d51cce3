// Groupings: what a block belongs to by tag, size class, stream, thread, kind, stack or the text that
// the program attached, and which colour and pattern a group has. The eleven groups that hold the most have one of their own.

const GROUPINGS = [
  ["tag", "tag"], ["size", "size class"], ["stream", "stream"], ["thread", "thread"],
  ["kind", "kind"], ["stack", "stack"], ["metadata", "attached text"],
];
const UNNAMED = {
  tag: "no tag", stream: "no stream", thread: "thread unknown", kind: "kind unknown", stack: "no stack",
  metadata: "no text",
};
const GROUP_COLOURS = 12; // the last one stands for all others
const OTHERS = GROUP_COLOURS - 1;
const PATTERNS = 6;
const MOST_CLASS = 64;

// The number of a size class: sizes up to 2^class bytes, and at least 512 B.
function sizeClass(bytes) {
  if (bytes <= 512) return 9;
  if (bytes <= 2147483648) return 32 - Math.clz32(bytes - 1);
  return Math.min(Math.ceil(Math.log2(bytes)), MOST_CLASS);
}

const sizeClassText = (number) => `≤ ${bytesText(2 ** number)}`;

// The innermost frames of a stack.
function stackText(run, stack, most = 6) {
  return (run.stacks[stack] ?? []).slice(0, most).map((frame) => run.strings[frame]).join(" < ");
}

// A grouping of a run: {of: group of each block, groups: their number, nameOf, used, colour: by group}.
function grouping(run, by) {
  run.groupings ??= new Map();
  if (!run.groupings.has(by)) run.groupings.set(by, newGrouping(run, by));
  return run.groupings.get(by);
}

function newGrouping(run, by) {
  const { blocks } = run;
  let of;
  let nameOf;
  if (by === "size") {
    of = new Uint32Array(blocks.count);
    for (let i = 0; i < blocks.count; i++) of[i] = sizeClass(blocks.requested[i]);
    nameOf = sizeClassText;
  } else {
    of = blocks[by];
    nameOf = by === "stack" ? (id) => stackText(run, id) : (id) => run.strings[id];
  }
  const groups = by === "size" ? MOST_CLASS + 1 : by === "stack" ? run.stacks.length : run.strings.length;
  const made = { by, of, groups, nameOf, used: new Uint8Array(groups) };
  made.colour = coloursByWeight(run, made);
  return made;
}

// Ranks groups by their share of the peak and of the area that they cover over time.
function coloursByWeight(run, { of, groups, used }) {
  const { birth, freed, requested: bytes, count } = run.blocks;
  const atPeak = new Float64Array(groups);
  const area = new Float64Array(groups);
  let [wholePeak, wholeArea] = [1, 1];
  for (let i = 0; i < count; i++) {
    const part = bytes[i] * (Math.min(freed[i], run.end) - birth[i]);
    used[of[i]] = 1;
    area[of[i]] += part;
    wholeArea += part;
    if (birth[i] <= run.peak.t && freed[i] > run.peak.t) {
      atPeak[of[i]] += bytes[i];
      wholePeak += bytes[i];
    }
  }
  const weight = (group) => atPeak[group] / wholePeak + area[group] / wholeArea;
  const ranked = [];
  for (let group = 0; group < groups; group++) if (weight(group) > 0) ranked.push(group);
  ranked.sort((a, b) => weight(b) - weight(a) || a - b);
  const colour = new Uint8Array(groups).fill(OTHERS);
  ranked.slice(0, OTHERS).forEach((group, rank) => { colour[group] = rank; });
  return colour;
}

const groupName = (by, name) => (name === "" ? UNNAMED[by] ?? "unnamed" : plainText(name));
const patternOf = (colour) => (colour === OTHERS ? 0 : colour % PATTERNS);
const groupClass = (colour) => `g${colour} p${patternOf(colour)}`;

function swatch(colour) {
  return make("span", { class: `swatch ${groupClass(colour)}`, "aria-hidden": "true" });
}

// The colour of a group that is known by its name only.
function colourOfName(run, by, name, stack) {
  const { colour, groups, nameOf } = grouping(run, by);
  if (by === "stack") return stack === null || stack === undefined ? OTHERS : colour[stack] ?? OTHERS;
  run.colourNames ??= new Map();
  if (!run.colourNames.has(by)) {
    const names = new Map();
    for (let group = 0; group < groups; group++) {
      if (colour[group] < OTHERS) names.set(nameOf(group), colour[group]);
    }
    run.colourNames.set(by, names);
  }
  return run.colourNames.get(by).get(name) ?? OTHERS;
}

// The groupings that tell anything of these runs.
function usefulGroupings() {
  return GROUPINGS.filter(([by]) => by === "size" || state.runs.some((run) => {
    const column = run.blocks[by];
    return column.some((id) => id !== column[0]) || (column.length > 0 && groupHasName(run, by, column[0]));
  }));
}

function groupHasName(run, by, id) {
  return (by === "stack" ? stackText(run, id) : run.strings[id]) !== "";
}

// Colours of the theme as [r, g, b] for each group.
function themeColours() {
  const style = getComputedStyle(document.documentElement);
  return Array.from({ length: GROUP_COLOURS }, (_, i) => rgbOf(style.getPropertyValue(`--c${i}`)));
}

const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function rgbOf(hex) {
  const number = parseInt(hex.trim().slice(1), 16);
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255];
}
