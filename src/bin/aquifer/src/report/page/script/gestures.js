// Wheel and clicks on a plot. Dragging with a mouse to select a range is uPlot's own.

// When the last gesture was: drawing is coarser for as long as one lasts.
let lastGesture = -Infinity;
const gestureLasts = () => performance.now() - lastGesture < 120;

// xAt and yAt give axis values of a pointer event; zoomY (factor, y) and tap (x, y) are
// called for a wheel with Shift and for a click or tap.
function addGestures(target, { xAt, yAt, zoomY, tap }) {
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
  let pressed = null;
  target.addEventListener("mousedown", (event) => { pressed = [event.clientX, event.clientY]; });
  target.addEventListener("click", (event) => {
    const moved = pressed && Math.hypot(event.clientX - pressed[0], event.clientY - pressed[1]);
    pressed = null;
    if (!(moved > 4)) tap(xAt(event), yAt(event));
  });
}
