// Elements of the page, and tables that sort. Text goes in by textContent alone: no markup in the
// data can become markup of the page.

const byId = (id) => document.getElementById(id);

// make("td", { class: "number", dataset: { bytes: 12 } }, "12 B", child, …)
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

// Control characters would hide or reorder text, so they are shown as their symbols.
function plainText(text) {
  return String(text)
    .replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

const numeric = { number: true, descendsFirst: true };
const bytesColumn = (key, label) => ({ key, label, ...numeric, text: bytesText, exact: exactBytesText });
const countColumn = (key, label) => ({ key, label, ...numeric, text: countText });

const classOf = (column) => `${column.number ? "number" : "name"}${column.wide ? " wide" : ""}`;

// Builds a table from columns ({key, label, text?, number?, exact?, cell?, sortBy?, wide?}) and rows.
// A `wide` column is left out where there is little room.
// Heads of columns are buttons that sort; a row with `last` stays below the others.
function sortableTable({ caption, columns, rows, sort = null, label = null }) {
  const order = { key: sort?.key ?? null, down: sort?.down ?? true };
  const body = make("tbody");
  const heads = columns.map((column) => {
    const button = make("button", { type: "button", onclick: () => {
      order.down = order.key === column.key ? !order.down : Boolean(column.descendsFirst);
      order.key = column.key;
      show();
    } }, column.label);
    return make("th", { scope: "col", class: classOf(column) }, button);
  });
  const cells = rows.map((row) => make("tr", { dataset: row.dataset ?? {} }, ...columns.map((column) => {
    const value = row[column.key];
    const exact = column.exact && value !== null && value !== undefined ? column.exact(value) : null;
    const content = column.cell ? column.cell(row) : column.text ? column.text(value) : plainText(value);
    const data = column.number && value !== null && value !== undefined ? { value } : {};
    return make("td", { class: classOf(column), title: exact, dataset: data }, content);
  })));
  const show = () => {
    const places = rows.map((_, index) => index);
    const column = columns.find((each) => each.key === order.key);
    const valueOf = (index) => (column.sortBy ? column.sortBy(rows[index]) : rows[index][column.key]);
    if (column) {
      places.sort((a, b) => {
        if (Boolean(rows[a].last) !== Boolean(rows[b].last)) return rows[a].last ? 1 : -1;
        const [x, y] = [valueOf(a) ?? -Infinity, valueOf(b) ?? -Infinity];
        const by = isText(x) || isText(y) ? String(x).localeCompare(String(y)) : x - y;
        return (order.down ? -by : by) || a - b;
      });
    }
    columns.forEach((each, index) => {
      if (each.key === order.key) heads[index].setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else heads[index].removeAttribute("aria-sort");
    });
    body.replaceChildren(...places.map((index) => cells[index]));
  };
  show();
  return make("table", { "aria-label": label }, caption ? make("caption", {}, caption) : null,
    make("thead", {}, make("tr", {}, ...heads)), body);
}

function fillSelect(select, choices, chosen) {
  fill(select, ...choices.map(([value, text]) => make("option", { value }, text)));
  select.value = chosen;
}
