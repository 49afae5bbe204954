// A canvas as sharp as the screen, in the page's colors.

export function prepared(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height: tall };
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
