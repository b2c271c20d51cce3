// Perfetto's trace processor as a program: the WebAssembly module of its page, without the page.
//
// Usage: node processor.mjs FOLDER
//
// FOLDER has the page's `engine_bundle.js` and `trace_processor*.wasm`. The standard input and the
// standard output carry the processor's own protocol, streams of `TraceProcessorRpcStream`.

import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import vm from "node:vm";

const folder = process.argv[2];

// A request for one of the page's files.
class XMLHttpRequest {
  open(method, name) {
    this.name = basename(name);
  }
  send() {
    this.response = new Uint8Array(readFileSync(join(folder, this.name))).buffer;
  }
}

// What the module asks of the worker that it runs in.
const scope = {
  TextDecoder, TextEncoder, URL, XMLHttpRequest, performance, crypto, setTimeout, clearTimeout,
  WorkerGlobalScope: true,
  location: { href: "http://localhost/" },
  console: { log: console.error, warn: () => {}, error: console.error },
};
scope.self = scope;
vm.createContext(scope);
const fromBuffer = vm.runInContext("(buffer) => new Uint8Array(buffer)", scope);
vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), scope);
const port = { postMessage: (bytes) => process.stdout.write(bytes) };
scope.onmessage({ data: port });

for await (const part of process.stdin) {
  port.onmessage({ data: fromBuffer(part) });
}
