// A treemap: rectangles whose areas are the shares, as square as they can be (Bruls, Huizing and
// van Wijk, "Squarified Treemaps", 2000).

// Lays out descending values in a box; gives {x, y, w, h} for each.
function squarify(values, x, y, w, h) {
  const boxes = [];
  let total = values.reduce((a, b) => a + b, 0);
  let first = 0;
  while (first < values.length && total > 0 && w > 0 && h > 0) {
    const side = Math.min(w, h);
    const scale = (w * h) / total;
    let [sum, last, worst] = [0, first, Infinity];
    while (last < values.length) {
      const next = sum + values[last];
      const ratio = worstRatio(values[first], values[last], next, side, scale);
      if (ratio > worst) break;
      [sum, worst] = [next, ratio];
      last += 1;
    }
    const thick = (sum * scale) / side;
    let along = 0;
    for (let i = first; i < last; i++) {
      const long = sum > 0 ? (values[i] / sum) * side : 0;
      boxes.push(w >= h ? { x, y: y + along, w: thick, h: long } : { x: x + along, y, w: long, h: thick });
      along += long;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    total -= sum;
    first = last;
  }
  return boxes;
}

function worstRatio(most, least, sum, side, scale) {
  const area = (sum * scale) ** 2;
  const square = side * side;
  return Math.max((square * most * scale) / area, area / (square * Math.max(least, 1e-300) * scale));
}

// Shows rows {name, bytes, colour} in an element.
function showTreemap(element, rows, whole) {
  const shown = rows.filter((row) => row.bytes > 0).sort((a, b) => b.bytes - a.bytes).slice(0, 60);
  const boxes = squarify(shown.map((row) => row.bytes), 0, 0, element.clientWidth || 600, element.clientHeight || 300);
  fill(element, ...boxes.map((box, i) => {
    const { name, bytes, colour } = shown[i];
    const text = `${name}: ${bytesText(bytes)}, ${shareText(bytes, whole)}`;
    const cell = make("div", { class: groupClass(colour), title: text });
    for (const [property, value] of [["left", box.x], ["top", box.y], ["width", box.w], ["height", box.h]]) {
      cell.style[property] = `${value}px`;
    }
    if (box.w > 48 && box.h > 22) cell.append(make("span", {}, box.h > 40 ? name : text));
    if (box.w > 48 && box.h > 44) cell.append(make("br"), make("span", {}, `${bytesText(bytes)}, ${shareText(bytes, whole)}`));
    return cell;
  }));
}
