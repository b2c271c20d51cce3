// The head of the page: what the file is, the peak in one sentence, notes, where the memory was.

function showHead() {
  const { runs } = state;
  const names = runs.map((run) => plainText(run.name)).join(" and ");
  document.title = `${names} – memory report`;
  byId("title").textContent = `Memory report: ${names}`;
  fill(byId("facts"), ...runs.map((run, index) => make("span", { class: "run-facts" }, factsText(run, index), make("br"))));
  fill(byId("key-figure"), ...runs.flatMap((run, index) => [...peakSentence(run, index), " "]));
  const notes = runs.flatMap((run, index) => run.notes.map((note) => [runLetter(index), plainText(note)]));
  byId("notes").hidden = notes.length === 0;
  fill(byId("notes"), make("ul", {}, ...notes.map(([letter, note]) => make("li", {}, letter ? `${letter}: ${note}` : note))));
  byId("foot").textContent = `Written by ${plainText(state.header.product ?? "aquifer")}. This file needs no network.`;
}

const FORMAT_WORDS = { events: "event trace", rmm: "RMM log", snapshot: "PyTorch snapshot", made: "made workload" };

function factsText(run, index) {
  const device = run.device === null || run.device === undefined ? null
    : run.devices.length > 1 ? `device ${plainText(run.device)} (of ${run.devices.map(plainText).join(", ")})`
      : `device ${plainText(run.device)}`;
  const span = run.clock === "us" ? spanText(run.end - run.start, run.clock) : null;
  const parts = [
    FORMAT_WORDS[run.format] ?? plainText(run.format ?? "trace"), device, plural(run.events, "event"), span,
    plural(run.blocks.count + (run.bands?.count ?? 0), "block"),
  ];
  return `${runLetter(index) ? `${runLetter(index)}: ` : ""}${parts.filter((part) => part).join(" · ")}`;
}

// "Peak 12.3 GiB live at 4.2 s, 61 % of it `kv cache`."
function peakSentence(run, index) {
  const { peak } = run;
  const letter = runLetter(index);
  const parts = [letter ? `${letter}: peak ` : "Peak ",
    make("strong", { dataset: { peak: peak.live }, title: exactBytesText(peak.live) }, `${bytesText(peak.live)} live`),
    ` at ${timeText(peak.t, run.clock, runLength(run) * 1e-2)}`];
  const [by, holder] = chiefHolder(run);
  if (holder && peak.live > 0) {
    const name = by === "stack" ? stackText(run, holder.stack, 1) : holder.name;
    const before = { size: "in blocks ", stream: "on stream ", stack: "from " }[by] ?? "";
    parts.push(`, ${shareText(holder.bytes, peak.live)} of it ${before}`, make("code", {}, plainText(name)));
  }
  parts.push(".");
  const failed = failedRequests(run);
  if (failed > 0) parts.push(" ", make("span", { class: "damaged" }, `${plural(failed, "request")} failed.`));
  return parts;
}

const failedRequests = (run) => run.failures.length + (run.failures_left_out ?? 0);

// The largest holder that has a name, by the grouping that says the most.
function chiefHolder(run) {
  for (const by of ["tag", "stack", "size"]) {
    const [holder] = run.holders[by] ?? [];
    if (!holder) continue;
    const name = by === "stack" ? stackText(run, holder.stack ?? 0) : holder.name;
    if (name) return [by, holder];
  }
  return [null, null];
}

// [key, name, meaning]
const SLACK_PARTS = [
  ["live", "live", "what blocks were requested to hold"],
  ["rounding", "rounding", "what blocks occupy above what was requested"],
  ["pending", "pending", "freed, but still in use by another stream"],
  ["cached", "cached", "free, and kept for the next request"],
  ["graphs", "graphs", "kept by captured graphs"],
  ["pinned", "pinned", "pinned host memory that was live then, not part of the device’s"],
  ["outside", "outside", "taken by others on the device: contexts, libraries"],
];

function showSlack() {
  const run = shownRun();
  const { slack } = run;
  // Pinned memory is the host's, so it has no share of the device's.
  const known = SLACK_PARTS.filter(([key]) => isCount(slack[key]) && key !== "pinned");
  const whole = known.reduce((sum, [key]) => sum + slack[key], 0);
  const bar = byId("slack-bar");
  fill(bar, ...known.map(([key, name]) => {
    const colour = SLACK_PARTS.findIndex(([each]) => each === key);
    const part = make("span", { class: groupClass(colour), title: `${name}: ${bytesText(slack[key])}` });
    part.style.flexGrow = String(whole > 0 ? slack[key] / whole : 0);
    part.hidden = slack[key] === 0;
    return part;
  }));
  bar.setAttribute("aria-label", known.map(([key, name]) => `${name} ${bytesText(slack[key])}`).join(", "));
  const rows = SLACK_PARTS.map(([key, name, meaning], colour) => ({
    key, name, meaning, colour, bytes: isCount(slack[key]) ? slack[key] : null, dataset: { part: key },
  }));
  byId("slack-title").textContent = `Where the memory was at the peak${ofRun()}`;
  const unknown = rows.filter((row) => row.bytes === null).map((row) => row.name);
  fill(byId("slack-table"), sortableTable({
    label: "Where the memory was at the peak",
    columns: [
      { key: "name", label: "Part", cell: (row) => make("span", {}, swatch(row.colour), row.name) },
      bytesColumn("bytes", "Bytes"),
      { key: "share", label: "Share", number: true, text: (share) => (share === null ? "–" : shareText(share, 1)) },
      { key: "meaning", label: "What it is", wide: true },
    ],
    rows: rows.filter((row) => row.bytes !== null).map((row) => ({ ...row, share: row.key === "pinned" ? null : row.bytes / Math.max(whole, 1) })),
  }), unknown.length > 0 ? make("p", { class: "facts" }, `The input does not tell: ${unknown.join(", ")}.`) : null);
  showFragmentation(run);
}

function showFragmentation(run) {
  const { free, largest_free: largest } = run.fragmentation;
  const words = byId("fragmentation");
  if (!isCount(free) || !isCount(largest)) {
    words.textContent = "Fragmentation: the input does not tell what was free.";
    return;
  }
  words.textContent = free === 0 ? "Fragmentation: nothing was free at the peak."
    : `Fragmentation: ${bytesText(free)} were free at the peak, the largest extent ${bytesText(largest)}`
      + ` (${shareText(free - largest, free)} of the free bytes lie elsewhere).`;
}

function startSummary() {
  showHead();
  showSlack();
  on("run", showSlack);
}
