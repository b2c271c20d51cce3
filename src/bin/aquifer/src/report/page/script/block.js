// The panel beside the map: what is known of the selected block.

const MOST_FRAMES = 60;

function showBlockPanel() {
  const panel = byId("block");
  const run = shownRun();
  const i = state.selected;
  delete panel.dataset.cell;
  if (i < 0) delete panel.dataset.block;
  if (i < 0 && state.cell >= 0) {
    showCellPanel(panel, run, state.cell);
    return;
  }
  if (i < 0) {
    fill(panel, make("h3", {}, "No block selected"),
      make("p", {}, "Point at a block, or press m. A click keeps the block here."));
    return;
  }
  const { birth, freed, end, offset, bytes, requested, stream, thread, tag, stack, kind, metadata } = run.blocks;
  const { colour, of } = grouping(run, state.by);
  const step = runLength(run) * 1e-6;
  const ended = Math.min(freed[i], run.end);
  const facts = [
    ["Tag", groupName("tag", run.strings[tag[i]])],
    ["Occupied", `${bytesText(bytes[i])} (${exactBytesText(bytes[i])})`],
    ["Requested", `${bytesText(requested[i])} (${exactBytesText(requested[i])})`],
    ["Address", addressText(run, offset[i])],
    ["Allocated", timeText(birth[i], run.clock, step)],
    ["Freed", freed[i] === Infinity ? "never" : timeText(freed[i], run.clock, step)],
    ["Reusable", end[i] === Infinity ? "never" : timeText(end[i], run.clock, step)],
    ["Lived", `${spanText(ended - birth[i], run.clock)}${freed[i] === Infinity ? ", to the end" : ""}`],
    ["Stream", groupName("stream", run.strings[stream[i]])],
    ["Thread", groupName("thread", run.strings[thread[i]])],
    ["Kind", groupName("kind", run.strings[kind[i]])],
  ];
  if (run.strings[metadata[i]]) facts.push(["Text", plainText(run.strings[metadata[i]])]);
  const list = make("dl");
  for (const [name, value] of facts) {
    list.append(make("dt", {}, name), make("dd", { class: name === "Address" ? "address" : null, dataset: { fact: name } }, value));
  }
  const frames = run.stacks[stack[i]];
  const stackPart = frames.length === 0 ? null : make("details", { open: true },
    make("summary", {}, `Stack, innermost first (${plural(frames.length, "frame")})`),
    make("ol", {}, ...frames.slice(0, MOST_FRAMES).map((id) => make("li", {}, make("code", {}, plainText(run.strings[id]))))),
    frames.length > MOST_FRAMES ? make("p", {}, `${plural(frames.length - MOST_FRAMES, "further frame")}.`) : null);
  panel.dataset.block = i;
  fill(panel, make("h3", {}, swatch(colour[of[i]]), `Block ${countText(i + 1)} of ${countText(run.blocks.count)}`), list, stackPart,
    run.addresses === "packed" ? make("p", { class: "facts" }, "The input has no addresses; this one was laid out by first fit.") : null);
}

// Merged blocks under the pointer: how many, and where.
function showCellPanel(panel, run, cell) {
  const { a0, a1, t0, t1, count, share } = bandCell(run, cell);
  const step = runLength(run) * 1e-4;
  const facts = [
    ["Blocks", countText(count)],
    ["Each", `below ${bytesText(run.bands.below)}`],
    ["Address", `${addressText(run, a0)} to ${addressText(run, a1)} (${bytesText(a1 - a0)})`],
    ["Time", `${timeText(t0, run.clock, step)} to ${timeText(t1, run.clock, step)}`],
    ["Occupied", `${shareText(share, 1)} of these addresses and times`],
  ];
  const list = make("dl");
  for (const [name, value] of facts) {
    list.append(make("dt", {}, name), make("dd", { class: name === "Address" ? "address" : null, dataset: { fact: name } }, value));
  }
  Object.assign(panel.dataset, { cell, count });
  fill(panel, make("h3", {}, make("span", { class: "swatch bands", "aria-hidden": "true" }), "Merged blocks"), list,
    make("p", { class: "facts" }, "This page does not show them one by one, to stay small: --max-page shows more."));
}

function startBlock() {
  showBlockPanel();
  on("selected run by", showBlockPanel);
}
