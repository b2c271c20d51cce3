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
      await page.keyboard.press("m");
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
