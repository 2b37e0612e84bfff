// Charts over time, as SVG: areas that are stacked, or lines.

import { make, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600, HEIGHT = 150, LEFT = 46, BOTTOM = 18, TOP = 8;
const GAP_S = 20; // between two points with a longer gap, nothing was measured

export class Chart {
  // `series`: {name (of its colour), label, value(columns, at)}; `text(value)` writes a value; `top`
  // is the upper end of areas that add up to a whole (0: the end fits the values).
  constructor(place, title, series, { stacked = false, text, top = 0 }) {
    Object.assign(this, { title, series, stacked, text, whole: top });
    this.readout = make("output");
    this.plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.legend = make("ul", { class: "legend" });
    for (const each of series) {
      const entry = make("li", {}, each.label);
      entry.style.setProperty("--c", `var(--${each.name})`);
      this.legend.append(entry);
    }
    place.append(make("figure", {}, make("figcaption", {}, make("span", {}, title), this.readout), this.plot, this.legend));
    this.plot.addEventListener("pointermove", (event) => this.#point(event));
    this.plot.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(() => this.points && this.draw(this.points, this.from, this.to)).observe(this.plot);
  }

  draw(points, from, to) {
    Object.assign(this, { points, from, to });
    const wide = Math.max(this.plot.clientWidth, 200);
    this.plot.setAttribute("viewBox", `0 0 ${wide} ${HEIGHT}`);
    const times = points.time ?? [];
    const first = times.findIndex((time) => time >= from);
    const places = first < 0 ? [] : Array.from({ length: times.length - first }, (_, at) => at + first);
    const values = this.series.map((each) => places.map((at) => Math.max(each.value(points, at) || 0, 0)));
    let highest = 0;
    places.forEach((_, i) => {
      const all = values.map((row) => row[i]);
      highest = Math.max(highest, this.stacked ? all.reduce((sum, each) => sum + each, 0) : Math.max(...all));
    });
    const top = this.whole || roundUp(highest);
    const x = (time) => LEFT + ((wide - LEFT) * (time - from)) / (to - from);
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / top;
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: wide, y1: y(part * top), y2: y(part * top) }));
      parts.push(svg("text", { x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, this.text(part * top)));
    }
    for (const part of [0, 0.5, 1]) {
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const at = from + part * (to - from);
      parts.push(svg("text", { x: x(at), y: HEIGHT - 4, "text-anchor": anchor }, part === 1 ? "now" : clock(at)));
    }
    const floor = places.map(() => 0);
    this.series.forEach((each, row) => {
      for (const run of runs(places, times)) {
        const upper = run.map((i) => floor[i] + values[row][i]);
        const line = run.map((i, at) => `${x(times[places[i]]).toFixed(1)},${y(this.stacked ? upper[at] : values[row][i]).toFixed(1)}`);
        if (this.stacked) {
          const lower = run.map((i) => `${x(times[places[i]]).toFixed(1)},${y(floor[i]).toFixed(1)}`).reverse();
          const area = svg("path", { d: `M${line.join("L")}L${lower.join("L")}Z` });
          area.style.fill = `var(--${each.name})`;
          parts.push(area);
        } else {
          const path = svg("path", { class: "line", d: `M${line.join("L")}` });
          path.style.stroke = `var(--${each.name})`;
          parts.push(path);
        }
      }
      if (this.stacked) values[row].forEach((value, i) => { floor[i] += value; });
    });
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(...parts, this.cross);
    Object.assign(this, { places, times, values, x });
    const last = places.length - 1;
    const described = last < 0 ? "nothing was measured yet" : this.#largest(last);
    this.plot.setAttribute("aria-label", `${this.title}: ${described}`);
    if (!this.isPointed) setText(this.readout, last < 0 ? "nothing yet" : "");
  }

  // The three largest values at a place, as text.
  #largest(i) {
    const named = this.series.map((each, row) => [each.label, this.values[row][i]]).filter(([, value]) => value > 0);
    const largest = named.sort((one, other) => other[1] - one[1]).slice(0, 3);
    return largest.map(([label, value]) => `${label} ${this.text(value)}`).join(", ") || "0";
  }

  #point(event) {
    if (!this.places?.length) return;
    this.isPointed = true;
    const at = event.offsetX;
    let near = 0;
    this.places.forEach((place, i) => {
      if (Math.abs(this.x(this.times[place]) - at) < Math.abs(this.x(this.times[this.places[near]]) - at)) near = i;
    });
    const time = this.times[this.places[near]];
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(time));
    this.cross.setAttribute("visibility", "visible");
    setText(this.readout, `${clock(time)}  ${this.#largest(near)}`);
  }

  #leave() {
    this.isPointed = false;
    this.cross?.setAttribute("visibility", "hidden");
    setText(this.readout, "");
  }
}

// The places in runs, each without a gap in time.
function runs(places, times) {
  const found = [];
  places.forEach((place, i) => {
    if (i && times[place] - times[places[i - 1]] < GAP_S) found[found.length - 1].push(i);
    else found.push([i]);
  });
  return found;
}

function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((each) => each * power >= value * 0.999) * power;
}

// A small line without axes.
export function spark(cell, values) {
  let plot = cell.firstElementChild;
  if (!plot || plot.tagName !== "svg") {
    plot = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path"));
    cell.replaceChildren(plot);
  }
  const top = Math.max(...values, 1e-9), step = 100 / Math.max(values.length - 1, 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(23 - (22 * value) / top).toFixed(1)}`);
  plot.firstChild.setAttribute("d", points.length > 1 ? `M0,24L${points.join("L")}L100,24` : "");
}
