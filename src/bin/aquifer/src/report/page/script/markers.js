// Failed requests with what explains them, and a list of all markers.

const MOST_MARKERS = 200;
const MOST_FAILURES = 3; // that are explained; a table has all

function startMarkers() {
  showFailures();
  showMarkers();
  on("run", showMarkers);
}

function jumpTo(t, index = state.run) {
  if (index !== state.run) chooseRun(index);
  const x = toX(shownRun(), t);
  reveal(x);
  setCursor(x);
  setInstant(x);
  byId("curves-section").scrollIntoView({ block: "nearest" });
}

function showFailures() {
  byId("failures").hidden = state.runs.every((run) => run.failures.length === 0);
  fill(byId("failures-list"), ...state.runs.flatMap((run, index) =>
    run.failures.slice(0, MOST_FAILURES).map((failure) => failureArticle(run, index, failure))));
  fill(byId("failures-table"), ...state.runs.filter((run) => failedRequests(run) > MOST_FAILURES).map(failuresTable));
}

function failuresTable(run) {
  const index = state.runs.indexOf(run);
  const refused = run.failure_groups.some((group) => group.refused_by);
  const time = (key, label) => ({ key, label, number: true, text: (t) => timeText(t, run.clock, runLength(run) * 1e-4) });
  return sortableTable({
    label: "All failed requests",
    caption: `All ${plural(failedRequests(run), "failed request")}${ofRun(index)}, by tag${refused ? " and budget" : ""}`,
    columns: [
      { key: "tag", label: "Tag", text: (tag) => groupName("tag", tag) },
      ...(refused ? [{ key: "refused_by", label: "Refused by", text: (budget) => plainText(budget) || "–" }] : []),
      countColumn("count", "Requests"),
      bytesColumn("least", "Smallest"), bytesColumn("most", "Largest"), time("first", "First"), time("last", "Last"),
      { key: "at", label: "Place", cell: ({ first }) => make("button", { type: "button", class: "link", onclick: () => jumpTo(first, index) }, "show") },
    ],
    rows: run.failure_groups,
  });
}

function failureArticle(run, index, failure) {
  const when = timeText(failure.t, run.clock, runLength(run) * 1e-4);
  const title = `${runLetter(index) ? `${runLetter(index)}: ` : ""}${bytesText(failure.bytes)} at ${when} `;
  return make("article", { class: "failure" },
    make("h3", {}, glyph("fail"), " ", title,
      make("button", { type: "button", class: "link", onclick: () => jumpTo(failure.t, index) }, "show")),
    ...failure.text.map((line) => make("p", {}, plainText(line))));
}

function showMarkers() {
  const run = shownRun();
  const { markers, markers_left_out: leftOut } = run;
  byId("markers-title").textContent = `Events of note${ofRun()}`;
  const counts = MARKER_KINDS.map((kind) => [kind, markers.filter((marker) => marker.kind === kind).length]);
  const words = counts.filter(([, count]) => count > 0).map(([kind, count]) => {
    const out = Number(leftOut[kind] ?? 0);
    return make("span", {}, glyph(kind), `${plural(count + out, markerWords(kind), markerWords(kind, 2))}`,
      out > 0 ? ` (${countText(out)} of them left out)` : null);
  });
  fill(byId("markers-words"), words.length === 0 ? make("p", {}, "There were no failures, findings, growths, releases or moves.")
    : make("div", { class: "legend" }, ...words));
  if (markers.length === 0) {
    fill(byId("markers-table"));
    return;
  }
  // Failures and findings first: growths alone may be thousands.
  const rank = (marker) => (MARKER_KINDS.indexOf(marker.kind) + 7) % 7;
  const chosen = markers.toSorted((a, b) => rank(a) - rank(b) || a.t - b.t).slice(0, MOST_MARKERS);
  fill(byId("markers-table"), sortableTable({
    label: "Events of note",
    caption: markers.length > MOST_MARKERS ? `The first ${MOST_MARKERS} of ${countText(markers.length)}` : null,
    columns: [
      { key: "t", label: "Time", number: true, text: (t) => timeText(t, run.clock, runLength(run) * 1e-5) },
      { key: "kind", label: "Event", cell: (marker) => make("span", {}, glyph(marker.kind), " ", markerWords(marker.kind)) },
      bytesColumn("bytes", "Bytes"), { key: "text", label: "Text" },
      { key: "at", label: "Place", cell: (marker) => make("button", { type: "button", class: "link",
        "aria-label": `Show the ${markerWords(marker.kind)} at ${timeText(marker.t, run.clock)}`, onclick: () => jumpTo(marker.t) }, "show") },
    ],
    rows: chosen.map(({ t, kind, bytes, text }) => ({ t, kind, bytes: bytes ?? null, text: text ?? "", at: t })),
  }));
}

// The next marker behind the cursor, or the one before it.
function jumpToMarker(direction) {
  const run = shownRun();
  const from = state.cursor === null ? (direction > 0 ? -Infinity : Infinity) : toTime(run, state.cursor);
  const slack = runLength(run) * 1e-9;
  let best = null;
  for (const { t } of run.markers) {
    const distance = (t - from) * direction;
    if (distance > slack && (best === null || (t - best) * direction < 0)) best = t;
  }
  if (best === null) return;
  const x = toX(run, best);
  reveal(x);
  setCursor(x);
}
