// What a reader does on a page of a made run: points, clicks, drags, presses keys.

import { close, dataOf, open, plotBox, rowsOf, settle, textOf } from "./browser.mjs";

export async function checkActions(checks, browser, path, run) {
  const opened = await open(browser, path);
  const { page } = opened;
  const acts = { checks, page, run };
  await checkInstants(acts);
  await checkZoom(acts);
  await checkKeys(acts);
  await checkBlocks(acts);
  await checkLargest(acts);
  await checkLegend(acts);
  await checkPeakIsDrawn(acts);
  await checkMarkers(acts);
  await checkSorting(acts);
  await checkTheme(acts);
  await checkNames(acts);
  await close(opened, checks, "actions");
}

// What lives at a time, counted block by block.
function livingAt({ blocks }, t) {
  let [live, pending, count] = [0, 0, 0];
  for (let i = 0; i < blocks.birth.length; i++) {
    if (blocks.birth[i] > t) continue;
    if (blocks.freed[i] > t) {
      live += blocks.requested[i];
      count += 1;
    } else if (blocks.end[i] > t) pending += blocks.bytes[i];
  }
  return { live, pending, blocks: count };
}

async function checkInstants({ checks, page, run }) {
  for (const [plot, share] of [["curves", 0.2], ["curves", 0.55], ["map", 0.8]]) {
    const box = await plotBox(page, plot);
    await page.mouse.click(...box.at(share, 0.97));
    await settle(page);
    const shown = await dataOf(page, "#instant-words");
    const t = Number(shown.t);
    checks.holds(Math.abs(t - run.end * share) < run.end * 0.005, `a click at ${share} of the ${plot} shows ${t}`);
    const expected = livingAt(run, t);
    checks.equal([shown.live, shown.pending, shown.blocks].map(Number), [expected.live, expected.pending, expected.blocks], `what lives at ${t}`);
    const rows = await rowsOf(page, "#instant-table");
    checks.equal(rows.reduce((sum, row) => sum + row[1], 0), expected.live, `the rows at ${t} sum up`);
    checks.holds((await textOf(page, "#instant-title")).startsWith("What lives at "), "the title says the time");
  }
  await page.click("#follow");
  const box = await plotBox(page, "curves");
  await page.mouse.move(...box.at(0.3, 0.5));
  await page.mouse.move(...box.at(0.4, 0.5));
  await settle(page);
  const followed = Number((await dataOf(page, "#instant-words")).t);
  checks.holds(Math.abs(followed - run.end * 0.4) < run.end * 0.005, `what is shown follows the cursor: ${followed}`);
  await page.click("#instant-peak");
  await settle(page);
  checks.equal(Number((await dataOf(page, "#instant-words")).live), run.peak.live, "back at the peak");
}

const viewOf = async (page) => {
  const { x0, x1 } = await dataOf(page, "#curves");
  return [Number(x0), Number(x1)];
};

async function checkZoom({ checks, page, run }) {
  const box = await plotBox(page, "curves");
  await page.mouse.move(...box.at(0.25, 0.5));
  await page.mouse.down();
  await page.mouse.move(...box.at(0.4, 0.5), { steps: 4 });
  await page.mouse.move(...box.at(0.5, 0.5), { steps: 4 });
  await page.mouse.up();
  await settle(page);
  const [x0, x1] = await viewOf(page);
  const near = (x, share) => Math.abs(x - run.end * share) < run.end * 0.01;
  checks.holds(near(x0, 0.25) && near(x1, 0.5), `dragging zooms to ${x0}–${x1}`);
  checks.equal(await dataOf(page, "#instant-words").then((data) => Number(data.live)), run.peak.live, "dragging is no click");
  await page.mouse.wheel(0, -240);
  await settle(page);
  const [w0, w1] = await viewOf(page);
  checks.holds(w0 >= x0 && w1 <= x1 && Math.abs((w1 - w0) / (x1 - x0) - 0.5) < 0.01, `the wheel zooms to ${w0}–${w1}`);
  const map = await plotBox(page, "map");
  await page.mouse.move(...map.at(0.2, 0.3));
  await page.mouse.down();
  await page.mouse.move(...map.at(0.5, 0.6), { steps: 6 });
  await page.mouse.up();
  await settle(page);
  const { a0, a1 } = await dataOf(page, "#map");
  const [share0, share1] = [a0 / run.address_height, a1 / run.address_height];
  checks.holds(Math.abs(share0 - 0.4) < 0.02 && Math.abs(share1 - 0.7) < 0.02, `dragging zooms addresses to ${share0}–${share1}`);
  await page.keyboard.press("0");
  await settle(page);
  checks.equal(await viewOf(page), [0, run.end], "0 shows all of the time");
  checks.equal(Number((await dataOf(page, "#map")).a1), run.address_height, "0 shows all addresses");
}

async function checkKeys({ checks, page, run }) {
  await page.focus("#curves");
  await page.keyboard.press("p");
  await settle(page);
  checks.equal((await rowsOf(page, "#curves-table"))[0][1], run.peak.live, "p brings the cursor to the peak");
  for (const key of ["+", "+", "+"]) await page.keyboard.press(key);
  await settle(page);
  const [x0, x1] = await viewOf(page);
  checks.holds(Math.abs((x1 - x0) / run.end - 0.125) < 1e-6 && x0 <= run.peak.t && x1 >= run.peak.t, `three + zoom in around the peak: ${x0}–${x1}`);
  await page.keyboard.press("Shift+ArrowLeft");
  await settle(page);
  const [p0, p1] = await viewOf(page);
  checks.holds(Math.abs(p1 - p0 - (x1 - x0)) < 1e-6 && p0 < x0, "Shift and an arrow pan");
  const before = await rowsOf(page, "#curves-table");
  for (let i = 0; i < 40; i++) await page.keyboard.press("ArrowLeft");
  await settle(page);
  checks.holds(JSON.stringify(await rowsOf(page, "#curves-table")) !== JSON.stringify(before), "arrows move the cursor");
  await page.keyboard.press("Enter");
  await settle(page);
  const shown = await dataOf(page, "#instant-words");
  checks.equal(Number(shown.live), livingAt(run, Number(shown.t)).live, "Enter shows what lives at the cursor");
  await page.keyboard.press("-");
  await page.keyboard.press("0");
  await page.keyboard.press("?");
  checks.holds(await page.$eval("#help", (dialog) => dialog.open), "? shows the keys");
  await page.keyboard.press("Escape");
  checks.holds(!(await page.$eval("#help", (dialog) => dialog.open)), "Escape closes them");
  await page.click("#instant-peak");
  await settle(page);
}

const facts = (page) => page.$$eval("#block dd", (all) => Object.fromEntries(all.map((each) => [each.dataset.fact, each.textContent])));

// Blocks that are large enough to be pointed at.
function largeBlocks({ blocks, end, address_height: height }) {
  const found = [];
  for (let i = 0; i < blocks.birth.length; i++) {
    const life = Math.min(blocks.freed[i], end) - blocks.birth[i];
    if (life / end > 0.02 && blocks.bytes[i] / height > 0.012) found.push(i);
  }
  return found.slice(0, 12);
}

async function checkBlocks({ checks, page, run }) {
  // A click has kept a block, which the pointer does not change.
  await page.focus("#map");
  await page.keyboard.press("Escape");
  const box = await plotBox(page, "map");
  const { blocks, strings } = run;
  const large = largeBlocks(run);
  checks.holds(large.length >= 5, `${large.length} blocks to point at`);
  for (const i of large) {
    const t = (blocks.birth[i] + Math.min(blocks.freed[i], run.end)) / 2;
    const a = blocks.offset[i] + blocks.bytes[i] / 2;
    await page.mouse.move(...box.at(t / run.end, 1 - a / run.address_height));
    await settle(page);
    const found = await facts(page);
    const exact = (bytes) => `(${new Intl.NumberFormat("en-US").format(bytes)} bytes)`;
    checks.equal(found.Tag, strings[blocks.tag[i]] || "no tag", `the tag of block ${i}`);
    checks.holds(found.Occupied?.endsWith(exact(blocks.bytes[i])), `the bytes of block ${i}: ${found.Occupied}`);
    checks.holds(found.Requested?.endsWith(exact(blocks.requested[i])), `what block ${i} requested: ${found.Requested}`);
    checks.equal(found.Address, `0x${(0x7f0000000000n + BigInt(blocks.offset[i])).toString(16)}`, `the address of block ${i}`);
    checks.equal([found.Thread, found.Stream], [strings[blocks.thread[i]], strings[blocks.stream[i]]], `thread and stream of block ${i}`);
    checks.equal(found.Freed === "never", blocks.freed[i] === Infinity, `whether block ${i} is freed`);
    const frames = await page.$$eval("#block li", (all) => all.map((each) => each.textContent));
    checks.equal(frames, run.stacks[blocks.stack[i]].map((id) => strings[id]), `the stack of block ${i}`);
  }
}

async function checkLargest({ checks, page, run }) {
  const { birth, freed, bytes } = run.blocks;
  await page.focus("#map");
  await page.keyboard.press("Escape");
  await settle(page);
  checks.equal(await dataOf(page, "#block").then((data) => data.block), undefined, "Escape lets the block go");
  await page.keyboard.press("m");
  await settle(page);
  const first = Number((await dataOf(page, "#block")).block);
  let most = 0;
  for (let i = 0; i < birth.length; i++) {
    if (birth[i] <= run.peak.t && freed[i] > run.peak.t) most = Math.max(most, bytes[i]);
  }
  checks.equal(bytes[first], most, "m selects the largest block");
  await page.keyboard.press("0");
  await page.keyboard.press("Escape");
  await settle(page);
}

// Pixels of exactly a colour of the theme: how many, and the topmost.
const pixelsOf = (page, id, variable) => page.evaluate(([plot, name]) => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = parseInt(hex.slice(1), 16);
  const over = document.querySelector(`#${plot} .u-over`).getBoundingClientRect();
  const canvas = document.querySelector(`#${plot} canvas`);
  const box = canvas.getBoundingClientRect();
  const scale = canvas.width / box.width;
  const [left, top] = [(over.left - box.left) * scale, (over.top - box.top) * scale];
  const copy = new OffscreenCanvas(over.width * scale, over.height * scale);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, -left, -top);
  const { data, width, height } = context.getImageData(0, 0, copy.width, copy.height);
  let [count, highest] = [0, height];
  for (let i = 0; i < width * height; i++) {
    if (((data[i * 4] << 16) | (data[i * 4 + 1] << 8) | data[i * 4 + 2]) !== number) continue;
    count += 1;
    highest = Math.min(highest, Math.floor(i / width));
  }
  return { count, highest, height };
}, [id, variable]);

async function checkLegend({ checks, page }) {
  const colour = "--c3"; // cached
  const before = await pixelsOf(page, "curves", colour);
  await page.click("#curves-table tr[data-series=cached] input");
  await settle(page);
  const without = await pixelsOf(page, "curves", colour);
  checks.holds(before.count > 100 && without.count === 0, `a switch in the legend takes a curve away: ${before.count} pixels, then ${without.count}`);
  await page.click("#curves-table tr[data-series=cached] input");
  await settle(page);
  checks.equal((await pixelsOf(page, "curves", colour)).count, before.count, "and brings it back");
}

// With many events in each pixel the peak is still drawn at its height.
async function checkPeakIsDrawn({ checks, page, run }) {
  const { highest, height } = await pixelsOf(page, "curves", "--c0");
  const { top } = await dataOf(page, "#curves");
  const expected = height * (1 - run.peak.live / Number(top));
  checks.holds(Math.abs(highest - expected) <= 3, `the curve reaches row ${highest}, and the peak lies at ${expected.toFixed(1)}`);
}

async function checkMarkers({ checks, page, run }) {
  const rows = await rowsOf(page, "#markers-table");
  checks.equal(rows.length, Math.min(run.markers.length, 200), "markers in the list");
  checks.holds(rows[0][1].includes("failed request"), `failures come first: ${rows[0][1]}`);
  const words = await textOf(page, "#markers-words");
  const grown = run.markers.filter((marker) => marker.kind === "grow").length + run.markers_left_out.grow;
  checks.holds(words.includes(`${grown} growths`), `${grown} growths in “${words}”`);
  const failure = await textOf(page, "#failures-list");
  checks.holds(run.failures[0].text.every((line) => failure.includes(line)), `the failure is explained: ${failure}`);
  checks.equal(await page.$$eval(".failure", (all) => all.length), 3, "failures that are explained");
  const failed = (await rowsOf(page, "#failures-table")).map((row) => row.slice(0, 4));
  const groups = run.failure_groups.map(({ tag, count, least, most }) => [tag || "no tag", count, least, most]);
  checks.equal(failed, groups, "all failures by tag");
  const shapes = await page.$$eval("#marker-legend polygon", (all) => new Set(all.map((each) => each.getAttribute("points"))).size);
  checks.equal(shapes, new Set(run.markers.map((marker) => marker.kind)).size, "each kind of marker has a shape of its own");
  await page.click("#failures-list button");
  await settle(page);
  checks.equal(Number((await dataOf(page, "#instant-words")).t), run.failures[0].t, "the failure's time is shown");
  await page.keyboard.press("b");
  await settle(page);
  await page.click("#instant-cursor");
  await settle(page);
  const t = Number((await dataOf(page, "#instant-words")).t);
  const earlier = Math.max(...run.markers.map((marker) => marker.t).filter((each) => each < run.failures[0].t));
  checks.holds(Math.abs(t - earlier) < 1, `b leads to the marker before: ${t}, ${earlier}`);
  await page.click("#instant-peak");
  await settle(page);
}

async function checkSorting({ checks, page }) {
  const names = async () => (await rowsOf(page, "#instant-table")).map((row) => row[0]);
  const bytes = async () => (await rowsOf(page, "#instant-table")).map((row) => row[1]);
  const descending = (list) => list.every((value, i) => i === 0 || list[i - 1] >= value);
  checks.holds(descending(await bytes()), "the table begins with the largest");
  await page.click("#instant-table th:nth-child(2) button");
  checks.holds(descending((await bytes()).reverse()), "a click turns the order");
  await page.click("#instant-table th:nth-child(1) button");
  const found = await names();
  checks.equal(found, [...found].sort((a, b) => a.localeCompare(b)), "a click sorts by name");
  checks.equal(await page.$eval("#instant-table th:nth-child(1)", (head) => head.getAttribute("aria-sort")), "ascending", "the order is announced");
}

async function checkTheme({ checks, page }) {
  const back = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await back();
  await page.click("#theme");
  await settle(page);
  const dark = await back();
  checks.holds(light !== dark && (await pixelsOf(page, "curves", "--c0")).count > 100, "the switch darkens page and curves");
  await page.click("#theme");
  await settle(page);
  checks.equal(await back(), light, "and lightens them again");
}

// What a screen reader is told of.
async function checkNames({ checks, page }) {
  const nameless = await page.evaluate(() => {
    const controls = [...document.querySelectorAll("button, select, input, [role=img], [role=group], table, aside")];
    const named = (element) => element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")
      || element.textContent.trim() || element.labels?.length > 0;
    return controls.filter((element) => !named(element)).map((element) => element.outerHTML.slice(0, 80));
  });
  checks.equal(nameless, [], "elements without a name");
  const levels = await page.$$eval("main h2, main h3, h1", (all) => all.filter((each) => each.offsetParent).map((each) => Number(each.tagName[1])));
  checks.holds(levels[0] === 1 && levels.every((level, i) => i === 0 || level - levels[i - 1] <= 1), `the order of headings: ${levels}`);
  await page.focus("#map");
  await page.keyboard.press("m");
  const outline = await page.$eval("#map", (element) => getComputedStyle(element).outlineStyle);
  checks.holds(outline !== "none", `the focus is visible: ${outline}`);
  await page.keyboard.press("Escape");
}
