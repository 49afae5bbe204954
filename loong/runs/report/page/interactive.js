// The page of one run of each policy: instances over time, who waits above them, and requests by their length.

const runs = JSON.parse(document.getElementById("runs").textContent);
const BAR = 0.9, PREFILL_SHARE = 0.7, QUEUE_ROWS = 1.3, ROW_PIXELS = 44, GAP_ROWS = 0.9;
const WORDS = { long: "prefill of a long prompt", short: "prefill of a shorter prompt", decode: "decode" };
const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "none";
  return seconds < 0.9995 ? `${(seconds * 1000).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
}

const count = (number) => number.toLocaleString("en-US");
const kindOf = (tokens) => (runs.long_prompt && tokens >= runs.long_prompt ? "long" : "short");

/** Each batch on each of its instances is a bar, or two where it also decodes: [work, top, height]. */
function parts(batch) {
  if (batch.phase === "decode") return [["decode", 0, BAR]];
  const work = kindOf(batch.longest_prompt);
  if (batch.phase !== "mixed") return [[work, 0, BAR]];
  return [[work, 0, BAR * PREFILL_SHARE], ["decode", BAR * PREFILL_SHARE, BAR * (1 - PREFILL_SHARE)]];
}

function batchWords(policy, batch) {
  const prompts = batch.num_prefill_tokens ? `<br>${count(batch.num_prefill_tokens)} prompt tokens, longest prompt ${count(batch.longest_prompt)}` : "";
  return (
    `<b>${policy.label}, batch ${batch.id}: ${batch.phase === "mixed" ? "prefill and decode" : batch.phase}, DoP ${batch.group.length}</b>` +
    `<br>instances ${batch.group.join(", ")}<br>${batch.start.toFixed(4)} to ${batch.end.toFixed(4)} s: ${duration(batch.end - batch.start)}` +
    `${prompts}<br>${count(batch.requests.length)} request${batch.requests.length === 1 ? "" : "s"}; click to list`
  );
}

function instanceTraces(policy, axis) {
  const traces = {};
  policy.batches.forEach((batch, index) => {
    for (const [work, top, height] of parts(batch)) {
      const trace = (traces[work] ??= { type: "bar", orientation: "h", name: WORDS[work], base: [], x: [], y: [], width: [], customdata: [], text: [],
        marker: { color: runs.colors[work], line: { width: 0 } }, hovertemplate: "%{text}<extra></extra>", textposition: "none", xaxis: "x", yaxis: axis });
      for (const instance of batch.group) {
        trace.base.push(batch.start);
        trace.x.push(batch.end - batch.start);
        trace.y.push(policy.instances.indexOf(instance) + top + height / 2);
        trace.width.push(height);
        trace.customdata.push({ policy: policy.name, batch: index });
        trace.text.push(batchWords(policy, batch));
      }
    }
  });
  return Object.values(traces);
}

function queueTraces(policy, axis) {
  const times = [...new Set(policy.waits.flatMap((wait) => [wait.start, wait.end]))].sort((a, b) => a - b);
  const place = new Map(times.map((time, index) => [time, index]));
  const kinds = runs.long_prompt ? ["long", "short"] : ["short"];
  const areas = kinds.map((kind) => {
    const changes = new Array(times.length).fill(0);
    for (const wait of policy.waits.filter((one) => kindOf(policy.requests[one.request].prompt) === kind)) {
      changes[place.get(wait.start)] += 1;
      changes[place.get(wait.end)] -= 1;
    }
    let waiting = 0;
    const counts = changes.map((change) => (waiting += change));
    return { type: "scatter", mode: "lines", stackgroup: axis, x: times, y: counts, line: { width: 0, shape: "hv", color: runs.colors[kind] },
      fillcolor: runs.waiting_colors[kind], hovertemplate: `%{y} ${kind === "long" ? "long prompts" : "prompts"} wait<extra></extra>`, xaxis: "x", yaxis: axis };
  });
  const most = Math.max(1, ...times.map((_, index) => areas.reduce((sum, area) => sum + area.y[index], 0)));
  return { areas, most };
}

function arrivalTrace(policy, axis, top) {
  return { type: "scatter", mode: "markers", x: policy.requests.map((one) => one.arrived), y: policy.requests.map(() => top), xaxis: "x", yaxis: axis,
    marker: { symbol: "line-ns", size: 9, line: { width: 2, color: policy.requests.map((one) => runs.colors[kindOf(one.prompt)]) } },
    customdata: policy.requests.map((_, request) => ({ policy: policy.name, request })),
    text: policy.requests.map((one) => `a prompt of ${count(one.prompt)} tokens arrives`), hovertemplate: "%{text}<extra></extra>" };
}

function drawInstances() {
  const traces = [], layout = baseLayout({ barmode: "overlay", dragmode: "zoom" });
  const rows = runs.policies.reduce((sum, policy) => sum + policy.instances.length + QUEUE_ROWS + GAP_ROWS, 0);
  const queues = runs.policies.map((policy, index) => queueTraces(policy, `y${2 * index + 2}`));
  const most = Math.max(...queues.map((queue) => queue.most));
  let used = 0;
  const domain = (tall) => {
    const top = 1 - used / rows;
    used += tall;
    return [Math.max(0, 1 - used / rows), top];
  };
  runs.policies.forEach((policy, index) => {
    const bars = index ? `y${2 * index + 1}` : "y", strip = `y${2 * index + 2}`;
    layout.annotations.push({ text: `<b>${policy.label}</b>`, xref: "paper", yref: "paper", x: 0, y: 1 - used / rows, yanchor: "top", xanchor: "left", showarrow: false, font: { size: 15 } });
    used += GAP_ROWS * 0.6;
    layout[`yaxis${2 * index + 2}`] = axis({ domain: domain(QUEUE_ROWS), title: { text: "waiting" }, range: [0, most * 1.25], nticks: 3 });
    used += GAP_ROWS * 0.4;
    layout[index ? `yaxis${2 * index + 1}` : "yaxis"] = axis({ domain: domain(policy.instances.length), title: { text: "instance" },
      range: [policy.instances.length, 0], tickvals: policy.instances.map((_, row) => row + BAR / 2), ticktext: policy.instances.map(String) });
    traces.push(...instanceTraces(policy, bars), ...queues[index].areas, arrivalTrace(policy, strip, most * 1.12));
  });
  const last = runs.policies.length === 1 ? "y" : `y${2 * runs.policies.length - 1}`;
  layout.xaxis = { ...axis({ title: { text: "time since the first request (s)" }, anchor: last }), fixedrange: false, range: runs.window };
  layout.height = rows * ROW_PIXELS + 70;
  Plotly.newPlot("instances", traces, layout, CONFIG).then((plot) => plot.on("plotly_click", open));
}

function drawRequests() {
  const traces = runs.policies.map((policy) => {
    const shown = policy.requests.map((one, request) => ({ ...one, request })).filter((one) => one.first !== null);
    return { type: "scatter", mode: "markers", name: policy.name, x: shown.map((one) => one.prompt), y: shown.map((one) => Math.max(one.first - one.arrived, 1e-5)),
      marker: { color: policy.color, size: 7, opacity: 0.75, symbol: shown.map((one) => (one.ratio !== null && one.ratio > 1 ? "x" : "circle")) },
      customdata: shown.map((one) => ({ policy: policy.name, request: one.request })),
      text: shown.map((one) => `<b>${policy.label}: a prompt of ${count(one.prompt)} tokens</b><br>first token after ${duration(one.first - one.arrived)}` +
        (one.ratio === null ? "" : `<br>${one.ratio.toPrecision(2)} x its SLO`) + "<br>click for its story"), hovertemplate: "%{text}<extra></extra>" };
  });
  const layout = baseLayout({ height: 420, showlegend: true, dragmode: "zoom", legend: { orientation: "h", y: 1.12 } });
  layout.xaxis = { ...axis({ title: { text: "prompt (tokens), logarithmic" }, type: "log", dtick: 1 }), fixedrange: false };
  layout.yaxis = { ...axis({ title: { text: "first token (s); a cross missed its SLO" }, type: "log", dtick: 1 }), fixedrange: false };
  Plotly.newPlot("requests", traces, layout, CONFIG).then((plot) => plot.on("plotly_click", open));
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(more) {
  return { gridcolor: color("line"), zeroline: false, fixedrange: true, ...more };
}

function baseLayout(more) {
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), family: "system-ui, sans-serif" },
    margin: { l: 60, r: 15, t: 10, b: 50 }, showlegend: false, annotations: [], hoverlabel: { align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("faint"), activecolor: color("ink") }, ...more };
}

function open(event) {
  const point = event.points.map((one) => one.customdata).find((data) => data !== undefined);
  if (point === undefined) return;
  const policy = runs.policies.find((one) => one.name === point.policy);
  if (point.batch !== undefined) openBatch(policy, policy.batches[point.batch]);
  else openRequest(policy, policy.requests[point.request]);
}

function tell(...content) {
  byId("clicked").replaceChildren(...content);
}

function openBatch(policy, batch) {
  const cells = (tag, texts) => texts.map((text) => element(tag, {}, text));
  const rows = batch.requests.map((index) => {
    const one = policy.requests[index];
    const link = element("button", { type: "button", onclick: () => openRequest(policy, one) }, one.id);
    return element("tr", {}, element("td", {}, link), ...cells("td", factsOf(one)));
  });
  const head = element("tr", {}, ...cells("th", ["request", "prompt", "came", "first token", "against its SLO"]));
  tell(
    element("h2", {}, `Batch ${batch.id} of ${policy.name}: ${batch.phase}, DoP ${batch.group.length}, ${duration(batch.end - batch.start)}`),
    element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))),
  );
}

function factsOf(one) {
  const first = one.first === null ? "none" : duration(one.first - one.arrived);
  const ratio = one.ratio === null ? "" : element("span", { className: one.ratio > 1 ? "late" : "" }, `${one.ratio.toPrecision(2)} x`);
  return [`${count(one.prompt)} tokens`, `${one.arrived.toFixed(3)} s`, first, ratio];
}

function openRequest(policy, one) {
  const index = policy.requests.indexOf(one), list = element("dl");
  const add = (time, text) => list.append(element("dt", {}, time), element("dd", {}, text));
  if (one.story) for (const [time, sentences] of one.story) add(time, sentences.join("\n"));
  else for (const batch of policy.batches.filter((other) => other.requests.includes(index))) {
    const did = one.first === null || batch.start < one.first ? "prefill" : "decode";
    add(`+${(batch.start - one.arrived).toFixed(3)} s`, `batch ${batch.id}: ${did} on instances ${batch.group.join(", ")}, ${duration(batch.end - batch.start)}`);
  }
  const [prompt, came, first] = factsOf(one);
  tell(element("h2", {}, `Request ${one.id} of ${policy.name}`), element("p", {}, `A prompt of ${prompt}, which came at ${came}; first token after ${first}.`), list);
  const end = Math.max(one.arrived + 0.001, one.ended ?? runs.window[1]), margin = 0.1 * (end - one.arrived);
  Plotly.relayout("instances", { "xaxis.range": [one.arrived - margin, end + margin] });
}

function drawLegend() {
  const used = new Set(runs.policies.flatMap((policy) => policy.batches.flatMap((batch) => parts(batch).map(([work]) => work))));
  const words = { ...WORDS, long: `${WORDS.long} (${count(runs.long_prompt)} tokens or more)`, decode: "decode; below a prefill, in one batch with it" };
  const swatch = (background, text, className = "") => {
    const box = element("i", { className });
    box.style.background = background;
    return element("span", {}, box, text);
  };
  const kinds = runs.long_prompt ? { long: "a long prompt", short: "a shorter prompt" } : { short: "a prompt" };
  byId("legend").replaceChildren(
    ...Object.keys(words).filter((work) => used.has(work)).map((work) => swatch(runs.colors[work], words[work])),
    ...Object.entries(kinds).map(([kind, text]) => swatch(runs.waiting_colors[kind], `${text} waits, or its answer`)),
    ...Object.entries(kinds).map(([kind, text]) => swatch(runs.colors[kind], `${text} arrives`, "tick")),
  );
}

function draw() {
  drawLegend();
  drawInstances();
  drawRequests();
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
