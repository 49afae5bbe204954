// The page: what it knows of the cluster, and when it draws it.

import { Gantt } from "./gantt.js";
import { drawRequests, openBatch } from "./requests.js";
import { drawScatter } from "./scatter.js";
import { follow } from "./stream.js";
import { element, fillTable, percent, seconds, tokens } from "./words.js";

const KEPT_SECONDS = 300, MAX_OVER = 500, RATE_SECONDS = 5;
const byId = (id) => document.getElementById(id);
const gantt = new Gantt(byId("gantt"), byId("legend"), openBatch);
let state, edges = [], isPaused = false;

function begin(hello) {
  edges = hello.length_edges;
  state = { now: 0, instances: [], batches: [], running: [], moves: [], live: [], over: [], kv: new Map(), ticks: [] };
  byId("what").textContent = `${hello.model}, policy ${hello.policy}, up to ${tokens(hello.max_model_len)} tokens`;
  document.title = `loong: ${hello.model}`;
}

function take(tick) {
  const since = tick.now - KEPT_SECONDS;
  const kept = (items, time) => items.filter((item) => time(item) > since);
  state.batches = kept([...state.batches, ...tick.ended], (batch) => batch.end);
  state.moves = kept([...state.moves, ...tick.moves], (move) => move.end);
  state.over = [...state.over, ...tick.over].slice(-MAX_OVER);
  state.ticks = [...state.ticks, tick].filter((other) => other.now > tick.now - RATE_SECONDS).slice(-100);
  for (const batch of [...tick.ended].sort((a, b) => a.end - b.end)) {
    batch.instances.forEach((id, i) => remember(id, batch.end, batch.kv[i], since));
  }
  for (const [id, used] of tick.instances) remember(id, tick.now, used, since);
  Object.assign(state, { now: tick.now, instances: tick.instances, running: tick.running, live: tick.live, tick });
  if (!isPaused) draw();
}

function remember(id, time, used, since) {
  const samples = state.kv.get(id) ?? [];
  if (samples.at(-1)?.[1] !== used) samples.push([time, used]);
  while (samples.length > 1 && samples[1][0] < since) samples.shift();
  state.kv.set(id, samples);
}

function draw() {
  if (!state?.tick) return;
  tell(state.tick.health ?? "live", state.tick.health !== null);
  drawNumbers(state.tick);
  gantt.draw(state, Number(byId("window").value));
  drawQueue(state.tick.queue);
  drawBars("dops", ["DoP", "", "batches"], state.tick.num_batches_by_dop, (count) => String(count));
  drawErrors(state.tick.errors);
  const runs = [...state.live, ...state.over];
  drawScatter(byId("ttft"), byId("ttft-note"), points(runs, "ttft"));
  drawScatter(byId("tpot"), byId("tpot-note"), points(runs, "tpot"));
  drawRequests(byId("requests"), state.live, state.over, byId("filter").value);
}

function points(runs, name) {
  const known = runs.filter((run) => run[name] !== null);
  return known.map((run) => ({ x: run.prompt, y: run[name], target: run[`${name}_target`] }));
}

function drawNumbers(tick) {
  const first = state.ticks[0], elapsed = tick.now - first.now;
  const rate = (name) => (elapsed > 0 ? tokens((tick[name] - first[name]) / elapsed) : "0");
  const pools = tick.instances.filter(([, , , kind]) => kind !== "host");
  const sum = (index) => pools.reduce((total, pool) => total + pool[index], 0);
  const promised = state.over.filter((run) => run.ttft !== null);
  const inTime = promised.filter((run) => run.ttft <= run.ttft_target && (run.tpot ?? 0) <= run.tpot_target);
  const numbers = {
    "tokens/s computed": rate("num_computed_tokens"),
    "tokens/s out": rate("num_output_tokens"),
    running: tick.num_running,
    waiting: tick.num_waiting,
    "KV in use": percent(sum(1) / sum(2)),
    [`in time, of the last ${promised.length || "requests"}`]: promised.length ? percent(inTime.length / promised.length) : "–",
  };
  const tiles = Object.entries(numbers).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))),
  );
  byId("numbers").replaceChildren(...tiles);
}

function drawQueue(queue) {
  const most = Math.max(1, ...queue.map((bucket) => bucket.num_requests));
  const rows = queue.map((bucket, i) => [
    bucket.below === null ? `${tokens(edges.at(-1))} and more` : `${tokens(edges[i - 1] ?? 0)} to ${tokens(bucket.below)}`,
    { bar: bucket.num_requests / most },
    String(bucket.num_requests),
    tokens(bucket.num_tokens),
    bucket.num_requests ? seconds(bucket.oldest) : "",
  ]);
  fillTable(byId("queue"), ["prompt", "", "waiting", "tokens", "oldest"], rows);
}

function drawBars(id, headings, counts, text) {
  const most = Math.max(1e-9, ...Object.values(counts));
  const rows = Object.entries(counts).map(([name, value]) => [name, { bar: value / most }, text(value)]);
  fillTable(byId(id), headings, rows);
}

function drawErrors(errors) {
  const rows = Object.entries(errors).map(([phase, error]) => {
    return [phase, { bar: error }, element("span", { className: error > 1 ? "late" : "" }, percent(error))];
  });
  fillTable(byId("errors"), ["phase", "", "mean error"], rows);
}

function tell(text, isBad) {
  byId("state").textContent = text;
  byId("state").className = isBad ? "bad" : "";
}

byId("pause").onclick = () => {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  draw();
};
for (const id of ["window", "filter"]) byId(id).onchange = draw;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("resize", draw);
follow({ onHello: begin, onTick: take, onLost: (why) => tell(`not connected: ${why}`, true) });
