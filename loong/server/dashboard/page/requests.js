// The table of requests, the story of one, and what a batch does.

import { getJson } from "./stream.js";
import { element, fillTable, percent, seconds, tokens } from "./words.js";

const MAX_ROWS = 200;
const isLate = (value, target) => value !== null && value > target;
const isRunLate = (run) => isLate(run.ttft, run.ttft_target) || isLate(run.tpot, run.tpot_target);
/** Each column: its heading, what a cell shows, and by what rows are sorted. */
const COLUMNS = [
  ["request", (run) => linkTo(run.id), (run) => run.id],
  ["state", (run) => run.state, (run) => run.state],
  ["came", (run, now) => `${seconds(now - run.arrived)} ago`, (run) => run.arrived],
  ["waited", (run, now) => (run.waited === null ? `${seconds(now - run.arrived)} ...` : seconds(run.waited)), (run, now) => run.waited ?? now - run.arrived],
  ["prompt", (run) => tokens(run.prompt), (run) => run.prompt],
  ["cached", (run) => (run.cached ? tokens(run.cached) : ""), (run) => run.cached],
  ["output", (run) => tokens(run.output), (run) => run.output],
  ["first token", (run) => against(run.ttft, run.ttft_target), (run) => run.ttft ?? -1],
  ["its target", (run) => seconds(run.ttft_target), (run) => run.ttft_target],
  ["a token", (run) => against(run.tpot, run.tpot_target), (run) => run.tpot ?? -1],
  ["its target", (run) => seconds(run.tpot_target), (run) => run.tpot_target],
  ["late", (run) => (isRunLate(run) ? element("span", { className: "late" }, "late") : ""), isRunLate],
  ["DoP", (run) => run.dops.slice(-6).join("→"), (run) => Math.max(0, ...run.dops)],
];
const FILTERS = { all: () => true, live: (run) => run.end === null, late: isRunLate };
const sorted = { column: 2, isDown: true }; // newest first

function against(value, target) {
  return element("span", { className: isLate(value, target) ? "late" : "" }, seconds(value));
}

function openWith(title, ...content) {
  const dialog = document.getElementById("story");
  document.getElementById("story-title").textContent = title;
  document.getElementById("story-text").replaceChildren(...content);
  if (!dialog.open) dialog.showModal();
}

const linkTo = (id) => element("button", { type: "button", className: "request", onclick: () => openStory(id) }, id);
const sentence = (text) => element("p", {}, text);

async function openWhenThere(title, path, tell) {
  openWith(title, sentence("..."));
  try {
    openWith(title, ...tell(await getJson(path)));
  } catch (error) {
    openWith(title, element("p", { className: "late" }, error.message));
  }
}

export function openStory(id) {
  return openWhenThere(id, `/dashboard/requests/${encodeURIComponent(id)}`, (story) => {
    const chapters = element("dl");
    for (const { time, sentences } of story.chapters) {
      chapters.append(element("dt", {}, `+${time.toFixed(3)} s`), element("dd", {}, ...sentences.map(sentence)));
    }
    return [...story.heading.map(sentence), chapters];
  });
}

export function openBatch({ id, phase, instances }) {
  return openWhenThere(`Batch ${id}: ${phase}, DoP ${instances.length}`, `/dashboard/batches/${id}`, (batch) => {
    const table = element("table");
    const rows = batch.parts.map((part) => [linkTo(part.id), part.prompt === null ? "" : tokens(part.prompt), part.does]);
    fillTable(table, ["request", "prompt", "in this batch"], rows);
    const served = batch.holders.length ? `, served by ${batch.holders.join(", ")}` : "";
    return [sentence(`On instance${batch.instances.length > 1 ? "s" : ""} ${batch.instances.join(", ")}${served}. ${timesOf(batch)}`), ...batch.why.map(sentence), element("div", { className: "scroll" }, table)];
  });
}

function timesOf(batch) {
  const predicted = batch.predicted_seconds === null ? "" : `${seconds(batch.predicted_seconds)} predicted`;
  if (batch.seconds === null) return `It runs${batch.max_steps > 1 ? `, up to ${batch.max_steps} steps` : ""}${predicted && `; a step is ${predicted}`}.`;
  const steps = batch.max_steps > 1 ? `${batch.num_steps} of up to ${batch.max_steps} steps; a step took` : "It took";
  const off = batch.predicted_seconds ? batch.seconds / batch.predicted_seconds - 1 : 0;
  const words = predicted && `, ${predicted}: ${percent(Math.abs(off))} ${off < 0 ? "less" : "more"}`;
  return `${steps} ${seconds(batch.seconds)}${words}.`;
}

const rows = new Map(); // of the requests shown, by id
let isHeld = false; // while a mouse or a finger is on the rows

function begin(table, redraw) {
  fillTable(table, [], []);
  const head = table.tHead.rows[0];
  COLUMNS.forEach(([heading], column) => {
    const onclick = () => {
      Object.assign(sorted, { column, isDown: sorted.column === column ? !sorted.isDown : true });
      redraw();
    };
    head.append(element("th", { scope: "col" }, element("button", { type: "button", onclick }, heading)));
  });
  for (const [kind, holds] of [["pointerenter", true], ["pointerdown", true], ["pointerleave", false], ["pointercancel", false]]) {
    table.tBodies[0].addEventListener(kind, () => (isHeld = holds));
  }
}

function compare(now) {
  const [, , keyOf] = COLUMNS[sorted.column], sign = sorted.isDown ? -1 : 1;
  return (a, b) => {
    const [left, right] = [keyOf(a, now), keyOf(b, now)];
    return left === right ? b.arrived - a.arrived : left < right ? -sign : sign;
  };
}

function rowOf(run) {
  const made = element("tr", {}, ...COLUMNS.map(() => element("td")));
  made.cells[0].append(linkTo(run.id));
  rows.set(run.id, made);
  return made;
}

/** Rows stay the same elements, and none comes, goes or moves under a pointer, so that a click meets its aim. */
export function drawRequests(table, { live, over, now }, filter, redraw) {
  if (!table.tBodies.length) begin(table, redraw);
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    cell.ariaSort = column !== sorted.column ? "none" : sorted.isDown ? "descending" : "ascending";
  });
  const runs = [...live, ...over].filter(FILTERS[filter]).sort(compare(now)).slice(0, MAX_ROWS);
  const body = table.tBodies[0], shown = new Set(runs.map((run) => run.id));
  for (const [id, row] of rows) {
    if (isHeld || shown.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  runs.forEach((run, i) => {
    if (isHeld && !rows.has(run.id)) return;
    const row = rows.get(run.id) ?? rowOf(run);
    COLUMNS.slice(1).forEach(([, show], column) => row.cells[column + 1].replaceChildren(show(run, now)));
    if (!isHeld && body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
  });
}
