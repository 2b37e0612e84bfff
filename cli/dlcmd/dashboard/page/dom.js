// Makes and updates elements. Names reach the page by `textContent` alone, never as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Set a text only if it changes: this keeps selections, and costs no layout.
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

// A table whose rows are kept by the items' `id`. `columns`: {label, number, sort, down, fill(cell,
// item)}; the first cell of a row is its header. `sort(item)` gives the value to sort by; columns
// that are `number` or `down` are sorted from the largest value first.
export class Table {
  constructor(place, caption, columns, { empty = "", sort = null, descending = true } = {}) {
    this.columns = columns;
    this.sort = sort;
    this.descending = descending;
    this.rows = new Map();
    this.items = [];
    this.limit = Infinity;
    this.head = make("tr", { role: "row" });
    this.body = make("tbody", { role: "rowgroup" });
    const table = make("table", { role: "table" }, make("caption", { class: "unseen" }, caption),
      make("thead", { role: "rowgroup" }, this.head), this.body);
    this.frame = make("div", { class: "scroll" }, table);
    this.note = make("p", { class: "empty" });
    setText(this.note, empty);
    this.note.hidden = true;
    columns.forEach((column, at) => this.head.append(this.#header(column, at)));
    place.append(this.frame, this.note);
    this.#mark();
  }

  #header(column, at) {
    const cell = make("th", { scope: "col", role: "columnheader", ...(column.number ? { class: "n" } : {}) });
    if (!column.sort) {
      cell.textContent = column.label;
      return cell;
    }
    const button = make("button", { type: "button" }, column.label);
    button.addEventListener("click", () => {
      this.descending = this.sort === at ? !this.descending : Boolean(column.number || column.down);
      this.sort = at;
      this.#mark();
      this.update(this.items);
    });
    cell.append(button);
    return cell;
  }

  #mark() {
    [...this.head.children].forEach((cell, at) => {
      if (at === this.sort) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  update(items) {
    this.items = items;
    const by = this.sort === null ? null : this.columns[this.sort].sort;
    const sorted = by ? [...items].sort((one, other) => compare(by(one), by(other)) * (this.descending ? -1 : 1)) : items;
    const shown = sorted.slice(0, this.limit);
    const keys = new Set(shown.map((item) => item.id));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    shown.forEach((item, at) => {
      let row = this.rows.get(item.id);
      if (!row) {
        row = make("tr", { role: "row" });
        this.columns.forEach((column, i) => {
          const cell = i ? make("td", { role: "cell", "data-label": column.label })
            : make("th", { scope: "row", role: "rowheader" });
          if (column.number) cell.className = "n";
          row.append(cell);
        });
        this.rows.set(item.id, row);
      }
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
      this.columns.forEach((column, i) => {
        const cell = row.children[i];
        column.fill(cell, item, row);
        cell.classList.toggle("blank", cell.textContent === "–");
      });
    });
    this.frame.hidden = items.length === 0;
    this.note.hidden = items.length !== 0;
  }
}

function compare(one, other) {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  return one < other ? -1 : 1;
}

// A bar of coloured parts; `parts` are [colour's name, share of the whole].
export function meter(cell, parts, text) {
  let bar = cell.firstElementChild;
  if (!bar || bar.className !== "cellbar") {
    bar = make("div", { class: "cellbar" }, make("span", {}), make("div", { class: "meter", "aria-hidden": "true" }));
    cell.replaceChildren(bar);
  }
  setText(bar.firstChild, text);
  const track = bar.lastChild;
  while (track.children.length > parts.length) track.lastChild.remove();
  parts.forEach(([colour, share], at) => {
    const part = track.children[at] ?? track.appendChild(make("i"));
    part.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
    part.style.background = `var(--${colour})`;
  });
}

export function pairs(list, entries) {
  entries.forEach(([name, value], at) => {
    let term = list.children[2 * at];
    if (!term) {
      term = make("dt");
      list.append(term, make("dd", { "data-figure": "" }));
    }
    setText(term, name);
    setText(term.nextElementSibling, value);
  });
  while (list.children.length > 2 * entries.length) list.lastChild.remove();
}
