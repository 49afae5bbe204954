// Which seconds of the past are shown: the last ones, or those that someone drew a frame around.

const CLICK_PIXELS = 5, LEAST_SECONDS = 0.002;

export class Zoom {
  /** `onClick` gets a place of the canvas that was clicked, `onChange` is called when other seconds are to be shown. */
  constructor(canvas, frame, gantt, { onClick, onChange }) {
    Object.assign(this, { frame, gantt, onChange, view: null });
    canvas.addEventListener("pointerdown", (event) => (this.from = { x: event.offsetX, y: event.offsetY }));
    canvas.addEventListener("pointermove", (event) => this.drag(event.offsetX, event.buttons));
    canvas.addEventListener("pointerup", (event) => {
      if (this.from && Math.abs(event.offsetX - this.from.x) < CLICK_PIXELS) onClick(this.from.x, this.from.y);
      else if (this.from) this.show(this.gantt.time(this.from.x), this.gantt.time(event.offsetX));
      this.drop();
    });
    canvas.addEventListener("pointercancel", () => this.drop());
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  drag(x, buttons) {
    if (!this.from || !buttons) return;
    this.frame.hidden = Math.abs(x - this.from.x) < CLICK_PIXELS;
    this.frame.style.left = `${Math.min(x, this.from.x)}px`;
    this.frame.style.width = `${Math.abs(x - this.from.x)}px`;
  }

  drop() {
    this.from = null;
    this.frame.hidden = true;
  }

  show(start, end) {
    const [low, high] = [Math.min(start, end), Math.max(start, end)];
    const middle = (low + high) / 2, half = Math.max(high - low, LEAST_SECONDS) / 2;
    this.view = { start: middle - half, end: middle + half };
    this.onChange();
  }

  reset() {
    if (!this.view) return;
    this.view = null;
    this.onChange();
  }

  key(event) {
    const { start, end } = this.gantt, wide = end - start;
    const moves = { "+": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25] };
    if (event.key === "Escape") this.reset();
    else if (moves[event.key]) this.show(start + moves[event.key][0] * wide, end + moves[event.key][1] * wide);
    else return;
    event.preventDefault();
  }
}
