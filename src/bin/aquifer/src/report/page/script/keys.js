// The keyboard, and the buttons that do the same.

const CURSOR_STEP = 1 / 200;

// [keys, words, action]
const KEYS = [
  [["p"], "jump to the peak", jumpToPeak],
  [["0"], "show all of the time and all addresses", showAll],
  [["+", "="], "zoom in at the cursor", () => zoomByKey(0.5)],
  [["-", "_"], "zoom out", () => zoomByKey(2)],
  [["ArrowLeft"], "move the cursor back", () => moveCursor(-1)],
  [["ArrowRight"], "move the cursor on", () => moveCursor(1)],
  [["m"], "select the largest block of what is shown below", selectLargest],
  [["Shift+ArrowLeft"], "pan back", () => pan(-0.2)],
  [["Shift+ArrowRight"], "pan on", () => pan(0.2)],
  [["Shift+ArrowUp"], "pan to higher addresses", () => panAddresses(0.2)],
  [["Shift+ArrowDown"], "pan to lower addresses", () => panAddresses(-0.2)],
  [["PageUp"], "fewer addresses, in the map", (map) => map && zoomAddressesByKey(0.5)],
  [["PageDown"], "more addresses, in the map", (map) => map && zoomAddressesByKey(2)],
  [["n"], "cursor to the next event of note", () => jumpToMarker(1)],
  [["b"], "cursor to the event of note before", () => jumpToMarker(-1)],
  [["Enter"], "show below what lives at the cursor", instantToCursor],
  [["f"], "let what is shown below follow the cursor", toggleFollow],
  [["Escape"], "let the selected block go", letGo],
  [["t"], "dark or light", switchTheme],
  [["?"], "show these keys", () => byId("help").showModal()],
];
const KEY_NAMES = {
  ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", PageUp: "Page up", PageDown: "Page down",
  Escape: "Esc", "-": "−",
};

function showAll() {
  state.addresses = null;
  setView(state.full.x0, state.full.x1);
  announce("view");
}

function zoomByKey(factor) {
  const { x0, x1 } = state.view;
  const { cursor } = state;
  zoomAt(cursor !== null && cursor >= x0 && cursor <= x1 ? cursor : (x0 + x1) / 2, factor);
}

function zoomAddressesByKey(factor) {
  const { a0, a1 } = addressView();
  const i = state.selected;
  const { offset, bytes } = shownRun().blocks;
  const middle = i >= 0 ? offset[i] + bytes[i] / 2 : (a0 + a1) / 2;
  zoomAddresses(factor, Math.min(Math.max(middle, a0), a1));
}

function panAddresses(share) {
  const { a0, a1 } = addressView();
  setAddresses(a0 + (a1 - a0) * share, a1 + (a1 - a0) * share);
}

function moveCursor(steps) {
  const { x0, x1 } = state.view;
  setCursor(state.cursor === null ? (x0 + x1) / 2 : state.cursor + (x1 - x0) * CURSOR_STEP * steps);
  reveal(state.cursor);
}

function letGo() {
  pinned = false;
  select(-1);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const target = event.target instanceof Element ? event.target : document.body;
  const typing = target.closest("select, input:not([type=checkbox]), textarea");
  const pressing = target.closest("button, a, summary, label") && ["Enter", " "].includes(event.key);
  if (typing || pressing) return;
  const inPlot = target.closest(".plot");
  // Pages scroll the page, unless the map has the focus.
  const scrolls = ["PageUp", "PageDown"].includes(event.key);
  const inMap = inPlot === byId("map");
  if (scrolls && !inMap) return;
  const name = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
  const entry = KEYS.find(([keys]) => keys.includes(name));
  if (!entry) return;
  event.preventDefault();
  entry[2](inMap);
}

function switchTheme() {
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  announce("theme");
}

function startKeys() {
  document.addEventListener("keydown", onKey);
  const buttons = {
    theme: switchTheme, "help-open": () => byId("help").showModal(), "to-peak": jumpToPeak, reset: showAll,
    "zoom-in": () => zoomByKey(0.5), "zoom-out": () => zoomByKey(2), "all-addresses": () => {
      state.addresses = null;
      announce("view");
    },
  };
  for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", () => action());
  const shown = (key) => key.split("+").map((part) => KEY_NAMES[part] ?? (part || "+")).join(" ");
  fill(byId("help-keys"), make("tbody", {}, ...KEYS.map(([keys, words]) => make("tr", {},
    make("td", {}, make("kbd", {}, shown(keys[0] === "+" ? "" : keys[0]))), make("td", {}, words)))));
}
