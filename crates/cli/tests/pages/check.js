// Looks at pages in frames of several widths, and writes down what cannot be read. `PAGES` are [name, html], `WIDTHS` in pixels.
const found = [], seen = { frames: 0, svgs: 0, texts: 0, dark: matchMedia('(prefers-color-scheme: dark)').matches };

const rgba = (text) => {
  const [r, g, b, a = 1] = (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return { r, g, b, a };
};
const over = (top, below, opacity) => {
  const a = top.a * opacity, mix = (x, y) => a * x + (1 - a) * y;
  return { r: mix(top.r, below.r), g: mix(top.g, below.g), b: mix(top.b, below.b), a: 1 };
};
const luminance = ({ r, g, b }) => {
  const linear = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

// The colour of an element's background: of those around it that have one, the nearest on the others.
function background(win, element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.unshift(rgba(win.getComputedStyle(at).backgroundColor));
  return layers.reduce((below, top) => over(top, below, 1), { r: 255, g: 255, b: 255, a: 1 });
}

function lookAtSvg(win, svg, say) {
  const outer = svg.getBoundingClientRect(), scale = outer.width / (svg.viewBox.baseVal.width || outer.width);
  const below = background(win, svg);
  const shapes = [...svg.querySelectorAll('rect, path')].map((shape) => {
    const style = win.getComputedStyle(shape);
    const opacity = Number(style.opacity) * Number(style.fillOpacity);
    return { shape, box: shape.getBoundingClientRect(), fill: style.fill, opacity, isRect: shape.tagName === 'rect' };
  });
  const texts = [...svg.querySelectorAll('text')].filter((text) => text.textContent.trim()).map((text) => {
    const box = text.getBoundingClientRect(), style = win.getComputedStyle(text);
    const size = parseFloat(style.fontSize) * scale, words = text.textContent.trim();
    if (size < 8.95) say(`"${words}" has ${size.toFixed(1)} px`);
    if (box.left < outer.left - 1 || box.right > outer.right + 1 || box.top < outer.top - 1 || box.bottom > outer.bottom + 1)
      say(`"${words}" is cut off`);
    const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    const around = ({ box, shape, isRect, fill }) => isRect && fill.startsWith('rgb') && box.left <= x && x <= box.right && box.top <= y
      && y <= box.bottom && (shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING);
    const ground = shapes.filter(around).reduce((at, s) => over(rgba(s.fill), at, s.opacity), below);
    const ratio = contrast(over(rgba(style.fill), ground, Number(style.opacity)), ground);
    if (ratio < 3) say(`"${words}" has a contrast of ${ratio.toFixed(1)}`);
    return { box, words, slack: 0.2 * box.height };
  });
  texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
    const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
    const high = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
    if (wide > 1 && high > Math.min(a.slack, b.slack) + 1) say(`"${a.words}" and "${b.words}" are on top of each other`);
  }));
  seen.texts += texts.length;
}

async function look(name, html, width) {
  const frame = document.createElement('iframe');
  Object.assign(frame.style, { width: `${width}px`, height: '900px', border: '0' });
  const loaded = new Promise((done) => { frame.onload = done; });
  frame.srcdoc = html;
  document.body.append(frame);
  await loaded;
  const win = frame.contentWindow, page = frame.contentDocument, mine = [];
  const say = (what) => mine.push(what);
  if (win.matchMedia('(prefers-color-scheme: dark)').matches !== seen.dark) say('it does not follow the light of the room');
  const root = page.documentElement;
  if (root.scrollWidth > root.clientWidth + 1) say(`scrolls sideways: ${root.scrollWidth} in ${root.clientWidth} px`);
  for (const panel of page.querySelectorAll('.panel'))
    if (panel.scrollWidth > panel.clientWidth + 1)
      say(`a panel scrolls sideways: ${panel.scrollWidth} in ${panel.clientWidth} px, ${panel.textContent.trim().slice(0, 40)}`);
  for (const text of page.querySelectorAll('h1, h2, h3, p, td, th, .label, .value, footer div, .legend span')) {
    const ratio = contrast(rgba(win.getComputedStyle(text).color), background(win, text));
    if (ratio < 3) say(`"${text.textContent.trim().slice(0, 40)}" has a contrast of ${ratio.toFixed(1)}`);
  }
  for (const svg of page.querySelectorAll('svg')) {
    seen.svgs += 1;
    lookAtSvg(win, svg, say);
  }
  seen.frames += 1;
  found.push(...mine.slice(0, 8).map((what) => `${name} at ${width} px: ${what}`));
  if (mine.length > 8) found.push(`${name} at ${width} px: and ${mine.length - 8} more`);
  frame.remove();
}

addEventListener('load', async () => {
  const result = document.createElement('pre');
  try {
    for (const [name, html] of PAGES) for (const width of WIDTHS) await look(name, html, width);
  } catch (error) {
    found.push(`the check failed: ${error.stack}`);
  }
  result.id = 'result';
  result.textContent = JSON.stringify({ found, seen });
  document.body.append(result);
});
