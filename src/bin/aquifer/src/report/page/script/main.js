// Begins: reads the data, and starts each part. What goes wrong is said in one sentence.

function firstGrouping() {
  const useful = usefulGroupings().map(([by]) => by);
  const named = ["tag", "stack"].find((by) => useful.includes(by) && state.runs.some((run) => {
    const name = by === "tag" ? run.holders.tag?.[0]?.name : stackText(run, run.holders.stack?.[0]?.stack ?? 0);
    return Boolean(name);
  }));
  return named ?? "size";
}

function startChoices() {
  fillSelect(byId("group"), usefulGroupings(), state.by);
  byId("group").addEventListener("change", (event) => {
    state.by = event.target.value;
    announce("by");
  });
  const two = state.runs.length > 1;
  byId("run-choice").hidden = byId("alignment-choice").hidden = !two;
  if (!two) return;
  const { comparisons } = state.header;
  byId("device-choice").hidden = comparisons.length < 2;
  fillSelect(byId("device"), comparisons.map(({ device }, i) => [String(i), plainText(device)]), String(comparisons.indexOf(state.comparison)));
  byId("device").addEventListener("change", (event) => {
    location.hash = event.target.value;
    location.reload();
  });
  fillSelect(byId("run"), state.runs.map((run, i) => [String(i), `${runLetter(i)}: ${plainText(run.name)}`]), "0");
  byId("run").addEventListener("change", (event) => chooseRun(Number(event.target.value)));
  const clocks = new Set(state.runs.map((run) => run.clock));
  byId("alignment").value = clocks.size > 1 ? "relative" : "time";
  byId("alignment").options[0].disabled = clocks.size > 1;
  byId("alignment").addEventListener("change", (event) => setAlignment(event.target.value));
}

// The plots are drawn anew in another width; print has its own width and is always light.
function startSizes() {
  let width = document.body.clientWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      announce("resize");
    }, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.body.style.width = "700px";
    setTheme("light");
    announce("resize");
    deliver();
  });
  window.addEventListener("afterprint", () => {
    document.body.style.width = "";
    setTheme(before ?? "light");
    announce("resize");
  });
}

function say(text) {
  const words = byId("key-figure");
  words.textContent = text;
  words.className = "damaged";
}

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const element = byId("data");
  const header = await readPayload(element.textContent);
  // The text is not needed any more, and it is the largest part of the page.
  element.textContent = "";
  state.header = header;
  // Each device that two inputs have in common is a pair of runs. The address says which is shown.
  const pair = Math.max(Math.min(Number.parseInt(location.hash.slice(1), 10) || 0, (header.runs.length >> 1) - 1), 0);
  state.runs = header.runs.slice(pair * 2, pair * 2 + 2);
  state.comparison = header.comparisons?.[pair] ?? null;
  state.by = firstGrouping();
  byId("main").hidden = false;
  startChoices();
  setAlignment(byId("alignment").value);
  setInstantToPeak();
  startSummary();
  startComparison();
  startCurves();
  startMap();
  startBlock();
  startInstant();
  startMarkers();
  startKeys();
  startSizes();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  byId("main").hidden = true;
  if (error instanceof DamagedPage) {
    say(`This page cannot be shown: ${error.message}. Write it again with “aquifer report”.`);
  } else {
    say(`This page cannot be shown: its data is not as expected (${error?.message ?? error}). Write it again with “aquifer report”.`);
  }
  document.documentElement.dataset.damaged = "true";
});
