// The figures of a page against those of its run: the generator's own, or those of `--json`.

import { close, dataOf, open, rowsOf, settle, textOf } from "./browser.mjs";

const NO_NAME = { tag: "no tag", stream: "no stream", thread: "thread unknown", kind: "kind unknown", stack: "no stack", metadata: "no text" };

// Control characters and marks of direction are shown as symbols.
const shownName = (by, name) => (name === "" ? NO_NAME[by] ?? "unnamed" : name);

const MOST_NAMED = 50;
const FRAMES = 6;

// `--json` gives a stack's frames.
const nameOf = ({ name, stack }) => (Array.isArray(stack) ? stack.slice(0, FRAMES).join(" < ") : name);

// `run` has the fields of the header; `curves` gives {name: {max, last}}.
export async function checkFigures(checks, page, run, curves, what) {
  const strong = await dataOf(page, "#key-figure strong");
  checks.equal(Number(strong.peak), run.peak.live, `${what}: the peak in the first sentence`);
  const [chief] = run.holders.tag;
  const sentence = await textOf(page, "#key-figure");
  if (chief.name !== "") checks.holds(sentence.includes(chief.name), `${what}: ${chief.name} in “${sentence}”`);
  const facts = await textOf(page, "#facts");
  const events = new Intl.NumberFormat("en-US").format(run.events);
  checks.holds(facts.includes(`${events} event`), `${what}: ${events} events in “${facts}”`);
  await checkSlack(checks, page, run, what);
  await checkHolders(checks, page, run, what);
  const rows = await rowsOf(page, "#curves-table");
  const names = await page.$$eval("#curves-table tbody tr", (all) => all.map((row) => row.dataset.series));
  checks.equal(names, Object.keys(curves), `${what}: the curves`);
  names.forEach((name, i) => {
    checks.equal(rows[i][3], curves[name].max, `${what}: the greatest value of ${name}`);
    checks.equal(rows[i][4], curves[name].last, `${what}: the last value of ${name}`);
  });
}

async function checkSlack(checks, page, run, what) {
  const shown = await page.$$eval("#slack-table tbody tr", (rows) => rows.map((row) => [row.dataset.part, Number(row.children[1].dataset.value)]));
  const parts = ["live", "rounding", "pending", "cached", "graphs", "pinned", "outside"];
  const expected = parts.filter((part) => typeof run.slack[part] === "number").map((part) => [part, run.slack[part]]);
  checks.equal(shown, expected, `${what}: where the memory was`);
  const bar = await page.$eval("#slack-bar", (element) => element.getAttribute("aria-label"));
  checks.holds(expected.every(([part]) => bar.includes(part) === (part !== "pinned")), `${what}: the bar's label “${bar}”`);
}

// The table for each grouping on offer.
async function checkHolders(checks, page, run, what) {
  const offered = await page.$$eval("#group option", (options) => options.map((option) => option.value));
  checks.holds(offered.includes("size"), `${what}: size classes on offer`);
  for (const by of offered) {
    await page.selectOption("#group", by);
    await settle(page);
    const rows = await rowsOf(page, "#instant-table");
    const expected = run.holders[by];
    checks.equal(rows.map((row) => row[1]), expected.map((holder) => holder.bytes), `${what}: bytes by ${by}`);
    checks.equal(rows.map((row) => row[3]), expected.map((holder) => holder.blocks), `${what}: blocks by ${by}`);
    const named = expected.slice(0, MOST_NAMED);
    checks.equal(rows.slice(0, named.length).map((row) => row[0]), named.map((holder) => shownName(by, nameOf(holder))), `${what}: names by ${by}`);
  }
}

export async function checkPage(checks, browser, path, run, curves, what) {
  const opened = await open(browser, path);
  checks.holds(opened.loaded > 0, `${what}: it opens`);
  await checkFigures(checks, opened.page, run, curves, what);
  await close(opened, checks, what);
  return opened.loaded;
}
