// Addresses over time: uPlot draws the axes, the raster the blocks. While a gesture lasts and an
// image takes too long, the last image is stretched, and the exact one follows.

const map = { plot: null, raster: new Raster(), image: null, cost: 0, timer: 0 };
const FRAME_BUDGET = 12; // ms for an image in the midst of a gesture

const addressView = () => state.addresses ?? { a0: 0, a1: Math.max(shownRun().address_height, 1) };

function setAddresses(a0, a1) {
  const whole = Math.max(shownRun().address_height, 1);
  const length = Math.min(Math.max(a1 - a0, 64), whole);
  const low = Math.min(Math.max((a0 + a1) / 2 - length / 2, 0), whole - length);
  state.addresses = length >= whole ? null : { a0: low, a1: low + length };
  announce("view");
}

function makeMap() {
  const box = byId("map");
  map.plot?.destroy();
  map.image = null;
  const axis = { ...axisLook(), grid: { show: false } };
  map.plot = new uPlot({
    width: box.clientWidth,
    height: box.clientHeight,
    padding: [8, endGutter(), 0, 0],
    legend: { show: false },
    cursor: { drag: { x: true, y: true, uni: 24, setScale: false }, points: { show: false } },
    scales: {
      x: { time: false, range: (_, min, max) => [min, max] },
      y: { range: () => [addressView().a0, addressView().a1] },
    },
    axes: [
      { ...axis, incrs: TIME_STEPS, space: 90, values: (_, at, __, ___, step) => at.map((x) => axisText(x, step)) },
      { ...axis, incrs: BYTE_STEPS, size: GUTTER, space: 36, values: (_, at) => at.map(bytesText) },
    ],
    series: [{}, { show: true, paths: () => null, points: { show: false } }],
    hooks: {
      draw: [drawMap],
      setCursor: [(plot) => {
        cursorMoved(plot);
        hover(plot);
      }],
      setSelect: [selectedArea],
    },
  }, mapRows(), box);
  addGestures(map.plot.over, {
    xAt: (event) => eventX(map.plot, event),
    yAt: (event) => map.plot.posToVal(event.clientY - map.plot.over.getBoundingClientRect().top, "y"),
    zoomY: zoomAddresses,
    tap: (x, y) => {
      pinBlock(x, y);
      setCursor(x);
      setInstant(x);
    },
  });
}

const mapRows = () => [[state.view.x0, state.view.x1], [0, addressView().a1]];

function zoomAddresses(factor, at) {
  const { a0, a1 } = addressView();
  setAddresses(at - (at - a0) * factor, at + (a1 - at) * factor);
}

function selectedArea(plot) {
  const { top, height } = plot.select;
  const whole = plot.over.clientHeight;
  if (height > 3 && height < whole - 1 && plot.select.width > 0) {
    setAddresses(plot.posToVal(top + height, "y"), plot.posToVal(top, "y"));
  }
  if (plot.select.width < plot.over.clientWidth - 1) selectedRange(plot);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

function redrawMap() {
  const { a0, a1 } = addressView();
  map.plot.batch(() => {
    map.plot.setData(mapRows(), false);
    map.plot.setScale("x", { min: state.view.x0, max: state.view.x1 });
    map.plot.setScale("y", { min: a0, max: a1 });
  });
  Object.assign(byId("map").dataset, { a0, a1 });
}

function drawMap(plot) {
  const { ctx: context } = plot;
  const { left, top, width, height } = plot.bbox;
  const run = shownRun();
  const view = { ...state.view, ...addressView(), run: state.run, by: state.by, width, height };
  const same = map.image && Object.keys(view).every((key) => map.image.view[key] === view[key]);
  const stretches = map.image && map.image.view.run === view.run && map.image.view.by === view.by;
  if (!same && stretches && gestureLasts() && map.cost > FRAME_BUDGET) {
    clearTimeout(map.timer);
    map.timer = setTimeout(() => map.plot.redraw(false, false), 130);
  } else if (!same) {
    newImage(view, run);
  }
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.fillStyle = themeColour("--raised");
  context.fillRect(left, top, width, height);
  drawImage(context, plot, view);
  drawOverMap(context, plot, run);
  context.restore();
}

// Draws at the resolution of the page: finer ones cost more than they show.
function newImage(view, run) {
  const began = performance.now();
  const scale = uPlot.pxRatio;
  const [width, height] = [Math.max(Math.round(view.width / scale), 1), Math.max(Math.round(view.height / scale), 1)];
  map.raster.resize(width, height);
  const times = { t0: toTime(run, view.x0), t1: toTime(run, view.x1), a0: view.a0, a1: view.a1 };
  const back = rgbOf(themeColour("--raised"));
  const named = map.raster.draw(run, times, grouping(run, view.by), themeColours(), back);
  const canvas = new OffscreenCanvas(width, height);
  const bytes = new Uint8ClampedArray(map.raster.pixels.buffer);
  canvas.getContext("2d").putImageData(new ImageData(bytes, width, height), 0, 0);
  map.image = { canvas, view, named, width, height };
  map.cost = performance.now() - began;
}

function drawImage(context, plot, view) {
  const { canvas, view: drawn, named, width, height } = map.image;
  const left = plot.valToPos(drawn.x0, "x", true);
  const right = plot.valToPos(drawn.x1, "x", true);
  const top = plot.valToPos(drawn.a1, "y", true);
  const bottom = plot.valToPos(drawn.a0, "y", true);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, left, top, right - left, bottom - top);
  if (drawn.x0 !== view.x0 || drawn.x1 !== view.x1 || drawn.a0 !== view.a0 || drawn.a1 !== view.a1) return;
  const { of, nameOf } = grouping(shownRun(), state.by);
  const [sx, sy] = [(right - left) / width, (bottom - top) / height];
  const back = themeColour("--back");
  const text = themeColour("--text");
  context.font = `${11 * uPlot.pxRatio}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  named.sort((a, b) => (b.x1 - b.x0) * (b.y1 - b.y0) - (a.x1 - a.x0) * (a.y1 - a.y0));
  for (const { x0, x1, y0, y1, index } of named.slice(0, 40)) {
    const name = groupName(state.by, nameOf(of[index]));
    const room = (x1 - x0) * sx - 8;
    const wide = context.measureText(name).width;
    if (wide > room - 6) continue;
    const [x, y] = [left + x0 * sx + 4, top + ((y0 + y1) / 2) * sy];
    context.globalAlpha = 0.82;
    context.fillStyle = back;
    context.fillRect(x, y - 7 * uPlot.pxRatio, wide + 6, 14 * uPlot.pxRatio);
    context.globalAlpha = 1;
    context.fillStyle = text;
    context.fillText(name, x + 3, y);
  }
}

// What changes without a new image: the ends of recorded ranges, the peak, the instant, the block.
function drawOverMap(context, plot, run) {
  const scale = uPlot.pxRatio;
  const { left, top, width, height } = plot.bbox;
  const line = (x0, y0, x1, y1, colour, dash) => {
    context.strokeStyle = themeColour(colour);
    context.lineWidth = scale;
    context.setLineDash(dash.map((part) => part * scale));
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  };
  for (const span of run.address_spans.slice(1)) {
    const y = Math.round(plot.valToPos(span.at, "y", true));
    if (y > top && y < top + height) line(left, y, left + width, y, "--line", []);
  }
  const peak = Math.round(plot.valToPos(toX(run, run.peak.t), "x", true));
  line(peak, top, peak, top + height, "--peak", [5, 4]);
  if (!state.instant.peak) {
    const x = Math.round(plot.valToPos(toX(run, state.instant.t), "x", true));
    line(x, top, x, top + height, "--accent", []);
  }
  const marked = markedArea();
  if (marked) {
    const place = (t) => plot.valToPos(Math.min(Math.max(toX(run, t), state.view.x0), state.view.x1), "x", true);
    const [x0, x1] = [place(marked.t0), place(marked.t1)];
    const [y0, y1] = [plot.valToPos(marked.a1, "y", true), plot.valToPos(marked.a0, "y", true)];
    context.setLineDash([]);
    for (const [colour, wide] of [["--back", 5], ["--text", 2]]) {
      context.strokeStyle = themeColour(colour);
      context.lineWidth = wide * scale;
      context.strokeRect(x0 - 2, y0 - 2, Math.max(x1 - x0, 2) + 4, Math.max(y1 - y0, 2) + 4);
    }
  }
}

// Times and offsets of the selected block or cell; null without one.
function markedArea() {
  const run = shownRun();
  const { birth, end, offset, bytes } = run.blocks;
  const i = state.selected;
  if (i >= 0) return { t0: birth[i], t1: end[i], a0: offset[i], a1: offset[i] + bytes[i] };
  return state.cell >= 0 ? bandCell(run, state.cell) : null;
}

// The pointer shows the block or the merged blocks under it, until a click keeps them.
let pinned = false;
function hover(plot) {
  if (pinned || movesCursor || plot.cursor.left < 0) return;
  const { index, cell } = findAt(plot.posToVal(plot.cursor.left, "x"), plot.posToVal(plot.cursor.top, "y"));
  if (index < 0 && cell < 0) return;
  if (index !== state.selected || cell !== state.cell) select(index, cell);
}

function findAt(x, y) {
  const run = shownRun();
  const { a0, a1 } = addressView();
  const { x0, x1 } = state.view;
  const slackX = ((x1 - x0) * 4) / map.plot.over.clientWidth;
  const slackTime = toTime(run, x + slackX) - toTime(run, x);
  const t = toTime(run, x);
  const index = blockAt(run, t, y, slackTime, ((a1 - a0) * 4) / map.plot.over.clientHeight);
  const cell = bandCellAt(run, t, y);
  // What is under the pointer comes before a block that is near.
  const { birth, end, offset, bytes } = run.blocks;
  const isNear = index >= 0 && !(birth[index] <= t && t < end[index] && offset[index] <= y && y < offset[index] + bytes[index]);
  return index >= 0 && !(isNear && cell >= 0) ? { index, cell: -1 } : { index: -1, cell };
}

// A click keeps the block under the pointer in the panel; one beside all blocks lets it go.
function pinBlock(x, y) {
  const { index, cell } = findAt(x, y);
  pinned = index >= 0 || cell >= 0;
  select(index, cell);
}

// Selects the largest block of the instant.
function selectLargest() {
  const [largest] = largestAt(shownRun(), state.instant.t, 1);
  if (largest !== undefined) showBlock(largest);
}

// Selects a block and brings it into view.
function showBlock(index) {
  const run = shownRun();
  const { birth, end, offset, bytes } = run.blocks;
  const { x0, x1 } = state.view;
  const from = toX(run, birth[index]);
  const to = toX(run, Math.min(end[index], run.end));
  pinned = true;
  if (to < x0 || from > x1) reveal((from + to) / 2);
  const { a0, a1 } = addressView();
  const middle = offset[index] + bytes[index] / 2;
  if (offset[index] + bytes[index] <= a0 || offset[index] >= a1) setAddresses(middle - (a1 - a0) / 2, middle + (a1 - a0) / 2);
  select(index, -1);
}

function showMapLegend() {
  const run = shownRun();
  byId("map-title").textContent = `Addresses over time${ofRun()}`;
  const { colour, groups, nameOf, used } = grouping(run, state.by);
  const entries = [];
  let others = 0;
  for (let group = 0; group < groups; group++) {
    if (!used[group]) continue;
    if (colour[group] === OTHERS) others += 1;
    else entries.push([colour[group], groupName(state.by, nameOf(group))]);
  }
  entries.sort((a, b) => a[0] - b[0]);
  if (others > 0) entries.push([OTHERS, plural(others, "other")]);
  const merged = run.bands
    ? [`${run.bands.grid ? "" : "not drawn: "}${plural(run.bands.count, "block")} below ${bytesText(run.bands.below)}, merged into bands`] : [];
  fill(byId("map-legend"), ...entries.map(([hue, name]) => make("span", {}, swatch(hue), name)),
    ...merged.map((text) => make("span", {}, make("span", { class: "swatch bands", "aria-hidden": "true" }), text)));
}

function startMap() {
  makeMap();
  showMapLegend();
  on("view run", redrawMap);
  on("cursor view", () => showCursor(map.plot));
  on("by run", showMapLegend);
  on("by instant selected", () => map.plot.redraw(false, false));
  on("resize theme", () => {
    makeMap();
    redrawMap();
  });
}
