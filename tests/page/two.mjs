// Two runs in one page.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pageOf } from "./assemble.mjs";
import { OUT, close, dataOf, open, rowsOf, settle, textOf } from "./browser.mjs";
import { madeHeader, madeRun } from "./made.mjs";

export async function checkTwoRuns(checks, browser) {
  const runs = [madeRun({ name: "before.csv", blocks: 4000 }), madeRun({ name: "after.csv", blocks: 5000, seed: 9, scale: 1.3 })];
  const header = madeHeader(...runs);
  const path = join(OUT, "two.html");
  writeFileSync(path, pageOf(header));
  const opened = await open(browser, path);
  const { page } = opened;
  await checkComparison(checks, page, header);
  const peaks = await page.$$eval("#key-figure strong", (all) => all.map((each) => Number(each.dataset.peak)));
  checks.equal(peaks, runs.map((run) => run.peak.live), "both peaks in the first sentence");
  const curves = await page.$$eval("#curves-table tbody tr", (rows) => rows.map((row) => [row.dataset.run, row.dataset.series, row.querySelector("input").checked]));
  checks.equal(curves.filter((curve) => curve[2]), [["0", "live", true], ["1", "live", true]], "both curves of live bytes are shown");
  checks.equal(Number((await dataOf(page, "#curves")).x1), Math.max(...runs.map((run) => run.end)), "by time, the longer run gives the axis");
  await page.selectOption("#alignment", "relative");
  await settle(page);
  checks.equal(Number((await dataOf(page, "#curves")).x1), 1, "by position, both go from 0 to 1");
  await page.focus("#curves");
  await page.keyboard.press("p");
  await settle(page);
  checks.equal((await rowsOf(page, "#curves-table"))[0][1], runs[0].peak.live, "p leads to the peak of the run that is shown");
  await page.selectOption("#run", "1");
  await settle(page);
  checks.equal(Number((await dataOf(page, "#instant-words")).live), runs[1].peak.live, "the other run's peak is shown");
  checks.holds((await textOf(page, "#slack-title")).endsWith("of B"), "titles name the run");
  const parts = await rowsOf(page, "#slack-table");
  checks.equal(parts[0][1], runs[1].slack.live, "the other run's parts are shown");
  await page.focus("#curves");
  await page.keyboard.press("p");
  await settle(page);
  const of = curves.findIndex(([run, series]) => run === "1" && series === "live");
  checks.equal((await rowsOf(page, "#curves-table"))[of][1], runs[1].peak.live, "p leads to its peak");
  await close(opened, checks, "two runs");
  await checkDevices(checks, browser, runs);
}

// Two runs of each of two devices: one pair is shown at a time.
async function checkDevices(checks, browser, runs) {
  const others = [3, 4].map((seed) => ({ ...madeRun({ name: `${seed}.csv`, blocks: 300, seed }), device: "1" }));
  const path = join(OUT, "devices.html");
  writeFileSync(path, pageOf(madeHeader(...runs, ...others)));
  const opened = await open(browser, path);
  const { page } = opened;
  const peaks = () => page.$$eval("#key-figure strong", (all) => all.map((each) => Number(each.dataset.peak)));
  checks.equal(await page.$$eval("#device option", (all) => all.map((each) => each.textContent)), ["0", "1"], "devices on offer");
  checks.equal(await peaks(), runs.map((run) => run.peak.live), "the first device is shown at first");
  await page.selectOption("#device", "1");
  const [first] = others.map((run) => String(run.peak.live));
  await page.waitForFunction((live) => document.querySelector("#key-figure strong")?.dataset.peak === live, first);
  checks.equal(await peaks(), others.map((run) => run.peak.live), "the other device is shown");
  const { difference } = await dataOf(page, "#comparison-words");
  checks.equal(Number(difference), others[1].peak.live - others[0].peak.live, "its difference too");
  await close(opened, checks, "two devices");
}

export async function checkComparison(checks, page, { comparisons: [comparison] }) {
  const words = await dataOf(page, "#comparison-words");
  checks.equal(Number(words.difference), comparison.difference, "the difference of the peaks");
  for (const by of await page.$$eval("#comparison-by option", (all) => all.map((each) => each.value))) {
    await page.selectOption("#comparison-by", by);
    const rows = await rowsOf(page, "#comparison-table");
    const expected = comparison[by].map((entry) => [...entry.bytes, entry.difference]);
    checks.equal(rows.map((row) => row.slice(1)), expected, `differences by ${by}`);
    checks.holds(rows.length > 0, `there are differences by ${by}`);
  }
}
