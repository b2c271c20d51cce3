// Curves at the resolution of the screen: of each curve's pyramid the level that fits the view, and
// of that the least, greatest and last value in each column of pixels. No peak is lost by it.

// The first place whose time is after t.
function after(times, t) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The value that holds at a time. Null before the first one, and while a limit is removed.
function valueAt(series, t) {
  const finest = series.levels[0];
  const place = after(finest.t, t) - 1;
  return place < 0 ? null : known(finest.last[place]);
}

const known = (value) => (Number.isNaN(value) ? null : value);

// The place in `level` at which the view begins: the last point at or before it.
function beginIn(level, t) {
  return Math.max(after(level.t, t) - 1, 0);
}

// Chooses the coarsest level with enough points for the columns.
function levelFor(series, t0, t1, columns) {
  for (let i = series.levels.length - 1; i > 0; i--) {
    const level = series.levels[i];
    if (after(level.t, t1) - beginIn(level, t0) >= columns * 2) return level;
  }
  return series.levels[0];
}

// Rows for uPlot: [xs, ys of the first curve, …]. Each place on the axis has three rows (least,
// greatest, last), so that steps and spikes are drawn as they are. `curves` is [{run, series, show}].
function sampleCurves(curves, { x0, x1 }, columns) {
  const shown = curves.filter((curve) => curve.show);
  const windows = shown.map(({ run, series }) => {
    const [t0, t1] = [toTime(run, x0), toTime(run, x1)];
    const level = levelFor(series, t0, t1, columns);
    return { run, level, at: beginIn(level, t0), end: after(level.t, t1), value: null };
  });
  const points = windows.reduce((sum, each) => sum + each.end - each.at, 0);
  const places = points < columns * 2 ? exactPlaces(windows, x0, x1) : gridPlaces(x0, x1, columns);
  const xs = new Float64Array(places.length * 3);
  places.forEach((x, i) => xs.fill(x, i * 3, i * 3 + 3));
  const rows = windows.map((each) => sampleOne(each, places));
  let next = 0;
  return [xs, ...curves.map((curve) => (curve.show ? rows[next++] : [null]))];
}

function exactPlaces(windows, x0, x1) {
  const places = new Set([x0, x1]);
  for (const { run, level, at, end } of windows) {
    for (let i = at; i < end; i++) {
      const x = toX(run, level.t[i]);
      if (x > x0 && x < x1) places.add(x);
    }
  }
  return Float64Array.from(places).sort();
}

function gridPlaces(x0, x1, columns) {
  return Float64Array.from({ length: columns + 1 }, (_, i) => x0 + ((x1 - x0) * i) / columns);
}

// A place stands for what happened from there up to the next one.
function sampleOne({ run, level, at, end }, places) {
  const ys = new Array(places.length * 3).fill(null);
  const { t, min, max, last } = level;
  const ending = toX(run, run.end);
  let value = null;
  let i = at;
  // What came before the view counts by its last value only.
  if (i < end && t[i] < toTime(run, places[0])) value = known(last[i++]);
  for (let p = 0; p < places.length; p++) {
    const until = p + 1 < places.length ? toTime(run, places[p + 1]) : Infinity;
    let [least, most] = [value, value];
    // The first of all points counts in the first place, whatever rounding has done to its time.
    while (i < end && (t[i] < until || p + 1 === places.length)) {
      if (least === null || min[i] < least) least = min[i];
      if (most === null || max[i] > most) most = max[i];
      value = known(last[i++]);
    }
    // Behind the end of its run a curve is not drawn.
    if (p > 0 && places[p - 1] >= ending) continue;
    ys[p * 3] = known(least);
    ys[p * 3 + 1] = known(most);
    ys[p * 3 + 2] = value;
  }
  return ys;
}
