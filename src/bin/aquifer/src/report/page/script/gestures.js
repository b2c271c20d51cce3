// Wheel, fingers and clicks on a plot. Dragging with a mouse to select a range is uPlot's own.

// When the last gesture was: drawing is coarser for as long as one lasts.
let lastGesture = -Infinity;
const gestureLasts = () => performance.now() - lastGesture < 120;

// `options`: xAt and yAt give axis values of a pointer event; zoomY (factor, y) and tap (x, y) are
// called for a wheel with Shift and for a click or tap.
function addGestures(target, options) {
  const { xAt, yAt, zoomY, tap } = options;
  target.addEventListener("wheel", (event) => {
    const step = event.deltaMode === 1 ? 16 : 1;
    const [dx, dy] = [event.deltaX * step, event.deltaY * step];
    if (event.shiftKey && zoomY) {
      event.preventDefault();
      zoomY(2 ** ((dy || dx) / 240), yAt(event));
    } else if (Math.abs(dx) > Math.abs(dy) || event.shiftKey) {
      event.preventDefault();
      pan((dx || dy) / target.clientWidth);
    } else {
      // At the whole span, the page scrolls on.
      const { view, full } = state;
      if (dy > 0 && view.x1 - view.x0 >= (full.x1 - full.x0) * 0.999999) return;
      event.preventDefault();
      zoomAt(xAt(event), 2 ** (dy / 240));
    }
    lastGesture = performance.now();
  }, { passive: false });
  addFingers(target, options);
  let pressed = null;
  target.addEventListener("mousedown", (event) => { pressed = [event.clientX, event.clientY]; });
  target.addEventListener("click", (event) => {
    const moved = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]);
    pressed = null;
    if (!(moved > 4)) tap(xAt(event), yAt(event));
  });
}

// One finger pans along the time axis, two fingers zoom; up and down the page scrolls.
function addFingers(target, { xAt }) {
  const fingers = new Map();
  let start = null;
  const begin = () => {
    const xs = [...fingers.values()];
    start = { view: { ...state.view }, xs };
  };
  target.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") return;
    fingers.set(event.pointerId, event.clientX);
    begin();
    setCursor(xAt(event));
  });
  target.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, event.clientX);
    const now = [...fingers.values()];
    const box = target.getBoundingClientRect();
    const { x0, x1 } = start.view;
    const perPixel = (x1 - x0) / box.width;
    if (now.length === 1) {
      const by = (start.xs[0] - now[0]) * perPixel;
      setView(x0 + by, x1 + by);
    } else if (now.length === 2 && start.xs.length === 2) {
      const spread = Math.max(Math.abs(start.xs[0] - start.xs[1]), 8);
      const factor = spread / Math.max(Math.abs(now[0] - now[1]), 8);
      const middle = x0 + ((start.xs[0] + start.xs[1]) / 2 - box.left) * perPixel;
      const share = ((now[0] + now[1]) / 2 - box.left) / box.width;
      const length = (x1 - x0) * factor;
      setView(middle - share * length, middle + (1 - share) * length);
    }
    lastGesture = performance.now();
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    target.addEventListener(end, (event) => {
      if (fingers.delete(event.pointerId)) begin();
    });
  }
}
