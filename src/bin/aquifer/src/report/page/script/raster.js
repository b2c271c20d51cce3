// Draws blocks into pixels, at a cost that is bounded by the number of blocks and of pixels. A block
// of a pixel or more is a rectangle. Smaller ones add their share of a pixel to a density image; thin
// and long ones do so as two entries of a difference (begin and end), summed once for all of them.

const CHUNK = 512;

// For each chunk of blocks what decides whether it can be in view.
function chunksOf(run) {
  if (run.chunks) return run.chunks;
  const { end, offset, bytes, count } = run.blocks;
  const chunks = Math.ceil(count / CHUNK);
  const lastEnd = new Float64Array(chunks).fill(-Infinity);
  const lowest = new Float64Array(chunks).fill(Infinity);
  const highest = new Float64Array(chunks).fill(-Infinity);
  for (let i = 0; i < count; i++) {
    const c = Math.floor(i / CHUNK);
    if (end[i] > lastEnd[c]) lastEnd[c] = end[i];
    if (offset[i] < lowest[c]) lowest[c] = offset[i];
    if (offset[i] + bytes[i] > highest[c]) highest[c] = offset[i] + bytes[i];
  }
  run.chunks = { lastEnd, lowest, highest, count: chunks };
  return run.chunks;
}

// Buffers that are used again for each image of one size.
class Raster {
  resize(width, height) {
    if (this.width === width && this.height === height) return;
    this.width = width;
    this.height = height;
    this.pixels = new Uint32Array(width * height);
    this.across = new Int32Array(width * height * 4); // differences along a row: r, g, b, cover
    this.down = new Int32Array(width * height * 4); // differences along a column
    this.acrossUsed = false;
    this.downUsed = false;
  }

  // Draws what is in view: {t0, t1, a0, a1}. Returns the rectangles that are wide enough for a name.
  draw(run, view, groups, colours, back) {
    const { pixels, width, height } = this;
    pixels.fill(packed(back));
    if (this.acrossUsed) this.across.fill(0);
    if (this.downUsed) this.down.fill(0);
    this.acrossUsed = false;
    this.downUsed = false;
    this.colours = colours;
    this.solid = colours.map(packed);
    this.shaded = colours.map((colour) => packed(blend(colour, [0, 0, 0], 0.28)));
    this.faded = colours.map((colour) => packed(blend(colour, back, 0.6)));
    // Rectangles of a well-formed run do not overlap. The bound holds for others.
    this.areaLeft = width * height * 8;
    this.named = [];
    const { birth, freed, end, offset, bytes, count } = run.blocks;
    const { of, colour } = groups;
    const chunks = chunksOf(run);
    const { t0, t1, a0, a1 } = view;
    if (run.bands?.grid) drawBands(this, run, view, colours[OTHERS], back);
    const perTime = width / (t1 - t0);
    const perByte = height / (a1 - a0);
    for (let c = 0; c < chunks.count; c++) {
      if (birth[c * CHUNK] > t1) break;
      if (chunks.lastEnd[c] < t0 || chunks.highest[c] <= a0 || chunks.lowest[c] >= a1) continue;
      const until = Math.min((c + 1) * CHUNK, count);
      for (let i = c * CHUNK; i < until; i++) {
        const low = offset[i];
        const high = low + bytes[i];
        if (birth[i] > t1 || end[i] < t0 || low >= a1 || high <= a0) continue;
        const left = birth[i] <= t0 ? 0 : (birth[i] - t0) * perTime;
        const right = end[i] >= t1 ? width : (end[i] - t0) * perTime;
        const top = high >= a1 ? 0 : (a1 - high) * perByte;
        const bottom = low <= a0 ? height : (a1 - low) * perByte;
        const hue = colour[of[i]];
        if (right - left >= 1 && bottom - top >= 1 && this.areaLeft > 0) {
          const free = freed[i] >= end[i] || freed[i] >= t1 ? right : Math.max((freed[i] - t0) * perTime, 0);
          this.rectangle(left, right, top, bottom, free, hue, i);
        } else {
          this.small(left, right, top, bottom, hue);
        }
      }
    }
    if (this.acrossUsed || this.downUsed) this.addDensity();
    return this.named;
  }

  rectangle(left, right, top, bottom, free, hue, index) {
    const { pixels, width, height } = this;
    const x0 = Math.min(Math.round(left), width - 1);
    const x1 = Math.min(Math.max(Math.round(right), x0 + 1), width);
    const y0 = Math.min(Math.round(top), height - 1);
    const y1 = Math.min(Math.max(Math.round(bottom), y0 + 1), height);
    const xf = Math.min(Math.max(Math.round(free), x0), x1);
    this.areaLeft -= (x1 - x0) * (y1 - y0);
    const large = x1 - x0 >= 5 && y1 - y0 >= 5;
    const pattern = large ? patternOf(hue) : 0;
    const [solid, shaded, faded] = [this.solid[hue], this.shaded[hue], this.faded[hue]];
    for (let y = y0; y < y1; y++) {
      const row = y * width;
      pixels.fill(solid, row + x0, row + xf);
      if (xf < x1) pixels.fill(faded, row + xf, row + x1);
      if (pattern > 0) this.hatch(pattern, row, x0, xf, y, shaded);
      // A line between blocks that touch.
      if (large) pixels[row + x0] = shaded;
    }
    if (large) pixels.fill(shaded, y0 * width + x0, y0 * width + x1);
    if (x1 - x0 >= 56 && y1 - y0 >= 14) this.named.push({ x0, x1, y0, y1, index });
  }

  hatch(pattern, row, x0, x1, y, shaded) {
    const { pixels } = this;
    if (pattern === 3) {
      if (y % 6 < 2) pixels.fill(shaded, row + x0, row + x1);
      return;
    }
    if (pattern === 5) {
      if (y % 6 > 1) return;
      for (let x = x0; x < x1; x++) if (x % 6 < 2) pixels[row + x] = shaded;
      return;
    }
    const slope = pattern === 1 ? y : pattern === 2 ? -y : 0;
    for (let x = x0; x < x1; x++) if ((((x + slope) % 8) + 8) % 8 < 2) pixels[row + x] = shaded;
  }

  small(left, right, top, bottom, hue) {
    const { width, height, colours } = this;
    const [r, g, b] = colours[hue];
    const tall = bottom - top;
    const long = right - left;
    const x = Math.min(Math.floor(left), width - 1);
    const y = Math.min(Math.floor(top), height - 1);
    if (long >= 1) {
      const cover = Math.min(Math.max(Math.round(Math.min(tall, 1) * 256), 1), 256);
      const x1 = Math.min(Math.max(Math.floor(right), x + 1), width);
      this.acrossUsed = true;
      add(this.across, (y * width + x) * 4, r, g, b, cover);
      if (x1 < width) add(this.across, (y * width + x1) * 4, r, g, b, -cover);
      return;
    }
    const cover = Math.max(Math.round(Math.min(long, 1) * Math.min(tall, 1) * 256), 1);
    const y1 = Math.min(Math.max(Math.floor(bottom), y + 1), height);
    this.downUsed = true;
    add(this.down, (y * width + x) * 4, r, g, b, cover);
    if (y1 < height) add(this.down, (y1 * width + x) * 4, r, g, b, -cover);
  }

  // Sums the differences and lays the result over the rectangles.
  addDensity() {
    const { pixels, across, down, width, height } = this;
    const columns = new Int32Array(width * 4);
    for (let y = 0; y < height; y++) {
      let [r, g, b, cover] = [0, 0, 0, 0];
      for (let x = 0; x < width; x++) {
        const at = (y * width + x) * 4;
        const column = x * 4;
        if (this.acrossUsed) {
          r += across[at];
          g += across[at + 1];
          b += across[at + 2];
          cover += across[at + 3];
        }
        if (this.downUsed) {
          columns[column] += down[at];
          columns[column + 1] += down[at + 1];
          columns[column + 2] += down[at + 2];
          columns[column + 3] += down[at + 3];
        }
        const all = cover + columns[column + 3];
        if (all <= 0) continue;
        // A lone small block stays visible.
        const share = Math.min(Math.max(all / 256, 0.35), 1);
        const under = pixels[at >> 2];
        pixels[at >> 2] = (255 << 24)
          | (mix((b + columns[column + 2]) / all, (under >> 16) & 255, share) << 16)
          | (mix((g + columns[column + 1]) / all, (under >> 8) & 255, share) << 8)
          | mix((r + columns[column]) / all, under & 255, share);
      }
    }
  }
}

function add(sums, at, r, g, b, cover) {
  sums[at] += r * cover;
  sums[at + 1] += g * cover;
  sums[at + 2] += b * cover;
  sums[at + 3] += cover;
}

const mix = (over, under, share) => Math.round(over * share + under * (1 - share));
const blend = (colour, other, share) => colour.map((part, i) => mix(other[i], part, share));
const unpacked = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
