// Puts a page together as `aquifer report` does, from the files that page.rs lists.

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { deflateSync, inflateSync } from "node:zlib";

export const ROOT = join(dirname(fileURLToPath(import.meta.url)), "../..");
const PAGE = join(ROOT, "src/bin/aquifer/src/report/page");

// The files behind a constant of page.rs, in order.
function included(constant) {
  const source = readFileSync(`${PAGE}.rs`, "utf8");
  const body = source.match(new RegExp(`const ${constant}: &str =([^;]*);`, "s"));
  if (!body) throw new Error(`page.rs has no constant ${constant}`);
  const names = [...body[1].matchAll(/include_str!\("([^"]+)"\)/g)].map((match) => match[1]);
  if (names.length === 0) throw new Error(`page.rs lists nothing for ${constant}`);
  return names.map((name) => readFileSync(join(PAGE, "..", name), "utf8")).join("\n");
}

const ALIGNMENT = 8;
const ARRAYS = { f64: Float64Array, u32: Uint32Array, u8: Uint8Array };

// A payload of a header in which arrays stand as typed arrays.
export function payload(header) {
  const parts = [];
  const known = new Map();
  let at = 0;
  const place = (array) => {
    if (known.has(array)) return known.get(array);
    const type = Object.keys(ARRAYS).find((name) => array instanceof ARRAYS[name]);
    const reference = { type, at, len: array.length };
    parts.push(Buffer.from(array.buffer, array.byteOffset, array.byteLength));
    const gap = (ALIGNMENT - (array.byteLength % ALIGNMENT)) % ALIGNMENT;
    parts.push(Buffer.alloc(gap));
    at += array.byteLength + gap;
    known.set(array, reference);
    return reference;
  };
  const json = JSON.stringify(header, (_, value) => (ArrayBuffer.isView(value) ? place(value) : value));
  return Buffer.concat([headerBytes(json), ...parts]);
}

// The length of a header, the header, and spaces up to the alignment of the arrays.
export function headerBytes(json) {
  const gap = (ALIGNMENT - ((Buffer.byteLength(json) + 4) % ALIGNMENT)) % ALIGNMENT;
  const text = Buffer.from(json + " ".repeat(gap));
  const count = Buffer.alloc(4);
  count.writeUInt32LE(text.length);
  return Buffer.concat([count, text]);
}

export function pageOf(header) {
  return pageOfText(deflateSync(payload(header), { level: 6 }).toString("base64"));
}

// The header of a written page, with its arrays.
export function readPage(path) {
  const [, text] = readFileSync(path, "utf8").match(/id="data">([^<]*)</);
  const bytes = inflateSync(Buffer.from(text, "base64"));
  const length = bytes.readUInt32LE(0);
  const isArray = (value) => value !== null && typeof value === "object" && Object.hasOwn(ARRAYS, value.type);
  return JSON.parse(bytes.subarray(4, 4 + length).toString(), (_, value) => {
    if (!isArray(value)) return value;
    const kind = ARRAYS[value.type];
    const from = bytes.byteOffset + 4 + length + value.at;
    return new kind(bytes.buffer.slice(from, from + value.len * kind.BYTES_PER_ELEMENT));
  });
}

// A page with any text in the place of its data.
export function pageOfText(text) {
  const template = readFileSync(join(PAGE, "page.html"), "utf8");
  const parts = template.split(/(\/\*STYLE\*\/|\/\*SCRIPT\*\/|<!--DATA-->)/);
  const filled = { "/*STYLE*/": included("STYLE"), "/*SCRIPT*/": included("SCRIPT"), "<!--DATA-->": text };
  if (Object.keys(filled).some((marker) => parts.filter((part) => part === marker).length !== 1)) {
    throw new Error("page.html does not have each marker once");
  }
  return parts.map((part) => filled[part] ?? part).join("");
}
