// Pages that are damaged, and texts that look like markup.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { deflateSync } from "node:zlib";
import { headerBytes, pageOf, pageOfText, payload } from "./assemble.mjs";
import { OUT, close, open, rowsOf, settle, textOf } from "./browser.mjs";
import { madeHeader, madeRun, merged } from "./made.mjs";

const packed = (bytes) => deflateSync(bytes).toString("base64");
const changed = (change) => {
  const header = madeHeader(madeRun({ blocks: 50 }));
  change(header.runs[0], header);
  return packed(payload(header));
};

const banded = (change) => {
  const header = madeHeader(merged(madeRun({ blocks: 50 }), 10));
  change(header.runs[0].bands.grid);
  return packed(payload(header));
};

// [what is damaged, the text in the place of the data, what the page says of it]
function damages() {
  const whole = payload(madeHeader(madeRun({ blocks: 50 })));
  const text = packed(whole);
  const flipped = Buffer.from(text, "base64");
  flipped[flipped.length >> 1] ^= 0x55;
  const long = Buffer.from(whole);
  long.writeUInt32LE(0xfffffff4, 0);
  const outside = (reference) => ({ ...reference, at: 8 * 1024 * 1024 });
  const inHeader = (change) => {
    const length = whole.readUInt32LE(0);
    const header = JSON.parse(whole.subarray(4, 4 + length).toString());
    change(header);
    return packed(Buffer.concat([headerBytes(JSON.stringify(header)), whole.subarray(4 + length)]));
  };
  return [
    ["nothing", "", "holds no data"],
    ["the marker alone", "<!--DATA-->", "holds no data"],
    ["no base64", "%%%not base64%%%", "no base64"],
    ["cut off", text.slice(0, Math.floor(text.length / 8) * 4), "cut off"],
    ["one byte changed", flipped.toString("base64"), "cut off or changed"],
    ["an empty stream", packed(Buffer.alloc(0)), "empty"],
    ["a header longer than the data", packed(long), "header is cut off"],
    ["no JSON", packed(Buffer.from([4, 0, 0, 0, 123, 123, 123, 123])), "header is not readable"],
    ["null", packed(Buffer.from([4, 0, 0, 0, 110, 117, 108, 108])), "header is not readable"],
    ["another version", changed((_, header) => { header.version = 3; }), "format is 3"],
    ["no run", changed((_, header) => { header.runs = []; }), "neither one run nor pairs of them"],
    ["an array outside", inHeader((header) => { header.runs[0].blocks.birth = outside(header.runs[0].blocks.birth); }), "outside of the data"],
    ["an array of a huge length", inHeader((header) => { header.runs[0].blocks.birth.len = 2 ** 52; }), "outside of the data"],
    ["an unknown type", inHeader((header) => { header.runs[0].blocks.tag.type = "__proto__"; }), "unknown type"],
    ["columns of different lengths", inHeader((header) => { header.runs[0].blocks.tag.len -= 1; }), "different lengths"],
    ["a tag that is not there", changed((run) => { run.blocks.tag[3] = 4_000_000; }), "texts that are not there"],
    ["a stack that is not there", changed((run) => { run.blocks.stack[3] = 70; }), "texts that are not there"],
    ["blocks out of order", changed((run) => { run.blocks.birth[9] = 0; }), "out of order"],
    ["a curve out of order", changed((run) => { run.series[0].levels[0].t[5] = NaN; }), "out of order"],
    ["bands of another size", banded((grid) => { grid.columns += 1; }), "columns of different lengths"],
    ["bands without columns", banded((grid) => { grid.columns = 0; }), "bands of run 1 are damaged"],
    ["rows of bands out of order", banded((grid) => { grid.rows[1] = -1; }), "out of order"],
    ["no peak", changed((run) => { run.peak = null; }), "no peak"],
    ["no blocks", changed((run) => { run.blocks = null; }), "blocks of run 1 are missing"],
    ["a stack of unknown frames", changed((run) => { run.stacks[1] = [99_999]; }), "stacks of run 1"],
  ];
}

export async function checkDamages(checks, browser) {
  const path = join(OUT, "damaged.html");
  for (const [what, text, words] of damages()) {
    writeFileSync(path, pageOfText(text));
    const opened = await open(browser, path);
    const said = await textOf(opened.page, "#key-figure");
    const once = said.startsWith("This page cannot be shown: ") && said.includes(words) && said.endsWith("Write it again with “aquifer report”.");
    checks.holds(once, `${what}: the page says “${said}”, not “${words}”`);
    checks.holds(await opened.page.$eval("#main", (main) => main.hidden), `${what}: nothing is drawn`);
    await close(opened, checks, what);
  }
}

const MARKUP = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>";
const SCRIPT = "</script><script>document.title='taken'</script>";
const DIRECTION = "safe\u202egpj.exe\u0007";

export async function checkMarkup(checks, browser) {
  const path = join(OUT, "markup.html");
  const tags = { weights: MARKUP, "kv cache": SCRIPT, gradients: DIRECTION };
  const run = madeRun({ name: `${SCRIPT}.csv`, blocks: 3000, tags });
  run.notes.push(MARKUP);
  run.failures[0].text.push(SCRIPT);
  run.markers[0].text = MARKUP;
  run.strings = run.strings.map((text) => text.replace("model.py", "<b>model.py</b>"));
  writeFileSync(path, pageOf(madeHeader(run)));
  const opened = await open(browser, path);
  const { page } = opened;
  const names = (await rowsOf(page, "#instant-table")).map((row) => row[0]);
  checks.holds(names.includes(MARKUP) && names.includes(SCRIPT), `markup in tags is shown as text: ${names}`);
  for (const by of ["stack", "tag"]) {
    await page.selectOption("#group", by);
    await settle(page);
  }
  await page.focus("#map");
  await page.keyboard.press("m");
  await settle(page);
  checks.holds((await textOf(page, "#block")).includes("<b>model.py</b>"), "markup in stacks is shown as text");
  for (const id of ["notes", "failures", "markers-table", "title"]) {
    const text = await textOf(page, `#${id}`);
    checks.holds(text.includes("<img") || text.includes("<script>"), `markup in ${id} is shown as text`);
  }
  const found = await page.evaluate(() => [document.querySelectorAll("img, b").length, document.scripts.length, document.title]);
  checks.equal(found.slice(0, 2), [0, 2], "no element comes from the data");
  checks.holds(found[2] !== "taken", "no script of the data runs");
  const text = await textOf(page, "main");
  checks.holds(!/[\u202a-\u202e\u0007]/.test(text), "marks of direction are not passed on");
  await close(opened, checks, "markup");
}

export async function checkPolicy(checks, browser, path) {
  const opened = await open(browser, path);
  const { page } = opened;
  const policy = await page.$eval("meta[http-equiv=Content-Security-Policy]", (meta) => meta.content);
  checks.holds(policy.includes("default-src 'none'") && !policy.includes("connect-src"), `the policy is strict: ${policy}`);
  const outcome = await page.evaluate(async () => {
    const image = new Promise((done) => {
      const element = new Image();
      element.onload = () => done("loaded");
      element.onerror = () => done("refused");
      element.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
    });
    const fetched = fetch("data:text/plain,x").then(() => "fetched", () => "refused");
    return [await image, await fetched];
  });
  checks.equal(outcome, ["refused", "refused"], "the policy refuses images and connections");
  checks.holds(opened.errors.length > 0 && opened.errors.every((error) => error.includes("Content Security Policy")), "each refusal is told");
  await opened.context.close();
}
