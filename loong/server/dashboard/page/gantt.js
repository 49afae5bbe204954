// Instances over time: a row each, a block for each stretch of batches of one group and phase, KV below it.

import { color, isDark, prepared } from "./canvas.js";
import { element, percent, tokens } from "./words.js";

const BLOCKS = 26, KV = 12, GAP = 10, LEFT = 26, AXIS = 20;
const MERGED_PIXELS = 1.5;
const PHASES = { prefill: "prefill", decode: "decode", mixed: "both at once" };
const hues = new Map(); // of groups, in the order in which they were seen

export const groupName = (instances) => [...instances].sort((a, b) => a - b).join("+");

function hue(name) {
  if (!hues.has(name)) hues.set(name, (210 + hues.size * 137.508) % 360);
  return hues.get(name);
}

function fill(name, phase) {
  const light = isDark() ? (phase === "decode" ? 34 : 58) : phase === "decode" ? 78 : 46;
  return `hsl(${hue(name)} 62% ${light}%)`;
}

function inkOn(phase) {
  return (phase === "decode") === isDark() ? "#fff" : isDark() ? "#000" : phase === "decode" ? "#111" : "#fff";
}

/** Blocks of one row: batches of one group and phase that nearly touch are one. */
function merged(batches, x) {
  const blocks = [];
  for (const batch of batches) {
    const last = blocks.at(-1);
    const name = groupName(batch.instances);
    if (last && last.name === name && last.phase === batch.phase && x(batch.start) - x(last.end) < MERGED_PIXELS) {
      last.end = Math.max(last.end, batch.end);
    } else blocks.push({ name, phase: batch.phase, dop: batch.instances.length, start: batch.start, end: batch.end });
  }
  return blocks;
}

export class Gantt {
  constructor(canvas, legend, onBatch) {
    this.canvas = canvas;
    this.legend = legend;
    canvas.addEventListener("click", (event) => {
      const batch = this.at(event.offsetX, event.offsetY);
      if (batch) onBatch(batch);
    });
    canvas.addEventListener("mousemove", (event) => {
      const batch = this.at(event.offsetX, event.offsetY);
      canvas.title = batch ? `${batch.phase} of ${batch.num_requests} on ${groupName(batch.instances)}` : "";
    });
  }

  draw(state, span) {
    this.rows = state.instances.filter(([, , , kind]) => kind !== "host").map(([id]) => id);
    const height = AXIS + this.rows.length * (BLOCKS + KV + GAP);
    const { context, width } = prepared(this.canvas, height);
    this.right = width - (width > 600 ? 96 : 44); // beyond it is how much KV there is
    const start = state.now - span, scale = (this.right - LEFT) / span;
    this.x = (time) => LEFT + (Math.max(time, start) - start) * scale;
    this.shown = [...state.batches, ...state.running.map((batch) => ({ ...batch, end: state.now }))]
      .filter((batch) => batch.end > start)
      .sort((a, b) => a.start - b.start);
    this.rows.forEach((id, row) => this.drawRow(context, state, id, this.top(row), start));
    this.drawMoves(context, state.moves.filter((move) => move.end > start));
    this.drawAxis(context, span, height);
    this.drawLegend();
  }

  top(row) {
    return row * (BLOCKS + KV + GAP);
  }

  drawRow(context, state, id, top, start) {
    context.fillStyle = color("dim");
    context.fillText(String(id), 4, top + BLOCKS / 2);
    context.fillStyle = color("page");
    context.fillRect(LEFT, top, this.right - LEFT, BLOCKS);
    const own = this.shown
      .filter((batch) => batch.instances.includes(id))
      .map((batch, i, all) => ({ ...batch, end: Math.min(batch.end, all[i + 1]?.start ?? Infinity) }));
    for (const block of merged(own, this.x)) {
      const left = this.x(block.start), wide = Math.max(1, this.x(block.end) - left);
      context.fillStyle = fill(block.name, block.phase);
      context.fillRect(left, top, wide, BLOCKS);
      if (block.phase === "mixed") this.hatch(context, left, top, wide);
      context.fillStyle = inkOn(block.phase);
      const label = [`DoP ${block.dop} ${block.phase}`, `${block.dop} ${block.phase}`, `${block.dop}`].find(
        (text) => context.measureText(text).width + 6 < wide,
      );
      if (label) context.fillText(label, left + 3, top + BLOCKS / 2);
    }
    this.drawKv(context, state.kv.get(id) ?? [], state.instances.find(([one]) => one === id), top + BLOCKS + 1, start);
  }

  hatch(context, left, top, wide) {
    context.save();
    context.beginPath();
    context.rect(left, top, wide, BLOCKS);
    context.clip();
    context.strokeStyle = isDark() ? "#0004" : "#fff5";
    context.lineWidth = 2;
    context.beginPath();
    for (let x = left - BLOCKS; x < left + wide; x += 7) {
      context.moveTo(x, top + BLOCKS);
      context.lineTo(x + BLOCKS, top);
    }
    context.stroke();
    context.restore();
  }

  drawKv(context, samples, [, used, capacity], top, start) {
    const tall = (share) => Math.max(share > 0 ? 1 : 0, share * KV);
    context.fillStyle = color("page");
    context.fillRect(LEFT, top, this.right - LEFT, KV);
    context.fillStyle = color("bar");
    const shown = samples.filter(([time]) => time > start);
    shown.forEach(([time, held], i) => {
      const left = this.x(time), end = i + 1 < shown.length ? this.x(shown[i + 1][0]) : this.right;
      context.fillRect(left, top + KV - tall(held / capacity), Math.max(1, end - left), tall(held / capacity));
    });
    context.fillStyle = color("text");
    const isWide = this.canvas.clientWidth > 600;
    context.fillText(isWide ? `${tokens(used)} / ${tokens(capacity)}` : percent(used / capacity), this.right + 5, top + KV / 2);
  }

  drawMoves(context, moves) {
    context.strokeStyle = context.fillStyle = color("text");
    for (const move of moves) {
      const from = this.rows.indexOf(move.source), to = this.rows.indexOf(move.destination);
      if (from < 0 || to < 0) continue;
      const x = this.x(move.end), end = this.top(to) + BLOCKS / 2;
      context.beginPath();
      context.moveTo(this.x(move.start), this.top(from) + BLOCKS / 2);
      context.lineTo(x, end);
      context.stroke();
      context.beginPath();
      context.arc(x, end, 3, 0, 7);
      context.fill();
    }
  }

  drawAxis(context, span, height) {
    context.fillStyle = color("dim");
    for (const share of this.right > 500 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]) {
      const text = share === 1 ? "now" : `−${span * (1 - share)} s`;
      context.textAlign = share === 1 ? "right" : share === 0 ? "left" : "center";
      context.fillText(text, LEFT + share * (this.right - LEFT), height - AXIS / 2);
    }
    context.textAlign = "left";
  }

  drawLegend() {
    const names = [...new Set(this.shown.map((batch) => groupName(batch.instances)))].sort((a, b) => b.length - a.length);
    const text = names.join(" ") + isDark();
    if (text === this.legendText) return;
    this.legendText = text;
    const swatch = (name, phase) => {
      const box = element("i", { className: phase });
      box.style.backgroundColor = fill(name, phase);
      return box;
    };
    const groups = names.slice(0, 12).map((name) => element("span", {}, swatch(name, "prefill"), name));
    const phases = names.length ? Object.entries(PHASES) : [];
    const shades = phases.map(([phase, text]) => element("span", {}, swatch(names[0], phase), text));
    shades[0]?.classList.add("first");
    this.legend.replaceChildren(...groups, ...shades);
  }

  at(x, y) {
    const id = this.rows?.[Math.floor(y / (BLOCKS + KV + GAP))];
    const near = this.shown?.filter(
      (batch) => batch.instances.includes(id) && x >= this.x(batch.start) - 1 && x <= this.x(batch.end) + 1,
    );
    return near?.at(-1);
  }
}
