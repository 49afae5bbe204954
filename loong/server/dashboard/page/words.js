// Numbers as text, and text as elements: nothing that a client sent is ever read as HTML.

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.9995) return `${(value * 1000).toPrecision(3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${Math.round(value)} s`;
}

export function tokens(value) {
  if (value >= 999_500) return `${(value / 1e6).toPrecision(3)}M`;
  return value >= 9_995 ? `${(value / 1000).toPrecision(3)}k` : String(Math.round(value));
}

export function percent(share) {
  return `${(100 * share).toFixed(share && share < 0.0995 ? 1 : 0)} %`;
}

export function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

/** A table of rows of cells; a cell is text, an element, or {bar: share, paint: its color}. */
export function fillTable(table, headings, rows) {
  const head = element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map(cell)));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function cell(content) {
  if (content?.bar === undefined) return element("td", {}, content ?? "");
  const bar = element("i");
  if (content.paint) bar.style.backgroundColor = content.paint;
  bar.style.width = `${100 * Math.min(1, content.bar)}%`;
  return element("td", { className: "bar" }, bar);
}
