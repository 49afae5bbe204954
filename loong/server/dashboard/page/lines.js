// How the cluster has done over minutes: lines of tokens a second, of the queue, and of who was in time.

import { color, prepared } from "./canvas.js";
import { element, percent, tokens } from "./words.js";

const HEIGHT = 130, LEFT = 44, RIGHT = 10, TOP = 8, BOTTOM = 20, NUM_POINTS = 240;
const MIN_SPAN = 60; // seconds
const MIN_JUDGED_SECONDS = 30; // that an attainment is of, at least
const FIELDS = ["time", "computed", "output", "waiting", "running", "judged", "met"];
const NAMES = Object.fromEntries(FIELDS.map((name, index) => [name, index]));

/** What is drawn: a name, a color of the page, and its value between two samples that are `step` apart. */
const rate = (name) => (last, before) => (last[NAMES[name]] - before[NAMES[name]]) / (last[0] - before[0]);
const level = (name) => (last) => last[NAMES[name]];
const CHARTS = {
  tokens: { lines: { computed: ["short", rate("computed")], out: ["decode", rate("output")] }, text: tokens },
  waiting: { lines: { waiting: ["long", level("waiting")], running: ["decode", level("running")] }, text: tokens },
  met: { lines: { "in time": ["good", null] }, text: percent, most: 1 },
};

function attainment(samples, index, step) {
  const last = samples[index], since = last[0] - Math.max(step, MIN_JUDGED_SECONDS);
  let first = index;
  while (first > 0 && samples[first][0] > since) first--;
  const judged = last[NAMES.judged] - samples[first][NAMES.judged];
  return judged ? (last[NAMES.met] - samples[first][NAMES.met]) / judged : null;
}

function pointsOf(samples, span, value) {
  const step = span / NUM_POINTS, points = [];
  let before = 0;
  samples.forEach((sample, index) => {
    if (index === 0 || sample[0] - samples[before][0] < step) return;
    const found = value ? value(sample, samples[before]) : attainment(samples, index, step);
    before = index;
    if (sample[0] >= samples.at(-1)[0] - span) points.push([sample[0], found]);
  });
  return points;
}

function nice(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= most) ?? most;
}

/** Draws each chart into the canvas of its name, with the last values beside its title, of as long as is known. */
export function drawLines(samples, longest) {
  if (samples.length < 2) return;
  const span = Math.min(longest, Math.max(MIN_SPAN, samples.at(-1)[0] - samples[0][0]));
  for (const [id, chart] of Object.entries(CHARTS)) {
    const curves = Object.entries(chart.lines).map(([name, [paint, value]]) => ({ name, paint, points: pointsOf(samples, span, value) }));
    const most = chart.most ?? nice(Math.max(1, ...curves.flatMap(({ points }) => points.map(([, value]) => value ?? 0))));
    drawChart(document.getElementById(id), curves, { now: samples.at(-1)[0], span, most, ...chart });
    document.getElementById(`${id}-key`).replaceChildren(...curves.map((curve) => keyOf(curve, chart.text)));
  }
}

function keyOf({ name, paint, points }, text) {
  const box = element("i"), last = points.at(-1)?.[1];
  box.style.backgroundColor = color(paint);
  return element("span", {}, box, `${name} ${last === null || last === undefined ? "–" : text(last)}`);
}

function drawChart(canvas, curves, { now, span, most, text }) {
  const { context, width, height } = prepared(canvas, HEIGHT);
  const x = (time) => LEFT + (1 - (now - time) / span) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (value / most) * (height - BOTTOM - TOP);
  context.strokeStyle = color("line");
  context.fillStyle = color("dim");
  for (const value of [0, most / 2, most].filter((mark) => text === percent || Number.isInteger(mark))) {
    context.beginPath();
    context.moveTo(LEFT, y(value));
    context.lineTo(width - RIGHT, y(value));
    context.stroke();
    context.fillText(text(value), 2, y(value));
  }
  for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
    context.textAlign = align;
    context.fillText(share === 1 ? "now" : `−${Number(((span * (1 - share)) / 60).toFixed(1))} min`, LEFT + share * (width - LEFT - RIGHT), height - BOTTOM / 2);
  }
  context.textAlign = "left";
  for (const { paint, points } of curves) drawCurve(context, color(paint), points, x, y);
}

function drawCurve(context, paint, points, x, y) {
  context.strokeStyle = paint;
  context.lineWidth = 2;
  context.beginPath();
  let isOpen = false; // a value that is not known breaks the line
  for (const [time, value] of points) {
    if (value !== null) context[isOpen ? "lineTo" : "moveTo"](x(time), y(value));
    isOpen = value !== null;
  }
  context.stroke();
  context.lineWidth = 1;
}
