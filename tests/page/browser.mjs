// A browser that opens pages, watches what it must not do, and counts what held.

import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { ROOT } from "./assemble.mjs";

const require = createRequire(join(ROOT, "target/page/driver/"));
const { chromium } = require("playwright-core");
const ARGUMENTS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];

export const OUT = join(ROOT, "target/page");

export class Checks {
  constructor() {
    this.held = 0;
    this.failed = [];
    this.figures = [];
  }

  holds(condition, what) {
    if (condition) this.held += 1;
    else {
      this.failed.push(what);
      console.error(`failed: ${what}`);
    }
  }

  equal(found, expected, what) {
    const [a, b] = [JSON.stringify(found), JSON.stringify(expected)];
    this.holds(a === b, `${what}: found ${a?.slice(0, 400)}, expected ${b?.slice(0, 400)}`);
  }

  figure(text) {
    this.figures.push(text);
    console.log(text);
  }
}

export async function launch() {
  const paths = [process.env.CHROMIUM, "/usr/bin/chromium"].filter(Boolean);
  const executablePath = paths.find(existsSync);
  if (!executablePath) throw new Error("no chromium: install Debian's, or name one in CHROMIUM");
  return chromium.launch({ executablePath, args: ARGUMENTS });
}

// Opens a page and waits until it has drawn, or said why it cannot.
export async function open(browser, path, { width = 1280, height = 900, scheme = "light" } = {}) {
  const context = await browser.newContext({
    viewport: { width, height }, colorScheme: scheme, acceptDownloads: false,
  });
  const page = await context.newPage();
  const errors = [];
  const requests = [];
  const address = pathToFileURL(path).href;
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) errors.push(message.text());
  });
  page.on("pageerror", (error) => errors.push(error.stack ?? error.message));
  page.on("request", (request) => {
    if (request.url() !== address) requests.push(request.url());
  });
  await page.goto(address);
  await page.waitForSelector("html[data-ready], html[data-damaged]", { state: "attached", timeout: 60_000 });
  const loaded = Number(await page.evaluate(() => document.documentElement.dataset.ready ?? NaN));
  await settle(page);
  return { page, context, errors, requests, loaded };
}

// Two frames later all announced changes are drawn.
export async function settle(page) {
  await page.evaluate(() => new Promise((done) => {
    requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done)));
  }));
}

export async function close(opened, checks, what) {
  checks.equal(opened.errors, [], `${what}: errors on the console`);
  checks.equal(opened.requests, [], `${what}: requests to the network`);
  await opened.context.close();
}

// Rows of a table as lists of exact values: numbers where cells have them, else texts.
export async function rowsOf(page, selector) {
  return page.$$eval(`${selector} tbody tr`, (rows) => rows.map((row) => [...row.children].map((cell) => {
    const { value } = cell.dataset;
    return value === undefined || value === "" ? cell.textContent.trim() : Number(value);
  })));
}

export const textOf = (page, selector) => page.$eval(selector, (element) => element.textContent.trim());
export const dataOf = (page, selector) => page.$eval(selector, (element) => ({ ...element.dataset }));

// The box of a plot inside of its axes, and where a share of it is.
export async function plotBox(page, id) {
  await page.$eval(`#${id}`, (element) => element.scrollIntoView({ block: "center" }));
  await settle(page);
  const box = await page.locator(`#${id} .u-over`).boundingBox();
  return { ...box, at: (right, down) => [box.x + box.width * right, box.y + box.height * down] };
}

export const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
