// Requests by the length of their prompts, and what they got against what they were promised; both axes log.

import { color, prepared } from "./canvas.js";
import { percent, quantile, seconds, tokens } from "./words.js";

const LEFT = 48, BOTTOM = 26, TOP = 8, RIGHT = 8;

function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) found.push(10 ** power);
  return found;
}

/** Draws `points` of {x, y, target}, and says in `note` how they are. */
export function drawScatter(canvas, note, points) {
  const { context, width, height } = prepared(canvas, 220);
  const sorted = points.map((point) => point.y).sort((a, b) => a - b);
  if (!points.length) {
    note.textContent = "Nothing yet.";
    return;
  }
  const late = points.filter((point) => point.y > point.target).length;
  note.textContent =
    `Median ${seconds(quantile(sorted, 0.5))}, P99 ${seconds(quantile(sorted, 0.99))}; ` +
    `${percent(1 - late / points.length)} of ${points.length} in time. Prompts get longer to the right; the dashed line is the target.`;
  const xs = decades(Math.min(...points.map((p) => p.x)), Math.max(...points.map((p) => p.x)) * 1.01);
  const ys = decades(
    Math.max(1e-5, Math.min(...points.map((p) => Math.min(p.y, p.target)))),
    Math.max(...points.map((p) => Math.max(p.y, p.target))) * 1.01,
  );
  const along = (value, marks) =>
    (Math.log10(value) - Math.log10(marks[0])) / (Math.log10(marks.at(-1)) - Math.log10(marks[0]));
  const x = (value) => LEFT + along(value, xs) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - along(Math.max(value, ys[0]), ys) * (height - BOTTOM - TOP);
  drawAxes(context, width, height, xs, ys, x, y);
  drawTargets(context, points, x, y);
  for (const point of points) drawPoint(context, x(point.x), y(point.y), point.y > point.target);
}

function drawAxes(context, width, height, xs, ys, x, y) {
  context.strokeStyle = color("line");
  context.fillStyle = color("dim");
  context.beginPath();
  for (const mark of ys) {
    context.moveTo(LEFT, y(mark));
    context.lineTo(width - RIGHT, y(mark));
    context.fillText(seconds(mark), 2, y(mark));
  }
  context.stroke();
  for (const mark of xs) {
    context.textAlign = mark === xs.at(-1) ? "right" : mark === xs[0] ? "left" : "center";
    context.fillText(tokens(mark), x(mark), height - BOTTOM / 3);
  }
  context.textAlign = "left";
}

function drawTargets(context, points, x, y) {
  context.strokeStyle = color("text");
  context.setLineDash([4, 3]);
  context.beginPath();
  [...points]
    .sort((a, b) => a.x - b.x)
    .forEach((point, i) => context[i ? "lineTo" : "moveTo"](x(point.x), y(point.target)));
  context.stroke();
  context.setLineDash([]);
}

/** In time is a dot, late a cross, so that color alone does not tell. */
function drawPoint(context, x, y, isLate) {
  context.strokeStyle = context.fillStyle = color(isLate ? "bad" : "good");
  context.beginPath();
  if (isLate) {
    context.moveTo(x - 4, y - 4);
    context.lineTo(x + 4, y + 4);
    context.moveTo(x - 4, y + 4);
    context.lineTo(x + 4, y - 4);
    context.stroke();
  } else {
    context.arc(x, y, 2.5, 0, 7);
    context.fill();
  }
}
