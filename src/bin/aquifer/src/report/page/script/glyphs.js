// Markers: a shape for each kind, the same in the plot, in its legend and in the list.

const MARKER_WORDS = {
  fail: ["failed request", "failed requests"],
  finding: ["finding", "findings"],
  release: ["release to the driver", "releases to the driver"],
  grow: ["growth", "growths"],
  move: ["move", "moves"],
  user: ["mark of the program", "marks of the program"],
};
const MARKER_KINDS = Object.keys(MARKER_WORDS);

const markerWords = (kind, count = 1) => (MARKER_WORDS[kind] ?? [plainText(kind), plainText(kind)])[count === 1 ? 0 : 1];

// Outlines in a square from -1 to 1.
const SHAPES = {
  grow: [[-0.9, 0.8], [0.9, 0.8], [0, -0.9]],
  release: [[-0.9, -0.8], [0.9, -0.8], [0, 0.9]],
  move: [[0, -1], [1, 0], [0, 1], [-1, 0]],
  fail: [
    [-0.9, -0.5], [-0.5, -0.9], [0, -0.4], [0.5, -0.9], [0.9, -0.5], [0.4, 0],
    [0.9, 0.5], [0.5, 0.9], [0, 0.4], [-0.5, 0.9], [-0.9, 0.5], [-0.4, 0],
  ],
  finding: [[-0.8, -0.8], [0.8, -0.8], [0.8, 0.8], [-0.8, 0.8]],
  user: [[-0.7, -1], [0.9, -0.45], [-0.4, 0.1], [-0.4, 1], [-0.7, 1]],
};

const glyphColour = (kind) => (kind === "fail" || kind === "finding" ? "--bad" : "--text");
const shapeOf = (kind) => SHAPES[kind] ?? SHAPES.move;

function drawGlyph(context, kind, x, y, size) {
  context.beginPath();
  for (const [dx, dy] of shapeOf(kind)) context.lineTo(x + dx * size, y + dy * size);
  context.closePath();
  context.fill();
}

function glyph(kind) {
  const svg = svgElement("svg", { viewBox: "-1.2 -1.2 2.4 2.4", class: "glyph", "aria-hidden": "true" });
  const points = shapeOf(kind).map((point) => point.join(",")).join(" ");
  svg.append(svgElement("polygon", { points, fill: `var(${glyphColour(kind)})` }));
  return svg;
}

function svgElement(tag, properties) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  return element;
}
