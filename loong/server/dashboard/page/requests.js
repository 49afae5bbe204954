// The table of requests, and the story of one.

import { getJson } from "./stream.js";
import { element, fillTable, seconds, tokens } from "./words.js";

const MAX_ROWS = 200;
const HEADINGS = ["request", "state", "prompt", "output", "first token", "a token", "DoP"];
const FILTERS = {
  all: () => true,
  live: (run) => run.end === null,
  late: (run) => isLate(run.ttft, run.ttft_target) || isLate(run.tpot, run.tpot_target),
};

const isLate = (value, target) => value !== null && value > target;

function against(value, target) {
  return element("span", { className: isLate(value, target) ? "late" : "" }, seconds(value) + (isLate(value, target) ? " !" : ""));
}

function openWith(title, ...content) {
  const dialog = document.getElementById("story");
  document.getElementById("story-title").textContent = title;
  document.getElementById("story-text").replaceChildren(...content);
  if (!dialog.open) dialog.showModal();
}

const linkTo = (id) => element("button", { type: "button", className: "request", onclick: () => openStory(id) }, id);

export async function openStory(id) {
  openWith(id, element("p", {}, "..."));
  try {
    const story = await getJson(`/dashboard/requests/${encodeURIComponent(id)}`);
    const chapters = element("dl");
    for (const { time, sentences } of story.chapters) {
      const told = element("dd", {}, ...sentences.map((sentence) => element("p", {}, sentence)));
      chapters.append(element("dt", {}, `+${time.toFixed(3)} s`), told);
    }
    openWith(id, ...story.heading.map((sentence) => element("p", {}, sentence)), chapters);
  } catch (error) {
    openWith(id, element("p", { className: "late" }, error.message));
  }
}

export async function openBatch({ id, phase, instances }) {
  const title = `Batch ${id}: ${phase}, DoP ${instances.length}`;
  openWith(title, element("p", {}, "..."));
  try {
    const batch = await getJson(`/dashboard/batches/${id}`);
    const ids = batch.request_ids.map((requestId) => element("li", {}, linkTo(requestId)));
    openWith(title, element("p", {}, `On instances ${instances.join(", ")}.`), element("ul", {}, ...ids));
  } catch (error) {
    openWith(title, element("p", { className: "late" }, error.message));
  }
}

const rows = new Map(); // of the requests shown, by id
let isHeld = false; // while a mouse or a finger is on the table

function begin(table) {
  fillTable(table, HEADINGS, []);
  for (const [kind, holds] of [["pointerenter", true], ["pointerdown", true], ["pointerleave", false], ["pointercancel", false]]) {
    table.addEventListener(kind, () => (isHeld = holds));
  }
}

function cellsOf(run) {
  return [
    run.state,
    tokens(run.prompt),
    tokens(run.output),
    against(run.ttft, run.ttft_target),
    against(run.tpot, run.tpot_target),
    run.dops.slice(-6).join("→"),
  ];
}

function rowOf(run) {
  const made = element("tr", {}, element("td", {}, linkTo(run.id)), ...HEADINGS.slice(1).map(() => element("td")));
  rows.set(run.id, made);
  return made;
}

/** Newest first. Rows stay the same elements, and none comes or goes under a pointer, so that a click meets its aim. */
export function drawRequests(table, live, over, filter) {
  if (!table.tBodies.length) begin(table);
  const runs = [...live, ...over].filter(FILTERS[filter]).sort((a, b) => b.arrived - a.arrived).slice(0, MAX_ROWS);
  const body = table.tBodies[0], shown = new Set(runs.map((run) => run.id));
  for (const [id, row] of rows) {
    if (isHeld || shown.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  runs.forEach((run, i) => {
    if (isHeld && !rows.has(run.id)) return;
    const row = rows.get(run.id) ?? rowOf(run);
    cellsOf(run).forEach((content, column) => row.cells[column + 1].replaceChildren(content));
    if (!isHeld && body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
  });
}
