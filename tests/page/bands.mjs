// Merged blocks on the address map: they are drawn where they lie, and pointing at a cell tells how many there are.

import { execFileSync } from "node:child_process";
import { statSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pageOf, readPage } from "./assemble.mjs";
import { OUT, close, dataOf, open, plotBox, settle, textOf } from "./browser.mjs";
import { madeHeader, madeRun, merged } from "./made.mjs";

const CELLS = 6;
// A pointer this close to a block shows the block, unless a cell is under it.
const NEAR = 6;

// Blocks of a run that are in an area at any time.
function countIn({ blocks }, { t0, t1, a0, a1 }) {
  let count = 0;
  for (let i = 0; i < blocks.birth.length; i++) {
    const together = blocks.birth[i] < t1 && (blocks.end[i] > t0 || blocks.birth[i] >= t0);
    if (together && blocks.offset[i] < a1 && blocks.offset[i] + blocks.bytes[i] > a0) count += 1;
  }
  return count;
}

function areaOf({ bands, end, address_height: height }, cell) {
  const { columns, rows, row_bytes: bytes } = bands.grid;
  const [row, column] = [Math.floor(cell / columns), cell % columns];
  return { t0: (column * end) / columns, t1: ((column + 1) * end) / columns, a0: rows[row], a1: Math.min(rows[row] + bytes, height) };
}

// The cells with the most blocks whose middle no shown block covers, each of another row if there are enough.
function freeCells(run) {
  const { counts, columns } = run.bands.grid;
  const cells = Array.from(counts.keys()).filter((cell) => counts[cell] > 0 && cell % columns < columns - 1);
  cells.sort((a, b) => counts[b] - counts[a]);
  const found = [];
  const rows = new Set();
  for (const cell of cells) {
    const row = Math.floor(cell / columns);
    if (rows.has(row)) continue;
    const { t0, t1, a0, a1 } = areaOf(run, cell);
    const [t, a] = [(t0 + t1) / 2, (a0 + a1) / 2];
    if (countIn(run, { t0: t, t1: t + 1e-9, a0: a, a1: a + 1 }) > 0) continue;
    rows.add(row);
    found.push({ cell, t, a });
    if (found.length === CELLS) break;
  }
  return found;
}

// How much of the cell's surroundings in the canvas is not the ground.
const drawnAt = (page, x, y) => page.evaluate(([left, top, reach]) => {
  const canvas = document.querySelector("#map canvas");
  const box = canvas.getBoundingClientRect();
  const scale = canvas.width / box.width;
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--raised").trim();
  const ground = parseInt(hex.slice(1), 16);
  const side = Math.ceil(reach * scale);
  const at = [(left - box.left) * scale - side / 2, (top - box.top) * scale - side / 2].map(Math.round);
  const context = new OffscreenCanvas(side, side).getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, -at[0], -at[1]);
  const { data } = context.getImageData(0, 0, side, side);
  let drawn = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]) !== ground) drawn += 1;
  }
  return drawn / (side * side);
}, [x, y, NEAR]);

// Turns the wheel at a share of the plot: eight times closer in time, sixteen times in addresses. Events have whole
// pixels: the one further from the middle keeps the place in view.
async function zoom(page, box, right, down) {
  const outward = (pixel, share) => (share < 0.5 ? Math.floor(pixel) : Math.ceil(pixel));
  const [x, y] = box.at(right, down);
  const [clientX, clientY] = [outward(x, right), outward(y, down)];
  await page.evaluate(([x, y]) => {
    const over = document.querySelector("#map .u-over");
    for (const [deltaY, shiftKey] of [[-720, false], [-960, true]]) {
      over.dispatchEvent(new WheelEvent("wheel", { deltaY, shiftKey, clientX: x, clientY: y, bubbles: true, cancelable: true }));
    }
  }, [clientX, clientY]);
  // The exact image follows the stretched one of the gesture.
  await page.waitForTimeout(300);
  await settle(page);
}

// `all` is the run with every block.
async function checkCells(checks, browser, path, run, all, what) {
  const opened = await open(browser, path);
  const { page } = opened;
  const count = new Intl.NumberFormat("en-US").format(run.bands.count);
  const legend = await textOf(page, "#map-legend");
  checks.holds(legend.includes(`${count} blocks below`) && legend.includes("merged into bands"), `${what}: the legend says “${legend}”`);
  const cells = freeCells(run);
  checks.holds(cells.length > 0, `${what}: ${cells.length} cells to point at`);
  await page.focus("#map");
  await page.keyboard.press("Escape");
  const box = await plotBox(page, "map");
  for (const { cell, t, a } of cells) {
    // Close enough that the cell is larger than a pixel.
    await zoom(page, box, t / run.end, 1 - a / run.address_height);
    const [{ x0, x1 }, { a0, a1 }] = [await dataOf(page, "#curves"), await dataOf(page, "#map")];
    const place = box.at((t - x0) / (x1 - x0), 1 - (a - a0) / (a1 - a0));
    await page.mouse.move(...place);
    await settle(page);
    const shown = await dataOf(page, "#block");
    if (shown.cell === undefined) {
      checks.holds(false, `${what}: nothing merged is shown at cell ${cell}`);
      await page.keyboard.press("0");
      continue;
    }
    const area = areaOf(run, cell);
    checks.equal(Number(shown.cell), cell, `${what}: the cell under the pointer`);
    checks.equal(Number(shown.count), countIn(all, area) - countIn(run, area), `${what}: the blocks of cell ${cell}`);
    checks.holds(await drawnAt(page, ...place) > 0.1, `${what}: cell ${cell} is drawn`);
    await page.keyboard.press("0");
    await settle(page);
  }
  await page.screenshot({ path: join(OUT, `${what.replaceAll(" ", "-")}.png`), fullPage: true });
  await close(opened, checks, what);
}

export async function checkBands(checks, browser) {
  const all = madeRun({ name: "banded.csv", blocks: 6000, recorded: true });
  const run = merged(all, 300);
  const path = join(OUT, "banded.html");
  writeFileSync(path, pageOf(madeHeader(run)));
  await checkCells(checks, browser, path, run, all, "bands");
  // A page of an older version has no cells.
  const older = join(OUT, "older.html");
  writeFileSync(older, pageOf(madeHeader({ ...run, bands: { ...run.bands, grid: null } })));
  const opened = await open(browser, older);
  const legend = await textOf(opened.page, "#map-legend");
  checks.holds(legend.includes("not drawn: "), `without cells the legend says “${legend}”`);
  await close(opened, checks, "bands of an older page");
}

// A page of a trace that is too large for its limit, against the page of the same trace with every block.
export async function checkReportBands(checks, browser, command, trace, whole, most) {
  const path = join(OUT, "limited.html");
  execFileSync(command, ["report", trace, "-o", path, "--max-page", String(most)]);
  const bytes = statSync(path).size;
  checks.holds(bytes <= most, `a page of at most ${most} bytes has ${bytes}`);
  const [run] = readPage(path).runs;
  const [all] = readPage(whole).runs;
  checks.equal(all.bands, null, "the whole page has every block");
  checks.equal(run.blocks.birth.length + run.bands.count, all.blocks.birth.length, "blocks that are shown or merged");
  await checkCells(checks, browser, path, run, all, "bands of a trace");
}
