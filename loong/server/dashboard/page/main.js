// The page: what it knows of the cluster, and when it draws it.

import { Gantt, dopColor } from "./gantt.js";
import { drawLines } from "./lines.js";
import { drawRequests, openBatch } from "./requests.js";
import { drawScatter } from "./scatter.js";
import { engineId, follow } from "./stream.js";
import { element, fillTable, percent, seconds, tokens } from "./words.js";
import { Zoom } from "./zoom.js";

const KEPT_SECONDS = 300, MAX_OVER = 500, RATE_SECONDS = 5;
const NARROW_PIXELS = 600; // on which half a minute of batches is a blur
const SAMPLE_SECONDS = 2, MAX_SAMPLES = 2_500;
const byId = (id) => document.getElementById(id);
const gantt = new Gantt(byId("gantt"), byId("legend"));
const zoom = new Zoom(byId("gantt"), byId("frame"), gantt, { onClick: openBatchAt, onChange: draw });
let state, edges = [], isPaused = false;

function begin(hello) {
  edges = hello.length_edges;
  state = { now: 0, instances: [], batches: [], running: [], moves: [], changes: [], live: [], over: [], kv: new Map(), ticks: [], past: hello.past };
  byId("what").textContent = `${hello.model}, policy ${hello.policy}, up to ${tokens(hello.max_model_len)} tokens`;
  document.title = `loong: ${hello.model}`;
  byId("engines").replaceChildren(...(hello.num_engines > 1 ? Array.from({ length: hello.num_engines }, (_, i) => engineLink(i)) : []));
}

function engineLink(id) {
  const current = id === engineId ? { ariaCurrent: "page" } : {};
  return element("a", { href: `/dashboard?engine=${id}`, ...current }, `engine ${id}`);
}

function openBatchAt(x, y) {
  const batch = gantt.at(x, y);
  if (batch) openBatch(batch);
}

function take(tick) {
  const since = tick.now - KEPT_SECONDS;
  const kept = (items, time) => items.filter((item) => time(item) > since);
  state.batches = kept([...state.batches, ...tick.ended], (batch) => batch.end);
  state.moves = kept([...state.moves, ...tick.moves], (move) => move.end);
  state.over = [...state.over, ...tick.over].slice(-MAX_OVER);
  if (tick.now - (state.past.at(-1)?.[0] ?? 0) >= SAMPLE_SECONDS) {
    const sample = [tick.now, tick.num_computed_tokens, tick.num_output_tokens, tick.num_waiting, tick.num_running, tick.num_judged, tick.num_met];
    state.past = [...state.past, sample].slice(-MAX_SAMPLES);
  }
  state.ticks = [...state.ticks, tick].filter((other) => other.now > tick.now - RATE_SECONDS).slice(-100);
  const ends = tick.ended.flatMap((batch) => batch.instances.map((instance, i) => ({ instance, time: batch.end, num_tokens: batch.kv[i] })));
  for (const level of [...ends, ...tick.kv_levels].sort((a, b) => a.time - b.time)) {
    remember(level.instance, level.time, level.num_tokens, since);
  }
  for (const [id, used] of tick.instances) remember(id, tick.now, used, since);
  Object.assign(state, { now: tick.now, instances: tick.instances, running: tick.running, changes: tick.changes, live: tick.live, tick });
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
  const { start, end } = zoom.view ?? { start: state.now - Number(byId("window").value), end: state.now };
  gantt.draw(state, start, end);
  byId("reset").hidden = !zoom.view;
  byId("zoomed").textContent = zoom.view ? `${seconds(end - start)} of the past; new batches are not followed` : "";
  drawLines(state.past, Number(byId("minutes").value) * 60);
  drawQueue(state.tick.queue);
  drawDops(state.tick.num_batches_by_dop);
  drawErrors(state.tick.errors);
  drawPrefixes(state.tick.largest_prefixes);
  drawLoans(state.tick.loans, state.tick.now);
  const runs = [...state.live, ...state.over];
  drawScatter(byId("ttft"), byId("ttft-note"), points(runs, "ttft"));
  drawScatter(byId("tpot"), byId("tpot-note"), points(runs, "tpot"));
  drawRequests(byId("requests"), state, byId("filter").value, draw);
}

function points(runs, name) {
  const known = runs.filter((run) => run[name] !== null);
  return known.map((run) => ({ x: run.prompt, y: run[name], target: run[`${name}_target`] }));
}

function drawNumbers(tick) {
  const first = state.ticks[0], elapsed = tick.now - first.now;
  const rate = (name) => (elapsed > 0 ? tokens((tick[name] - first[name]) / elapsed) : "–");
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
    ...(tick.prefix_cache && { "KV cached": percent(sum(4) / sum(2)), "prompts cached": hitRate(first, tick) }),
    [`in time, of the last ${promised.length || "requests"}`]: promised.length ? percent(inTime.length / promised.length) : "–",
  };
  const tiles = Object.entries(numbers).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))),
  );
  byId("numbers").replaceChildren(...tiles);
}

/** Of the prompt tokens of requests that began lately, or since the start if none did, those that were cached. */
function hitRate(first, tick) {
  const [asked, hits] = tick.prefix_cache, [askedBefore, hitsBefore] = first.prefix_cache;
  if (asked > askedBefore) return percent((hits - hitsBefore) / (asked - askedBefore));
  return asked ? percent(hits / asked) : "–";
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

function drawDops(counts) {
  const most = Math.max(1e-9, ...Object.values(counts));
  const rows = Object.entries(counts).map(([dop, count]) => [dop, { bar: count / most, paint: dopColor(Number(dop)) }, String(count)]);
  fillTable(byId("dops"), ["DoP", "", "batches"], rows);
}

function drawPrefixes(prefixes) {
  byId("prefixes-section").hidden = prefixes.length === 0;
  const most = Math.max(1, ...prefixes.map((prefix) => prefix.num_tokens));
  const rows = prefixes.map((prefix) => [
    prefix.id,
    { bar: prefix.num_tokens / most },
    tokens(prefix.num_tokens),
    tokens(prefix.start),
    Object.entries(prefix.instances).map(([id, count]) => `${id}: ${tokens(count)}`).join(", "),
    String(prefix.num_readers),
  ]);
  fillTable(byId("prefixes"), ["part", "", "tokens", "from token", "on instances", "read by requests"], rows);
}

function drawLoans(loans, now) {
  byId("loans-section").hidden = loans.length === 0;
  const rows = loans.map(([creditor, debtor, count, since, reason]) => [
    `engine ${creditor} to engine ${debtor}`,
    tokens(count),
    `for ${seconds(now - since)}`,
    reason,
  ]);
  fillTable(byId("loans"), ["loan", "tokens", "time", "why"], rows);
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

if (innerWidth < NARROW_PIXELS) byId("window").value = "10";
byId("pause").onclick = () => {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  draw();
};
for (const id of ["window", "minutes", "filter"]) byId(id).onchange = draw;
byId("window").addEventListener("change", () => zoom.reset());
byId("reset").onclick = () => zoom.reset();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
window.addEventListener("resize", draw);
follow({ onHello: begin, onTick: take, onLost: (why) => tell(`not connected: ${why}`, true) });
