// How fast a page of many events opens, and how it follows a gesture.

import { close, median, open, plotBox, settle } from "./browser.mjs";

const MOST_LOAD_MS = 2000;
const MOST_FRAME_MS = 33;
const STEPS = 40;

// The machine may be busy: the best of a few attempts counts.
const ATTEMPTS = 3;

export async function checkSpeed(checks, browser, path, what) {
  let best = Infinity;
  for (let i = 0; i < ATTEMPTS; i++) {
    const opened = await open(browser, path);
    best = Math.min(best, opened.loaded);
    await close(opened, checks, `${what}, opened`);
    if (best < MOST_LOAD_MS) break;
  }
  checks.figure(`${what}: opens in ${best} ms`);
  checks.holds(best < MOST_LOAD_MS, `${what} opens in ${best} ms`);
  const opened = await open(browser, path);
  for (const plot of ["curves", "map"]) {
    let frames = [Infinity];
    for (let i = 0; i < ATTEMPTS && !(median(frames) < MOST_FRAME_MS); i++) frames = await gesture(opened.page, plot);
    const worst = Math.max(...frames);
    checks.figure(`${what}: zoom over the ${plot}: a frame in ${median(frames).toFixed(1)} ms (median), ${worst.toFixed(1)} ms (longest)`);
    checks.holds(median(frames) < MOST_FRAME_MS, `${what}: zoom over the ${plot} takes ${median(frames)} ms a frame`);
  }
  const exact = await exactImage(opened.page);
  checks.figure(`${what}: all addresses drawn exactly in ${exact.toFixed(1)} ms`);
  await close(opened, checks, what);
}

// A turn of the wheel in each frame: in, and out again.
async function gesture(page, plot) {
  const box = await plotBox(page, plot);
  const [clientX, clientY] = box.at(0.6, 0.5);
  const frames = await page.evaluate(async ({ id, x, y, steps }) => {
    const over = document.querySelector(`#${id} .u-over`);
    const times = [];
    await new Promise(requestAnimationFrame);
    let last = performance.now();
    for (let i = 0; i < steps; i++) {
      const deltaY = i < steps / 2 ? -40 : 40;
      over.dispatchEvent(new WheelEvent("wheel", { deltaY, clientX: x, clientY: y, bubbles: true, cancelable: true }));
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      times.push(now - last);
      last = now;
    }
    return times;
  }, { id: plot, x: clientX, y: clientY, steps: STEPS });
  await settle(page);
  return frames;
}

// From the choice of another grouping until its frame is there.
async function exactImage(page) {
  await page.waitForTimeout(300);
  return page.evaluate(async () => {
    const group = document.getElementById("group");
    group.value = "size";
    const began = performance.now();
    group.dispatchEvent(new Event("change"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - began;
  });
}
