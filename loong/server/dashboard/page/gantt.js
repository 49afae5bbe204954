// Instances over time: a row each, a block for each stretch of batches of one group and kind of work, KV below it.

import { color, prepared } from "./canvas.js";
import { element, percent, seconds, tokens } from "./words.js";

const STRIPE = 6, BLOCKS = 28, KV = 12, GAP = 10, LEFT = 26, AXIS = 20;
const MERGED_PIXELS = 1.5, PREFILL_SHARE = 0.7, NUM_DOP_COLORS = 6;
const WORDS = { long: "prefill of a long prompt", short: "prefill of a shorter prompt", decode: "decode" };

/** How changes of instances are marked: a letter, a color of the page, words, and whether it is low. */
const CHANGES = {
  lost: ["✕", "bad", "was lost", false],
  joined: ["+", "good", "joined", true],
  draining: ["▾", "text", "began to drain", false],
  left: ["−", "text", "left", true],
  lent: ["↗", "text", "lent room", true],
  returned: ["↙", "text", "has room again that it lent", true],
};
const MARK_PIXELS = 7, HATCH_PIXELS = 6, MIN_HATCHED_PIXELS = 7, CACHED_PIXELS = 5;

/** The same color for a DoP always: 1, 2, 3, 4, up to 8, and more have one each. */
export function dopColor(dop) {
  return color(`dop${dop <= 4 ? dop : dop <= 8 ? 5 : NUM_DOP_COLORS}`);
}

const dopWords = (dop) => (dop <= 4 ? `DoP ${dop}` : dop <= 8 ? "DoP 5 to 8" : "DoP 9 and more");

function workOf(batch, longPrompt) {
  if (batch.phase === "decode") return "decode";
  return longPrompt && batch.longest_prompt >= longPrompt ? "long" : "short";
}

const groupName = (instances) => [...instances].sort((a, b) => a - b).join("+");

/** Blocks of one row: batches of one group and kind of work that nearly touch are one. */
function merged(batches, x, longPrompt) {
  const blocks = [];
  for (const batch of batches) {
    const last = blocks.at(-1), work = workOf(batch, longPrompt), name = groupName(batch.instances);
    const again = batch.recomputed > 0;
    const isSame = last && last.name === name && last.work === work && last.phase === batch.phase && last.again === again;
    if (isSame && x(batch.start) - x(last.end) < MERGED_PIXELS) last.end = Math.max(last.end, batch.end);
    else blocks.push({ name, work, again, phase: batch.phase, instances: batch.instances, dop: batch.instances.length, start: batch.start, end: batch.end });
  }
  return blocks;
}

export class Gantt {
  constructor(canvas, legend) {
    this.canvas = canvas;
    this.legend = legend;
    canvas.addEventListener("mousemove", (event) => (canvas.title = this.words(event.offsetX, event.offsetY)));
  }

  draw(state, start, end) {
    this.shown = [...state.batches, ...state.running.map((batch) => ({ ...batch, end: state.now }))]
      .filter((batch) => batch.end > start && batch.start < end)
      .sort((a, b) => a.start - b.start);
    this.changes = state.changes.filter((change) => change.time > start && change.time <= end);
    const there = state.instances.filter(([, , , kind]) => kind !== "host").map(([id]) => id);
    this.memory = new Set(state.instances.filter(([, , , kind]) => kind === "attention").map(([id]) => id));
    const seen = [...this.shown.flatMap((batch) => batch.instances), ...this.changes.map((change) => change.instance)];
    this.rows = [...new Set([...there, ...seen])].sort((a, b) => a - b);
    const height = AXIS + this.rows.length * (BLOCKS + KV + GAP);
    const { context, width } = prepared(this.canvas, height);
    this.context = context;
    this.right = width - (width > 600 ? 96 : 44); // beyond it is how much KV there is
    this.start = start;
    this.end = end;
    this.now = state.now;
    this.longPrompt = state.tick.long_prompt;
    const scale = (this.right - LEFT) / (end - start);
    this.x = (time) => LEFT + (Math.min(Math.max(time, start), end) - start) * scale;
    this.rows.forEach((id, row) => this.drawRow(state, id, this.top(row)));
    this.drawMoves(state.moves.filter((move) => move.end > start && move.start < end));
    this.changes.forEach((change) => this.drawChange(change));
    this.drawAxis(state.now, height);
    context.fillStyle = color("dim");
    if (!this.shown.length) context.fillText("No batch ran in these seconds.", LEFT + 8, BLOCKS / 2);
    this.drawLegend();
  }

  /** The time at a place of the canvas. */
  time(x) {
    return this.start + ((Math.min(Math.max(x, LEFT), this.right) - LEFT) / (this.right - LEFT)) * (this.end - this.start);
  }

  top(row) {
    return row * (BLOCKS + KV + GAP);
  }

  drawRow(state, id, top) {
    const { context } = this;
    context.fillStyle = color("dim");
    context.fillText(`${id}${this.memory.has(id) ? "m" : ""}`, 4, top + BLOCKS / 2);
    context.fillStyle = color("page");
    context.fillRect(LEFT, top, this.right - LEFT, BLOCKS);
    const own = this.shown
      .filter((batch) => batch.instances.includes(id))
      .map((batch, i, all) => ({ ...batch, end: Math.min(batch.end, all[i + 1]?.start ?? Infinity) }));
    const blocks = merged(own, this.x, this.longPrompt);
    for (const block of blocks) this.drawBlock(block, id, top);
    for (const block of blocks) if (block.again) this.drawHatch(block, top);
    const word = state.tick?.states[id] ?? "left";
    this.drawKv(state.kv.get(id) ?? [], state.instances.find(([one]) => one === id), word, top + BLOCKS + 1);
    for (const block of blocks) this.drawJoin(block, id, top);
  }

  drawBlock(block, id, top) {
    const { context } = this, left = this.x(block.start), wide = Math.max(1, this.x(block.end) - left);
    const tall = BLOCKS - STRIPE, cut = block.phase === "mixed" ? tall * PREFILL_SHARE : tall;
    context.fillStyle = dopColor(block.dop);
    context.fillRect(left, top, wide, STRIPE);
    context.fillStyle = color(block.work);
    context.fillRect(left, top + STRIPE, wide, cut);
    context.fillStyle = color("decode");
    context.fillRect(left, top + STRIPE + cut, wide, tall - cut);
    context.fillStyle = color("on-work");
    const label = [`DoP ${block.dop} ${block.phase}`, `DoP ${block.dop}`, `${block.dop}`].find(
      (text) => context.measureText(text).width + 6 < wide,
    );
    if (label && id === Math.min(...block.instances)) context.fillText(label, left + 3, top + STRIPE + cut / 2);
  }

  /** Over work that computes lost or dropped KV again, in a frame, since it may be short. */
  drawHatch(block, top) {
    const { context } = this, left = this.x(block.start);
    const wide = Math.max(MIN_HATCHED_PIXELS, this.x(block.end) - left);
    context.save();
    context.beginPath();
    context.rect(left, top, wide, BLOCKS);
    context.clip();
    context.strokeStyle = color("on-work");
    context.beginPath();
    for (let x = left - BLOCKS; x < left + wide; x += HATCH_PIXELS) {
      context.moveTo(x, top + BLOCKS);
      context.lineTo(x + BLOCKS, top);
    }
    context.stroke();
    context.restore();
    context.strokeStyle = color("text");
    context.lineWidth = 2;
    context.strokeRect(left + 1, top + 1, wide - 2, BLOCKS - 2);
    context.lineWidth = 1;
  }

  /** Across the row of the instance, with a letter, low if another change may be just before it. */
  drawChange(change) {
    const { context } = this, [letter, paint, , isLow] = CHANGES[change.kind];
    const x = this.x(change.time), top = this.top(this.rows.indexOf(change.instance));
    const middle = top + (isLow ? BLOCKS + KV - MARK_PIXELS : MARK_PIXELS);
    context.fillStyle = color(paint);
    context.fillRect(x - 1, top, 2, BLOCKS + KV);
    context.beginPath();
    context.arc(x, middle, MARK_PIXELS, 0, 7);
    context.fill();
    context.fillStyle = color("panel");
    context.textAlign = "center";
    context.fillText(letter, x, middle);
    context.textAlign = "left";
  }

  /** Down to the next row of the same group, so that a group is as tall as its DoP. */
  drawJoin(block, id, top) {
    if (!block.instances.includes(this.rows[this.rows.indexOf(id) + 1])) return;
    const left = this.x(block.start);
    this.context.globalAlpha = 0.3;
    this.context.fillStyle = color(block.work);
    this.context.fillRect(left, top + BLOCKS, Math.max(1, this.x(block.end) - left), KV + GAP);
    this.context.globalAlpha = 1;
  }

  drawKv(samples, instance, word, top) {
    const { context } = this, tall = (share) => Math.max(share > 0 ? 1 : 0, share * KV);
    if (!instance) {
      context.fillStyle = color("bad");
      context.fillText(word, this.right + 5, top + KV / 2);
      return;
    }
    const [, used, capacity, , cached] = instance;
    context.fillStyle = color("page");
    context.fillRect(LEFT, top, this.right - LEFT, KV);
    context.fillStyle = color("bar");
    samples.forEach(([time, held], i) => {
      const until = i + 1 < samples.length ? samples[i + 1][0] : this.end;
      if (until <= this.start || time >= this.end) return;
      const left = this.x(time), high = tall(held / capacity);
      context.fillRect(left, top + KV - high, Math.max(1, this.x(until) - left), high);
    });
    const inUse = tall(used / capacity), kept = tall(cached / capacity); // what is cached now, at the right edge
    context.fillStyle = color("line");
    context.fillRect(this.right - CACHED_PIXELS, top + KV - inUse - kept, CACHED_PIXELS, kept);
    context.fillStyle = color("text");
    const isWide = this.canvas.clientWidth > 600;
    const room = isWide ? `${tokens(used)} / ${tokens(capacity)}` : percent(used / capacity);
    context.fillText(word === "draining" ? word : room, this.right + 5, top + KV / 2);
  }

  drawMoves(moves) {
    const { context } = this;
    context.strokeStyle = context.fillStyle = color("text");
    for (const move of moves) {
      const from = this.rows.indexOf(move.source), to = this.rows.indexOf(move.destination);
      if (from < 0 || to < 0) continue;
      const x = this.x(move.end), end = this.top(to) + BLOCKS / 2;
      context.beginPath();
      context.setLineDash(move.is_copy ? [4, 3] : []);
      context.moveTo(this.x(move.start), this.top(from) + BLOCKS / 2);
      context.lineTo(x, end);
      context.stroke();
      context.setLineDash([]);
      context.beginPath();
      context.arc(x, end, 3, 0, 7);
      context.fill();
    }
  }

  drawAxis(now, height) {
    const { context } = this, isLive = this.end === now;
    context.fillStyle = color("dim");
    for (const share of this.right > 500 ? [0, 0.25, 0.5, 0.75, 1] : [0, 1]) {
      const ago = now - this.start - share * (this.end - this.start);
      const text = isLive && share === 1 ? "now" : isLive ? `−${Number(ago.toFixed(1))} s` : `−${ago.toFixed(3)} s`;
      context.textAlign = share === 1 ? "right" : share === 0 ? "left" : "center";
      context.fillText(text, LEFT + share * (this.right - LEFT), height - AXIS / 2);
    }
    context.textAlign = "left";
  }

  drawLegend() {
    const dops = [...new Map(this.shown.map((batch) => [dopWords(batch.instances.length), batch.instances.length]))].sort((a, b) => a[1] - b[1]);
    const kinds = Object.keys(CHANGES).filter((kind) => this.changes.some((change) => change.kind === kind));
    const isAgain = this.shown.some((batch) => batch.recomputed > 0);
    const text = JSON.stringify([dops, kinds, isAgain, this.longPrompt, color("page")]);
    if (text === this.legendText) return;
    this.legendText = text;
    const swatch = (background, ...words) => {
      const box = element("i");
      box.style.backgroundColor = background;
      return element("span", {}, box, ...words);
    };
    const long = this.longPrompt ? { ...WORDS, long: `${WORDS.long} (${tokens(this.longPrompt)} tokens or more)` } : WORDS;
    const works = Object.entries(long).map(([work, words]) => swatch(color(work), words));
    const stripes = dops.map(([words, dop]) => swatch(dopColor(dop), words));
    stripes[0]?.classList.add("first");
    const marks = kinds.map((kind) => element("span", {}, `${CHANGES[kind][0]} ${kind}`));
    if (isAgain) marks.push(element("span", {}, "hatched: computes KV again"));
    this.legend.replaceChildren(...works, swatch(color("bar"), "KV held"), element("span", {}, "╲● KV moves (dashed: is copied)"), ...marks, ...stripes);
  }

  row(y) {
    return this.rows?.[Math.floor(y / (BLOCKS + KV + GAP))];
  }

  at(x, y) {
    const id = this.row(y);
    const near = this.shown?.filter(
      (batch) => batch.instances.includes(id) && x >= this.x(batch.start) - 1 && x <= this.x(batch.end) + 1,
    );
    return near?.find((batch) => batch.recomputed > 0) ?? near?.at(-1);
  }

  changeWords(x, y) {
    const id = this.row(y);
    const near = this.changes?.filter((change) => change.instance === id && Math.abs(x - this.x(change.time)) <= MARK_PIXELS);
    return (near ?? []).map(({ kind, time, reason }) => {
      return `instance ${id} ${CHANGES[kind][2]} ${seconds(this.now - time)} ago${reason && `: ${reason}`}`;
    });
  }

  words(x, y) {
    return [...this.changeWords(x, y), ...this.batchWords(x, y)].join("\n");
  }

  batchWords(x, y) {
    const batch = this.at(x, y);
    if (!batch) return [];
    const listed = (ids) => [...ids].sort((a, b) => a - b).join(", ");
    const group = `instances ${listed(batch.instances)}` + (batch.holders.length ? `, served by ${listed(batch.holders)}` : "");
    const again = batch.recomputed ? `; computes KV of ${tokens(batch.recomputed)} tokens again` : "";
    return [`batch ${batch.id}: ${batch.phase} of ${batch.num_requests} on ${group}, ${seconds(batch.end - batch.start)}${again}`];
  }
}
