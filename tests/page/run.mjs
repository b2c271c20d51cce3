// Opens pages in a browser and holds what they show against what it must be. `ci/page` runs it.
//
// Usage: node tests/page/run.mjs --command PATH | --made-only
//
// With --command, pages of the recorded traces and of a made one of a million events are written by
// `PATH report`, and compared with its `--json`. With --made-only all pages come from the generator.
//
// | file | what it checks |
// |---|---|
// | figures.mjs | figures of a page against those of its run |
// | actions.mjs | pointing, clicking, dragging and keys |
// | two.mjs | two runs in one page |
// | bands.mjs | merged blocks on the address map |
// | hostile.mjs | damaged data, markup in texts, the policy of content |
// | looks.mjs | widths, light and dark, print; it leaves pictures |
// | speed.mjs | opening, and frames of a gesture, with a million events |
// | made.mjs, assemble.mjs, browser.mjs | made runs; pages of them; the browser |

import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { checkActions } from "./actions.mjs";
import { ROOT, pageOf } from "./assemble.mjs";
import { checkBands, checkReportBands } from "./bands.mjs";
import { Checks, OUT, close, launch, open } from "./browser.mjs";
import { checkPage } from "./figures.mjs";
import { checkDamages, checkMarkup, checkPolicy } from "./hostile.mjs";
import { checkLooks, checkPrint } from "./looks.mjs";
import { made, madeHeader, madeRun, traceText } from "./made.mjs";
import { checkSpeed } from "./speed.mjs";
import { checkComparison, checkTwoRuns } from "./two.mjs";

const TRACES = ["llama_train", "resnet_train", "serve_mixed"].map((name) => join(ROOT, `tests/data/${name}.csv.xz`));
const MILLION = 335_000; // blocks whose events are a million
const LIMITED = 3_000_000; // bytes of a page that has no room for all of them

function madeCurves(run) {
  return Object.fromEntries(run.series.map(({ name, levels }) => {
    const [{ max, last }] = levels;
    return [name, { max: max.reduce((a, b) => Math.max(a, b), 0), last: last.at(-1) }];
  }));
}

async function checkMade(checks, browser) {
  const run = madeRun({ blocks: 6000, recorded: true });
  const path = join(OUT, "made.html");
  writeFileSync(path, pageOf(madeHeader(run)));
  await checkPage(checks, browser, path, run, madeCurves(run), "made");
  await checkActions(checks, browser, path, run);
  await checkPolicy(checks, browser, path);
  await checkPrint(checks, browser, path);
  await checkLooks(checks, browser, path, "made");
}

const report = (command, ...given) => execFileSync(command, ["report", ...given], { maxBuffer: 1 << 28, encoding: "utf8" });

async function checkReports(checks, browser, command, inputs) {
  const what = inputs.map((input) => basename(input)).join(" and ");
  const path = join(OUT, `${what.replaceAll(" ", "-")}.html`);
  report(command, ...inputs, "-o", path);
  const header = JSON.parse(report(command, ...inputs, "--json"));
  if (inputs.length === 1) {
    const [run] = header.runs;
    const curves = Object.fromEntries(run.series.map(({ name, max, last }) => [name, { max, last }]));
    await checkPage(checks, browser, path, run, curves, what);
  } else {
    const opened = await open(browser, path);
    await checkComparison(checks, opened.page, header);
    await close(opened, checks, what);
  }
  return path;
}

async function main([option, command]) {
  if (!(option === "--made-only" || (option === "--command" && command))) {
    throw new Error("usage: node tests/page/run.mjs --command PATH | --made-only");
  }
  mkdirSync(OUT, { recursive: true });
  const checks = new Checks();
  const browser = await launch();
  try {
    await checkMade(checks, browser);
    await checkTwoRuns(checks, browser);
    await checkBands(checks, browser);
    await checkMarkup(checks, browser);
    await checkDamages(checks, browser);
    const million = made({ blocks: MILLION, recorded: true });
    let path = join(OUT, "million.html");
    if (command) {
      for (const trace of TRACES) await checkReports(checks, browser, command, [trace]);
      await checkLooks(checks, browser, join(OUT, "serve_mixed.csv.xz.html"), "serve");
      await checkReports(checks, browser, command, [TRACES[0], TRACES[1]]);
      const trace = join(OUT, "million.csv");
      writeFileSync(trace, traceText(million));
      path = await checkReports(checks, browser, command, [trace]);
      await checkReportBands(checks, browser, command, trace, path, LIMITED);
    } else {
      writeFileSync(path, pageOf(madeHeader(million.run)));
    }
    const size = readFileSync(path).length;
    await checkSpeed(checks, browser, path, `${(million.events.length / 1e6).toFixed(2)} million events, ${(size / 1e6).toFixed(1)} MB`);
  } finally {
    await browser.close();
  }
  console.log(`ci/page: ${checks.held} checks held, ${checks.failed.length} failed`);
  process.exitCode = checks.failed.length > 0 ? 1 : 0;
}

await main(process.argv.slice(2));
