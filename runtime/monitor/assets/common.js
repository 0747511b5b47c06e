// The state of the page, and what its parts share.

const MIB = 2 ** 20;
const MAX_TICKS = 1200, MAX_EVENTS = 200, MAX_SCALARS = 24;
const DRAW_MS = 1000;  // shortest interval between redraws
const RECENT_S = 5;

let facts = null, now = null, ticks = [], epochs = [];
let charts = new Map(), scalars = new Map(), panels = [], view = null;

// -- small helpers ---------------------------------------------------------------------

function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toPrecision(3)} GiB` : `${Math.round(value / MIB)} MiB`;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const last = (list) => list[list.length - 1];
