// What lives at an instant: a table by the chosen grouping, and the largest blocks.

const MOST_ROWS = 50;

// Rows of the table. At the peak they are those of the header: events of the same time are told
// apart there, and merged blocks counted.
function instantRows() {
  const run = shownRun();
  const { by } = state;
  const holders = run.holders[by];
  if (state.instant.peak && isList(holders) && holders.length > 0) {
    const rows = holders.map((holder, place) => {
      const isRest = place === MOST_ROWS;
      const stack = by === "stack" ? holder.stack ?? null : null;
      const name = isRest ? "the rest" : stack === null ? groupName(by, holder.name ?? "") : groupName(by, stackText(run, stack));
      const colour = isRest ? OTHERS : colourOfName(run, by, holder.name, stack);
      return { name, bytes: holder.bytes, blocks: holder.blocks ?? null, stack, colour, last: isRest };
    });
    return { rows, live: run.peak.live, pending: run.peak.pending ?? 0, blocks: run.peak.blocks };
  }
  const groups = grouping(run, by);
  const found = livingAt(run, state.instant.t, groups);
  const all = found.groups.sort((a, b) => b.bytes - a.bytes || a.group - b.group);
  const rows = all.slice(0, MOST_ROWS).map(({ group, bytes, blocks }) => ({
    name: groupName(by, groups.nameOf(group)), bytes, blocks, stack: by === "stack" ? group : null,
    colour: groups.colour[group],
  }));
  const rest = all.slice(MOST_ROWS);
  if (rest.length > 0) rows.push(restRow("the rest", rest));
  const merged = run.bands ? bandAt(run.bands, state.instant.t) : 0;
  if (merged > 0) {
    rows.push({ ...restRow(`blocks below ${bytesText(run.bands.below)}, merged in this page`, []), bytes: merged, blocks: null });
  }
  return { rows, live: found.live + merged, pending: found.pending, blocks: found.blocks };
}

function restRow(name, groups) {
  const sum = (key) => groups.reduce((total, group) => total + group[key], 0);
  return { name, bytes: sum("bytes"), blocks: sum("blocks"), stack: null, colour: OTHERS, last: true };
}

function bandAt(bands, t) {
  const place = after(bands.t, t) - 1;
  return place < 0 ? 0 : bands.live[place];
}

function showInstant() {
  const run = shownRun();
  const { peak, t } = state.instant;
  const { rows, live, pending, blocks } = instantRows();
  const label = GROUPINGS.find(([by]) => by === state.by)[1];
  const when = timeText(t, run.clock, runLength(run) * 1e-4);
  byId("instant-title").textContent = peak ? `What lives at the peak${ofRun()}` : `What lives at ${when}${ofRun()}`;
  byId("instant-peak").setAttribute("aria-pressed", String(peak));
  byId("instant-cursor").setAttribute("aria-pressed", String(!peak && !state.follow));
  byId("follow").setAttribute("aria-pressed", String(state.follow));
  const words = byId("instant-words");
  words.textContent = `${bytesText(live)} live in ${plural(blocks ?? 0, "block")}`
    + `${pending > 0 ? `, and ${bytesText(pending)} freed but still in use by another stream` : ""}`
    + `${peak ? ` (${when})` : ""}.`;
  Object.assign(words.dataset, { live, pending, blocks, t });
  for (const row of rows) row.share = row.bytes / Math.max(live, 1);
  const nameCell = (row) => make("span", { title: row.stack === null ? null : stackTitle(run, row.stack) }, swatch(row.colour), row.name);
  fill(byId("instant-table"), sortableTable({
    label: `What lives, by ${label}`,
    columns: [
      { key: "name", label: label[0].toUpperCase() + label.slice(1), cell: nameCell },
      bytesColumn("bytes", "Bytes"),
      { ...bytesColumn("share", "Share"), text: (share) => shareText(share, 1), exact: null },
      countColumn("blocks", "Blocks"),
    ],
    rows,
    sort: { key: "bytes", down: true },
  }));
  showLargest(run, t);
}

const stackTitle = (run, stack) => run.stacks[stack].slice(0, 12).map((id) => plainText(run.strings[id])).join("\n");

function showLargest(run, t) {
  const { bytes, stream, birth, freed } = run.blocks;
  const { of, nameOf, colour } = grouping(run, state.by);
  const label = GROUPINGS.find(([by]) => by === state.by)[1];
  const rows = largestAt(run, t, 12).map((i) => ({
    i, bytes: bytes[i], name: groupName(state.by, nameOf(of[i])), colour: colour[of[i]], stream: groupName("stream", run.strings[stream[i]]),
    birth: birth[i], life: Math.min(freed[i], run.end) - birth[i],
  }));
  const time = (key, label, text) => ({ key, label, ...numeric, text: (value) => text(value, run.clock) });
  fill(byId("largest-table"), rows.length === 0 ? make("p", {}, "No block lives at this time.") : sortableTable({
    label: "The largest blocks",
    columns: [
      { key: "name", label: label[0].toUpperCase() + label.slice(1), cell: (row) => make("span", {}, swatch(row.colour), row.name) },
      bytesColumn("bytes", "Bytes"), { key: "stream", label: "Stream", wide: true },
      time("birth", "Allocated", timeText), { ...time("life", "Lived", spanText), wide: true },
      { key: "i", label: "Block", cell: (row) => make("button", { type: "button", class: "link",
        "aria-label": `Show block ${row.i + 1} in the map`, onclick: () => {
          showBlock(row.i);
          byId("map-section").scrollIntoView({ block: "nearest" });
        } }, "show") },
    ],
    rows,
    sort: { key: "bytes", down: true },
  }));
}

function startInstant() {
  byId("instant-peak").addEventListener("click", setInstantToPeak);
  byId("instant-cursor").addEventListener("click", instantToCursor);
  byId("follow").addEventListener("click", toggleFollow);
  showInstant();
  on("instant by run", showInstant);
}

function instantToCursor() {
  state.follow = false;
  setInstant(state.cursor ?? toX(shownRun(), shownRun().peak.t));
}

function toggleFollow() {
  state.follow = !state.follow;
  if (state.follow && state.cursor !== null) setInstant(state.cursor);
  announce("instant");
}
