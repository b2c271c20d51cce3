// What the parts of the page share: the runs, the part of the time axis in view, the cursor, the
// instant that is looked at, the selected block. A change is announced by topic.

const state = {
  header: null,
  runs: [], // one, or the two that are compared
  comparison: null,
  run: 0, // the run whose addresses and instant are shown
  alignment: "time", // or "relative": each run from 0 to 1
  full: { x0: 0, x1: 1 },
  view: { x0: 0, x1: 1 },
  addresses: null, // {a0, a1}, or all of them
  cursor: null, // where the cursor is on the time axis
  instant: { peak: true, t: 0 },
  follow: false,
  by: "tag",
  selected: -1,
  cell: -1, // of merged blocks, instead of a block
};

const listeners = new Map();

function on(topics, listener) {
  for (const topic of topics.split(" ")) {
    if (!listeners.has(topic)) listeners.set(topic, []);
    listeners.get(topic).push(listener);
  }
}

// Listeners run once before the next frame, however often their topic is announced until then.
const announced = new Set();

function announce(topic) {
  if (announced.size === 0) requestAnimationFrame(deliver);
  announced.add(topic);
}

function deliver() {
  const called = new Set();
  const topics = [...announced];
  announced.clear();
  for (const topic of topics) {
    for (const listener of listeners.get(topic) ?? []) called.add(listener);
  }
  for (const listener of called) listener();
}

const shownRun = () => state.runs[state.run];
const runLetter = (index) => (state.runs.length > 1 ? "AB"[index] : "");
const ofRun = (index = state.run) => (state.runs.length > 1 ? ` of ${runLetter(index)}` : "");
const runLength = (run) => Math.max(run.end - run.start, run.clock === "events" ? 1 : 1e-3);

// Times of a run and places on the shared axis.
function toX(run, t) {
  return state.alignment === "relative" ? (t - run.start) / runLength(run) : t;
}

function toTime(run, x) {
  return state.alignment === "relative" ? run.start + x * runLength(run) : x;
}

// A place on the axis in words; `step` is the distance that must stay visible.
function axisText(x, step) {
  if (state.alignment !== "relative") return timeText(x, shownRun().clock, step);
  const digits = Math.max(0, -Math.floor(Math.log10(Math.max(step * 100, 1e-9))));
  return `${(x * 100).toFixed(Math.min(digits, 7))} %`;
}

function setAlignment(alignment) {
  state.alignment = alignment;
  const starts = state.runs.map((run) => toX(run, run.start));
  const ends = state.runs.map((run) => toX(run, run.start + runLength(run)));
  state.full = { x0: Math.min(...starts), x1: Math.max(...ends) };
  state.view = { ...state.full };
  state.cursor = null;
  announce("view");
  announce("cursor");
}

// The narrowest view: numbers must still tell its ends apart.
const narrowest = () => Math.max((state.full.x1 - state.full.x0) * 1e-9, Math.abs(state.full.x1) * 1e-13);

function setView(x0, x1) {
  const { full } = state;
  const whole = full.x1 - full.x0;
  const length = Math.min(Math.max(x1 - x0, narrowest()), whole);
  const middle = (x0 + x1) / 2;
  const from = Math.min(Math.max(middle - length / 2, full.x0), full.x1 - length);
  if (from === state.view.x0 && from + length === state.view.x1) return;
  state.view = { x0: from, x1: from + length };
  announce("view");
}

function zoomAt(x, factor) {
  const { x0, x1 } = state.view;
  const length = Math.min((x1 - x0) * factor, state.full.x1 - state.full.x0);
  const share = (x - x0) / (x1 - x0);
  setView(x - share * length, x + (1 - share) * length);
}

function pan(share) {
  const { x0, x1 } = state.view;
  const by = (x1 - x0) * share;
  setView(x0 + by, x1 + by);
}

function setCursor(x) {
  state.cursor = x === null ? null : Math.min(Math.max(x, state.full.x0), state.full.x1);
  announce("cursor");
  if (state.follow && x !== null) setInstant(state.cursor);
}

// Brings a place into view, without a change of scale.
function reveal(x) {
  const { x0, x1 } = state.view;
  if (x < x0 || x > x1) setView(x - (x1 - x0) / 2, x + (x1 - x0) / 2);
}

function setInstant(x) {
  state.instant = { peak: false, t: toTime(shownRun(), x) };
  announce("instant");
}

function setInstantToPeak() {
  state.follow = false;
  state.instant = { peak: true, t: shownRun().peak.t };
  announce("instant");
}

function jumpToPeak() {
  const x = toX(shownRun(), shownRun().peak.t);
  reveal(x);
  setCursor(x);
  setInstantToPeak();
}

function select(index, cell = -1) {
  state.selected = index;
  state.cell = cell;
  announce("selected");
}

function chooseRun(index) {
  state.run = index;
  state.addresses = null;
  state.selected = -1;
  state.cell = -1;
  setInstantToPeak();
  for (const topic of ["run", "view", "cursor", "selected"]) announce(topic);
}
