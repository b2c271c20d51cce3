// Bytes over time: uPlot draws what `sampleCurves` gives for the view; labels at the ends of the
// lines, the peak, the markers and the instant are drawn over it.

const GUTTER = 74; // left of both plots, so that their time axes are the same
const LANE = 14; // height of a row of markers or phases
const PHASE_DEPTHS = 3; // rows of phases, the outermost above
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 5], [4, 2], [1, 4], [8, 3, 2, 3, 2, 3], [5, 2, 1, 2]];
const SERIES_ORDER = Object.keys(SERIES_WORDS);
const BYTE_STEPS = Array.from({ length: 56 }, (_, i) => 2 ** i);
const TIME_STEPS = Array.from({ length: 24 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** (i - 9))).flat();

const curves = { list: [], plot: null, lanes: [], depths: 0 };
const endGutter = () => (byId("curves").clientWidth < 560 ? 58 : 112);

function seriesLook(name, run) {
  const index = Math.max(SERIES_ORDER.indexOf(name), 0);
  return {
    colour: `--c${(index + run * 7) % (GROUP_COLOURS - 1)}`,
    dash: DASHES[(index + run * 3) % DASHES.length],
    width: name === "live" ? 2 : 1.4,
  };
}

function listCurves() {
  const two = state.runs.length > 1;
  return state.runs.flatMap((run, index) => run.series.map((series) => ({
    run,
    index,
    series,
    label: two ? `${runLetter(index)} ${seriesLabel(series.name)}` : seriesLabel(series.name),
    look: seriesLook(series.name, index),
    show: two ? series.name === "live" : shownAtFirst(run, series),
  })));
}

// A curve far above all else would flatten the others.
function shownAtFirst(run, series) {
  if (["requested", "free", "largest_free"].includes(series.name)) return false;
  if (!["limit", "outside", "pinned"].includes(series.name)) return true;
  const most = (name) => greatest(run.series.find((each) => each.name === name));
  return greatest(series) <= 2 * Math.max(most("physical"), most("live"));
}

function greatest(series) {
  if (!series) return 0;
  const { max } = series.levels[series.levels.length - 1];
  return max.reduce((a, b) => (b > a ? b : a), 0);
}

// The value of a curve at a time. At the peak it is the exact one: a point of a curve may stand for
// several changes, and several may have the same time.
function figureAt(run, series, t) {
  if (Math.abs(t - run.peak.t) <= runLength(run) * 1e-12) {
    const exact = { ...run.peak, free: run.fragmentation.free, largest_free: run.fragmentation.largest_free }[series.name];
    if (isCount(exact)) return exact;
  }
  return valueAt(series, t);
}

function makeCurves() {
  curves.list = listCurves();
  curves.lanes = MARKER_KINDS.filter((kind) => state.runs.some((run) => run.markers.some((m) => m.kind === kind)));
  const depth = state.runs.flatMap((run) => run.phases).reduce((most, phase) => Math.max(most, phase.depth + 1), 0);
  curves.depths = Math.min(depth, PHASE_DEPTHS);
  curves.plot?.destroy();
  const box = byId("curves");
  const axis = axisLook();
  curves.plot = new uPlot({
    width: box.clientWidth,
    height: box.clientHeight,
    padding: [18 + (curves.lanes.length + curves.depths) * LANE, endGutter(), 0, 0],
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, y: false, points: { show: false } },
    scales: {
      x: { time: false, range: (_, min, max) => [min, max] },
      y: { range: (_, min, max) => [0, max > 0 ? max * 1.02 : 1] },
    },
    axes: [
      { ...axis, incrs: TIME_STEPS, space: 90, values: (_, at, __, ___, step) => at.map((x) => axisText(x, step)) },
      { ...axis, incrs: BYTE_STEPS, size: GUTTER, space: 36, values: (_, at) => at.map(bytesText) },
    ],
    series: [{}, ...curves.list.map(({ look, show, label }) => ({
      label, show, stroke: themeColour(look.colour), width: look.width, dash: look.dash, spanGaps: true,
      paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
    }))],
    hooks: {
      draw: [drawOverCurves],
      setCursor: [(plot) => cursorMoved(plot)],
      setSelect: [(plot) => selectedRange(plot)],
    },
  }, sampled(), box);
  addGestures(curves.plot.over, {
    xAt: (event) => eventX(curves.plot, event),
    yAt: () => 0,
    tap: (x) => {
      setCursor(x);
      setInstant(x);
    },
  });
}

function axisLook() {
  const line = { stroke: themeColour("--line"), width: 1 };
  return { stroke: themeColour("--soft"), grid: line, ticks: { ...line, size: 5 }, font: "12px system-ui, sans-serif" };
}

const eventX = (plot, event) => plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x");

function sampled() {
  const columns = Math.max(byId("curves").clientWidth - GUTTER - endGutter(), 50);
  return sampleCurves(curves.list, state.view, columns);
}

// The pointer moved over a plot: the other one follows.
let movesCursor = false;
function cursorMoved(plot) {
  if (movesCursor) return;
  const { left } = plot.cursor;
  if (left >= 0) setCursor(plot.posToVal(left, "x"));
}

function showCursor(plot) {
  movesCursor = true;
  const x = state.cursor;
  const left = x === null || x < state.view.x0 || x > state.view.x1 ? -10 : plot.valToPos(x, "x");
  if (Math.abs((plot.cursor.left ?? -10) - left) > 0.5) plot.setCursor({ left, top: left < 0 ? -10 : plot.cursor.top ?? 0 }, false);
  movesCursor = false;
}

function selectedRange(plot) {
  const { left, width } = plot.select;
  if (width < 3) return;
  const [x0, x1] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  lastGesture = performance.now();
  setView(x0, x1);
}

function redrawCurves() {
  const { plot, list } = curves;
  plot.batch(() => {
    list.forEach(({ show }, i) => {
      if (plot.series[i + 1].show !== show) plot.setSeries(i + 1, { show });
    });
    plot.setData(sampled(), false);
    plot.setScale("x", { min: state.view.x0, max: state.view.x1 });
  });
  Object.assign(byId("curves").dataset, state.view);
}

function drawOverCurves(plot) {
  const { ctx: context } = plot;
  const scale = uPlot.pxRatio;
  const { left, top, width, height } = plot.bbox;
  byId("curves").dataset.top = plot.scales.y.max;
  context.save();
  context.font = `${12 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  drawEndLabels(plot, context, scale);
  state.runs.forEach((run, index) => {
    drawMoment(plot, context, scale, toX(run, run.peak.t), "--peak", [5, 4],
      `${runLetter(index)} peak ${bytesText(run.peak.live)}`.trim(), index);
  });
  if (!state.instant.peak) {
    drawMoment(plot, context, scale, toX(shownRun(), state.instant.t), "--accent", [], "shown below", state.runs.length);
  }
  context.beginPath();
  context.rect(left - 8 * scale, 0, width + 16 * scale, top + height);
  context.clip();
  drawMarkers(plot, context, scale);
  drawPhases(plot, context, scale);
  context.restore();
}

// Phases of the shown run: a row for each depth, directly above the plot, so that their ends stand over the time axis.
function drawPhases(plot, context, scale) {
  const run = shownRun();
  const { left, top, width } = plot.bbox;
  const place = (t) => Math.min(Math.max(plot.valToPos(toX(run, t), "x", true), left), left + width);
  context.textAlign = "left";
  context.lineWidth = scale;
  for (const { t, end, depth, text } of run.phases) {
    const [from, to] = [place(t), place(end)];
    if (depth >= curves.depths || toX(run, end) < state.view.x0 || toX(run, t) > state.view.x1) continue;
    const y = top + ((depth - curves.depths) * LANE - 4) * scale;
    const wide = Math.max(to - from, scale);
    context.fillStyle = themeColour("--raised");
    context.strokeStyle = themeColour("--line");
    context.fillRect(from, y, wide, (LANE - 1) * scale);
    context.strokeRect(from, y, wide, (LANE - 1) * scale);
    if (wide < 24 * scale) continue;
    context.save();
    context.beginPath();
    context.rect(from, y, wide - 2 * scale, LANE * scale);
    context.clip();
    context.fillStyle = themeColour("--text");
    context.fillText(plainText(text), from + 4 * scale, y + (LANE / 2) * scale);
    context.restore();
  }
}

// The phases at the cursor, else those at the peak.
function showPhase() {
  const run = shownRun();
  const t = state.cursor === null ? run.peak.t : toTime(run, state.cursor);
  const inside = run.phases.filter((phase) => phase.t <= t && t <= phase.end).sort((a, b) => a.depth - b.depth);
  byId("phase").hidden = run.phases.length === 0;
  byId("phase").textContent = `Phase at the ${state.cursor === null ? "peak" : "cursor"}: ${inside.map((phase) => plainText(phase.text)).join(" › ") || "none"}`;
}

function drawMoment(plot, context, scale, x, colour, dash, text, row) {
  if (x < state.view.x0 || x > state.view.x1) return;
  const { left, top, width, height } = plot.bbox;
  const at = Math.round(plot.valToPos(x, "x", true));
  context.strokeStyle = context.fillStyle = themeColour(colour);
  context.lineWidth = scale;
  context.setLineDash(dash.map((part) => part * scale));
  context.beginPath();
  context.moveTo(at, top);
  context.lineTo(at, top + height);
  context.stroke();
  context.setLineDash([]);
  const wide = context.measureText(text).width;
  const right = at + wide + 6 * scale < left + width;
  context.textAlign = right ? "left" : "right";
  const y = top + (9 + row * 15) * scale;
  context.globalAlpha = 0.8;
  const from = right ? at + 2 * scale : at - wide - 6 * scale;
  context.fillStyle = themeColour("--back");
  context.fillRect(from, y - 7 * scale, wide + 4 * scale, 14 * scale);
  context.globalAlpha = 1;
  context.fillStyle = themeColour(colour);
  context.fillText(text, right ? at + 4 * scale : at - 4 * scale, y);
}

// Names of the curves where their lines end, moved apart where they would overlap.
function drawEndLabels(plot, context, scale) {
  const { left, top, width, height } = plot.bbox;
  const labels = curves.list.filter((curve) => curve.show).map((curve) => {
    const value = valueAt(curve.series, toTime(curve.run, state.view.x1));
    return { ...curve, y: value === null ? null : plot.valToPos(value, "y", true) };
  }).filter((label) => label.y !== null).sort((a, b) => a.y - b.y);
  let least = top + 6 * scale;
  for (const label of labels) {
    label.y = Math.max(label.y, least);
    least = label.y + 14 * scale;
  }
  let most = top + height - 4 * scale;
  for (const label of labels.toReversed()) {
    label.y = Math.min(label.y, most);
    most = label.y - 14 * scale;
  }
  context.textAlign = "left";
  const room = (endGutter() - 8) * scale;
  for (const label of labels) {
    context.fillStyle = themeColour(label.look.colour);
    context.fillText(label.label, left + width + 6 * scale, label.y, room);
  }
}

function drawMarkers(plot, context, scale) {
  curves.lanes.forEach((kind, lane) => {
    context.fillStyle = themeColour(glyphColour(kind));
    const y = (lane * LANE + LANE / 2 + 2) * scale;
    for (const run of state.runs) {
      let last = -Infinity;
      for (const marker of run.markers) {
        const x = toX(run, marker.t);
        if (marker.kind !== kind || x < state.view.x0 || x > state.view.x1) continue;
        const at = plot.valToPos(x, "x", true);
        if (at - last < 5 * scale) continue;
        last = at;
        drawGlyph(context, kind, at, y, 5 * scale);
      }
    }
  });
}

// The legend is a table: each curve with its line, a switch, and its figures.
function showCurvesTable() {
  const rows = curves.list.map((curve) => ({
    curve, label: curve.label, peak: figureAt(curve.run, curve.series, curve.run.peak.t), most: greatest(curve.series),
    ending: valueAt(curve.series, Infinity), cursor: null,
    dataset: { series: curve.series.name, run: curve.index },
  }));
  const cell = ({ curve }) => {
    const box = make("input", { type: "checkbox", onchange: () => {
      curve.show = box.checked;
      announce("series");
    } });
    box.checked = curve.show;
    return make("label", { class: "series", title: seriesMeaning(curve.series.name) }, box, lineSample(curve.look), curve.label);
  };
  fill(byId("curves-table"), sortableTable({
    label: "Curves",
    columns: [
      { key: "label", label: "Curve", cell }, bytesColumn("cursor", "Cursor"), bytesColumn("peak", "Peak"),
      bytesColumn("most", "Greatest"), { ...bytesColumn("ending", "End"), wide: true },
    ],
    rows,
  }));
}

function lineSample(look) {
  const svg = svgElement("svg", { viewBox: "0 0 34 12", class: "sample", "aria-hidden": "true" });
  svg.append(svgElement("line", {
    x1: 0, y1: 6, x2: 34, y2: 6, stroke: `var(${look.colour})`, "stroke-width": look.width + 0.4,
    "stroke-dasharray": look.dash.join(" "),
  }));
  return svg;
}

function showCursorFigures() {
  for (const row of byId("curves-table").querySelectorAll("tbody tr")) {
    const run = state.runs[row.dataset.run];
    const series = run.series.find((each) => each.name === row.dataset.series);
    const value = state.cursor === null ? null : figureAt(run, series, toTime(run, state.cursor));
    const cell = row.children[1];
    cell.textContent = bytesText(value);
    cell.title = value === null ? "" : exactBytesText(value);
    cell.dataset.value = value ?? "";
  }
}

function showMarkerLegend() {
  fill(byId("marker-legend"), ...curves.lanes.map((kind) => {
    const count = state.runs.reduce((sum, run) => sum + run.markers.filter((m) => m.kind === kind).length, 0);
    return make("span", {}, glyph(kind), `${countText(count)} ${markerWords(kind, count)}`);
  }));
}

function startCurves() {
  makeCurves();
  showCurvesTable();
  showMarkerLegend();
  showPhase();
  on("view series", redrawCurves);
  on("cursor view", () => showCursor(curves.plot));
  on("cursor", showCursorFigures);
  on("cursor run", showPhase);
  on("instant run", () => curves.plot.redraw(false, false));
  on("resize theme", makeCurvesAgain);
}

// Anew in another size or theme, with the same curves switched on.
function makeCurvesAgain() {
  const shown = curves.list.map((curve) => curve.show);
  makeCurves();
  curves.list.forEach((curve, i) => { curve.show = shown[i]; });
  showCurvesTable();
  redrawCurves();
  showCursorFigures();
}
