// Labels, colors and number formats of the timeline's page and the monitor's. Their scripts are
// joined into one function each, which begins with this one.

const ORDER = ["compute", "averaging", "callbacks", "control", "data", "sync", "parked", "idle",
  "startup", "ending", "gone", "unattributed"];
const WORDS = {
  compute: "training", averaging: "averaging and copies", callbacks: "callbacks",
  control: "messages and loop", data: "waiting for data", sync: "waiting for peers",
  parked: "parked (throttled)", idle: "no plan", startup: "start-up", ending: "leaving",
  gone: "ended", unattributed: "unattributed",
};
const SERIES = ["#2c6fb3", "#d0552d", "#3a9d76", "#b5659a", "#e6a11c", "#63b3e0", "#8a7fd0",
  "#7f8a99", "#a3937a", "#c04080"];
const page = document.getElementById("page");

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(digits) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(digits) + "M";
  if (size >= 1e3) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Number((value / 60).toPrecision(3))} min`;
  return `${Number((value / 3600).toPrecision(3))} h`;
}

function percent(part, whole = 1) {
  if (part === null || part === undefined || !(whole > 0)) return "–";
  return `${(100 * part / whole).toFixed(1)} %`;
}
