// Figures as text: bytes in binary units, times, counts, shares.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

// "12.3 GiB": three digits, no zeros that say nothing.
function bytesText(bytes) {
  if (bytes === null || bytes === undefined || Number.isNaN(bytes)) return "–";
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  let text = value.toFixed(digits);
  if (digits > 0) text = text.replace(/\.?0+$/, "");
  return `${bytes < 0 ? "−" : ""}${text} ${UNITS[unit]}`;
}

function signedBytesText(bytes) {
  return bytes > 0 ? `+${bytesText(bytes)}` : bytesText(bytes);
}

const COUNT = new Intl.NumberFormat("en-US");

function countText(count) {
  return count === null || count === undefined ? "–" : COUNT.format(count);
}

function exactBytesText(bytes) {
  return `${countText(bytes)} byte${bytes === 1 ? "" : "s"}`;
}

function plural(count, one, many = `${one}s`) {
  return `${countText(count)} ${count === 1 ? one : many}`;
}

function shareText(part, whole) {
  if (!(whole > 0)) return "–";
  const percent = (100 * part) / whole;
  if (part > 0 && percent < 0.1) return "< 0.1 %";
  const digits = percent < 10 && percent > 0 ? 1 : 0;
  return `${percent.toFixed(digits)} %`;
}

const TIME_UNITS = [[1, "µs"], [1e3, "ms"], [1e6, "s"]];

// A time in microseconds. `step` is the distance that must stay visible: it chooses the digits.
function timeText(us, clock, step = Math.abs(us) / 1000) {
  if (us === null || us === undefined || Number.isNaN(us)) return "–";
  if (us === Infinity) return "never";
  if (clock === "events") return `event ${countText(Math.round(us))}`;
  const size = Math.abs(us);
  // Whole microseconds have no digits behind them.
  if (Number.isInteger(us)) step = Math.max(step, 1);
  const [factor, unit] = TIME_UNITS[size < 1e3 ? 0 : size < 1e6 ? 1 : 2];
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(Math.max(step, 1e-3) / factor) + 1e-9)));
  if (size >= 600e6) {
    const minutes = Math.floor(size / 60e6);
    const seconds = (size / 1e6 - minutes * 60).toFixed(Math.min(digits, 3));
    return `${us < 0 ? "−" : ""}${minutes} min ${seconds} s`;
  }
  return `${us < 0 ? "−" : ""}${(size / factor).toFixed(digits)} ${unit}`;
}

// A length of time.
function spanText(us, clock) {
  if (clock === "events") return us === Infinity ? "never freed" : plural(Math.round(us), "event");
  return timeText(us, clock);
}

// An address: the recorded one, or the offset in a layout that the tool made.
function addressText(run, offset) {
  if (run.addresses === "recorded") {
    const span = run.address_spans.findLast((each) => each.at <= offset);
    try {
      if (span) return `0x${(BigInt(span.start) + BigInt(Math.round(offset - span.at))).toString(16)}`;
    } catch {
      // A start that is no number is shown as an offset.
    }
  }
  return `0x${Math.round(offset).toString(16)}`;
}

const SERIES_WORDS = {
  live: ["live", "requested bytes of blocks between allocation and free"],
  requested: ["requested", "bytes that the program asked for"],
  pending: ["pending", "freed, but still in use by another stream"],
  cached: ["cached", "free, and kept for the next request"],
  physical: ["physical", "taken from the driver"],
  limit: ["limit", "the most that may be taken"],
  free: ["free", "free bytes inside of what was taken"],
  largest_free: ["largest free extent", "the largest request that would fit now"],
  outside: ["outside", "in use on the device beside that: contexts, libraries, other programs"],
  pinned: ["pinned (host)", "pinned host memory, which is not part of the device’s"],
};

const seriesLabel = (name) => (SERIES_WORDS[name] ?? [name])[0];
const seriesMeaning = (name) => (SERIES_WORDS[name] ?? ["", ""])[1];
