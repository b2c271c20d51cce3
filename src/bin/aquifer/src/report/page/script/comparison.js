// Two runs: what differs at their peaks.

function startComparison() {
  const { comparison } = state;
  if (!comparison || state.runs.length < 2) return;
  byId("comparison").hidden = false;
  const [a, b] = comparison.peaks ?? state.runs.map((run) => run.peak.live);
  const words = byId("comparison-words");
  const more = b > a ? "more" : "less";
  words.textContent = b === a ? `Both peaks are ${bytesText(a)}.`
    : `The peak of B is ${bytesText(b)}, ${bytesText(Math.abs(b - a))} ${more} than that of A (${bytesText(a)}).`;
  words.dataset.difference = comparison.difference ?? b - a;
  const choices = GROUPINGS.filter(([by]) => isList(comparison[by]) && comparison[by].length > 0);
  const select = byId("comparison-by");
  if (choices.length === 0) return;
  fillSelect(select, choices, choices.some(([by]) => by === state.by) ? state.by : choices[0][0]);
  const show = () => showComparison(comparison, select.value);
  select.addEventListener("change", show);
  show();
}

function showComparison(comparison, by) {
  const label = GROUPINGS.find(([each]) => each === by)[1];
  const rows = comparison[by].map((entry) => ({
    name: groupName(by, comparedName(by, entry)), a: entry.bytes[0], b: entry.bytes[1], difference: entry.difference,
  }));
  fill(byId("comparison-table"), sortableTable({
    label: `Differences at the peaks, by ${label}`,
    columns: [
      { key: "name", label: label[0].toUpperCase() + label.slice(1) }, bytesColumn("a", "A"), bytesColumn("b", "B"),
      { ...bytesColumn("difference", "B less A"), text: signedBytesText, sortBy: (row) => Math.abs(row.difference) },
    ],
    rows,
    sort: { key: "difference", down: true },
  }));
}

function comparedName(by, entry) {
  if (entry.name !== undefined && entry.name !== null) return entry.name;
  return by === "stack" && Number.isInteger(entry.stack) ? stackText(shownRun(), entry.stack) : "";
}
