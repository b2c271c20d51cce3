// Merged blocks: cells of equal address ranges (rows, only those in use) and equal times (columns),
// each with the number of blocks in it and the share of it that they occupy.

const bandTime = (run, column) => (column * (run.end || 1)) / run.bands.grid.columns;

// The row that begins last at or before an offset; -1 before the first.
const bandRow = (grid, a) => after(grid.rows, a) - 1;

// The number of the cell with merged blocks at a time and an offset; -1 without one.
function bandCellAt(run, t, a) {
  const grid = run.bands?.grid;
  if (!grid || t < 0 || t > run.end) return -1;
  const row = bandRow(grid, a);
  if (row < 0 || a >= grid.rows[row] + grid.row_bytes) return -1;
  const column = Math.min(Math.floor((t * grid.columns) / (run.end || 1)), grid.columns - 1);
  const cell = row * grid.columns + column;
  return grid.counts[cell] > 0 ? cell : -1;
}

// What a cell holds and where it lies.
function bandCell(run, cell) {
  const { columns, rows, row_bytes: bytes, counts, shares } = run.bands.grid;
  const [row, column] = [Math.floor(cell / columns), cell % columns];
  return {
    a0: rows[row], a1: Math.min(rows[row] + bytes, run.address_height), t0: bandTime(run, column),
    t1: bandTime(run, column + 1), count: counts[cell], share: shares[cell] / 255,
  };
}

// Draws the cells in view into the pixels of a raster: the denser the more occupied, with a hatch
// finer than that of any group, through which the ground shows.
function drawBands(raster, run, { t0, t1, a0, a1 }, colour, back) {
  const { pixels, width, height } = raster;
  const grid = run.bands.grid;
  const { rows, row_bytes: bytes, columns, counts, shares } = grid;
  const perTime = width / (t1 - t0);
  const perByte = height / (a1 - a0);
  const perColumn = columns / (run.end || 1);
  const first = Math.max(Math.floor(t0 * perColumn), 0);
  const last = Math.min(Math.ceil(t1 * perColumn), columns);
  const ground = packed(back);
  // Pixels at which each column begins; at least one pixel for each.
  const begins = Int32Array.from({ length: last - first + 1 }, (_, i) => {
    const x = (bandTime(run, first + i) - t0) * perTime;
    return Math.min(Math.max(Math.round(x), 0), width);
  });
  // Colours by share, for rows of one height.
  const strength = (share, cover) => (0.3 + (0.6 * share) / 255) * cover;
  const tables = new Map();
  const tableOf = (cover) => {
    if (!tables.has(cover)) {
      tables.set(cover, Uint32Array.from({ length: 256 }, (_, share) => packed(blend(back, colour, strength(share, cover)))));
    }
    return tables.get(cover);
  };
  for (let row = Math.max(bandRow(grid, a0), 0); row < rows.length && rows[row] < a1; row++) {
    if (rows[row] + bytes <= a0) continue;
    const top = Math.max((a1 - rows[row] - bytes) * perByte, 0);
    const bottom = Math.min((a1 - rows[row]) * perByte, height);
    const y0 = Math.min(Math.floor(top), height - 1);
    const y1 = Math.min(Math.max(Math.round(bottom), y0 + 1), height);
    // A row thinner than a pixel is paler, as small blocks are.
    const cover = Math.min(Math.max(Math.round((bottom - top) * 20) / 20, 0.35), 1);
    const table = tableOf(cover);
    for (let column = first; column < last; column++) {
      const cell = row * columns + column;
      if (counts[cell] === 0) continue;
      const x0 = Math.min(begins[column - first], width - 1);
      const x1 = Math.max(begins[column - first + 1], x0 + 1);
      const share = shares[cell];
      for (let y = y0; y < y1; y++) {
        for (let x = x0; x < x1; x++) {
          if (((x + y) & 3) === 0) continue;
          const at = y * width + x;
          if (pixels[at] === ground) pixels[at] = table[share];
          else pixels[at] = packed(blend(unpacked(pixels[at]), colour, strength(share, cover)));
        }
      }
    }
  }
}
