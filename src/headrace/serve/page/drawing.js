// Drawing: elements, formatted numbers, tables and charts.

// ---- elements

export function el(tag, attributes = {}, ...children) {
  const made = ["svg", "g", "rect", "path", "text", "title", "line"].includes(tag) && attributes.svg !== false
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false || name === "svg") continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export const number = (value) => (value === null || value === undefined ? "" : Math.abs(value) >= 1e15 ? String(value) : value.toLocaleString("en", { maximumFractionDigits: value % 1 && Math.abs(value) < 100 ? 2 : 0 }));
export const rate = (value) => (value === undefined || value === null ? "" : value >= 10 || value === 0 ? number(Math.round(value)) : value.toFixed(1));
export const bytes = (value) => { let unit = 0; while (value >= 1024 && unit < 4) { value /= 1024; unit++; } return `${value.toFixed(unit && value < 10 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`; };
export const shortRate = (value) => (value >= 1e6 ? `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)}M` : value >= 1000 ? `${(value / 1000).toFixed(value < 1e4 ? 1 : 0)}k` : rate(value));
export const clockSpan = (seconds) => { const [unit, name] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : seconds < 172800 ? [3600, "h"] : [86400, "days"]; return `${number(Math.round(seconds / unit))} ${name}`; };
export const when = (seconds) => (seconds === null || seconds === undefined ? "not begun" : new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19));
export const brief = (value) => (/^\d{4}-\d\d-\d\dT/.test(value) ? value.slice(11, 19) : plain(value));
export const plain = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));

export const right = (text) => el("span", { class: "number" }, text); // in a table, a text that stands where numbers do

export function tableOf(columns, rows, title = (name) => name) {
  const isFigure = (cell) => cell === null || typeof cell === "number" || (cell instanceof Node && cell.classList.contains("number"));
  const kind = Object.fromEntries(columns.map((name) => [name, rows.length > 0 && rows.every((row) => isFigure(row.cells[name])) ? "number" : null]));
  const shown = (cell) => (cell instanceof Node ? cell : typeof cell === "number" ? number(cell) : shownTime(plain(cell)));
  return el("table", {},
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col", class: kind[name] }, title(name))))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.how }, columns.map((name) => el("td", { class: kind[name] }, shown(row.cells[name])))))));
}

export const ownTable = (columns, rows) => tableOf(columns, rows, (name) => name.replaceAll("_", " "));
const shownTime = (text) => text.replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?Z$/, (all, day, time, rest) => `${day} ${time}${rest && !/^\.0+$/.test(rest) ? rest : ""}`);
export const rowsOf = (list) => list.map((cells) => ({ cells }));

export function replaceKeeping(place, ...fresh) {
  // What is typed, scrolled and focused stays where it is: only the contents change.
  const scrolled = place.querySelector(".scroll"), top = scrolled ? scrolled.scrollTop : 0, left = scrolled ? scrolled.scrollLeft : 0;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.at : null;
  place.replaceChildren(...fresh.filter(Boolean));
  const again = place.querySelector(".scroll");
  if (again) { again.scrollTop = top; again.scrollLeft = left; }
  if (focused) place.querySelector(`[data-at="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// ---- charts

const COLOURS = 6;

export function lineChart(label, times, series, shown = number) {
  const width = 640, height = 140, left = 56, bottom = 18;
  const values = Object.values(series).flat().filter((value) => value !== null && value !== undefined);
  if (!values.length || times.length < 2) return el("p", { class: "soft" }, `${label}: nothing to draw yet.`);
  const least = Math.min(0, ...values), most = Math.max(...values, least + 1e-9), first = times[0], last = times[times.length - 1];
  const x = (at) => left + ((at - first) / Math.max(last - first, 1e-9)) * (width - left - 8), y = (value) => height - bottom - ((value - least) / (most - least)) * (height - bottom - 8);
  const lines = Object.entries(series).map(([name, list], place) => {
    const path = list.map((value, at) => (value === null || value === undefined ? null : `${x(times[at]).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean).join("L");
    return path ? el("path", { class: `line colour${place % COLOURS}`, d: `M${path}` }, el("title", {}, name)) : null;
  });
  const newest = Object.entries(series).map(([name, list]) => { const value = list[list.length - 1]; return value === null || value === undefined ? `${name}: not begun` : `${name}: ${shown(value)}`; });
  return el("figure", { class: "chart" },
    el("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `${label}: ${newest.join(", ")}` },
      el("line", { class: "axis", x1: left, y1: y(least), x2: width - 8, y2: y(least) }), el("text", { x: 2, y: y(most) + 10, class: "soft" }, shown(most)), el("text", { x: 2, y: y(least), class: "soft" }, shown(least)), lines.filter((line, place) => place % 2 === 0), lines.filter((line, place) => place % 2)),
    el("figcaption", { class: "soft" }, `${label}, the last ${clockSpan(last - first)}`, el("ul", { class: "legend" }, newest.map((text, place) => el("li", {}, el("span", { class: `swatch colour${place % COLOURS}` }), text)))));
}

export function barChart(label, pairs) {
  if (!pairs.length) return null;
  const row = 20, width = 640, left = 190, most = Math.max(...pairs.map((pair) => Math.abs(pair[1])), 1e-9), height = pairs.length * row + 4;
  return el("figure", { class: "chart" },
    el("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": `${label} of the first ${pairs.length} rows` },
      pairs.map(([name, value], at) => el("g", {}, el("text", { x: left - 6, y: at * row + 15, "text-anchor": "end" }, name.length > 28 ? name.slice(0, 27) + "…" : name), el("rect", { class: "bar", x: left, y: at * row + 4, rx: 2, height: row - 8, width: Math.max(1, (Math.abs(value) / most) * (width - left - 90)) }), el("text", { x: left + (Math.abs(value) / most) * (width - left - 90) + 5, y: at * row + 15 }, number(value))))),
    el("figcaption", { class: "soft" }, label));
}
