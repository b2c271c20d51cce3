// How the page looks: pictures at three widths in light and dark, a phone's width, print.

import { join } from "node:path";
import { OUT, close, open, settle } from "./browser.mjs";

const WIDTHS = [360, 820, 1280, 1440];

export async function checkLooks(checks, browser, path, name) {
  for (const width of WIDTHS) {
    for (const scheme of ["light", "dark"]) {
      const opened = await open(browser, path, { width, scheme });
      const { page } = opened;
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      checks.equal(wide, width, `${name} at ${width} px fits`);
      const table = await page.$eval("#curves-table", (each) => [each.scrollWidth, each.scrollHeight].map((size, i) => size - [each.clientWidth, each.clientHeight][i]));
      checks.holds(table.every((hidden) => hidden <= 0), `${name} at ${width} px shows all of the table of curves, but for ${table}`);
      const theme = await page.evaluate(() => document.documentElement.dataset.theme);
      checks.equal(theme, scheme, `${name} goes by the system's scheme`);
      await page.focus("#map");
      await page.keyboard.press("ArrowUp");
      await settle(page);
      await page.screenshot({ path: join(OUT, `${name}-${width}-${scheme}.png`), fullPage: true });
      await close(opened, checks, `${name} at ${width} px`);
    }
  }
}

export async function checkPrint(checks, browser, path) {
  const opened = await open(browser, path, { scheme: "dark" });
  const { page } = opened;
  await page.evaluate(() => {
    window.addEventListener("beforeprint", () => {
      const canvas = document.querySelector("#curves canvas").getBoundingClientRect();
      document.documentElement.dataset.printed = `${document.documentElement.dataset.theme} ${canvas.width <= 700}`;
    });
  });
  const pdf = await page.pdf({ path: join(OUT, "print.pdf"), format: "A4" });
  checks.holds(pdf.length > 20_000, `the print has ${pdf.length} bytes`);
  checks.equal(await page.evaluate(() => document.documentElement.dataset.printed), "light true", "print is light, and fits its width");
  await settle(page);
  checks.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark", "the scheme is back after print");
  await close(opened, checks, "print");
}

// One finger pans, two zoom.
export async function checkTouch(checks, browser, path) {
  const opened = await open(browser, path, { width: 360, touch: true });
  const { page } = opened;
  await page.$eval("#curves", (element) => element.scrollIntoView({ block: "center" }));
  const box = await page.locator("#curves .u-over").boundingBox();
  const session = await page.context().newCDPSession(page);
  const y = box.y + box.height / 2;
  const touch = (type, ...xs) => session.send("Input.dispatchTouchEvent", {
    type, touchPoints: xs.map((x, id) => ({ x: box.x + box.width * x, y, id })),
  });
  const view = () => page.$eval("#curves", ({ dataset }) => [Number(dataset.x0), Number(dataset.x1)]);
  const [x0, x1] = await view();
  await touch("touchStart", 0.4, 0.6);
  for (const spread of [0.12, 0.15, 0.2]) await touch("touchMove", 0.5 - spread, 0.5 + spread);
  await touch("touchEnd");
  await settle(page);
  const [p0, p1] = await view();
  const factor = (p1 - p0) / (x1 - x0);
  checks.holds(Math.abs(factor - 0.5) < 0.1, `two fingers zoom by ${factor}`);
  await touch("touchStart", 0.7);
  for (const at of [0.65, 0.6, 0.5]) await touch("touchMove", at);
  await touch("touchEnd");
  await settle(page);
  const [m0, m1] = await view();
  checks.holds(m0 > p0 && Math.abs(m1 - m0 - (p1 - p0)) < 1, `one finger pans from ${p0} to ${m0}`);
  await close(opened, checks, "touch");
}
