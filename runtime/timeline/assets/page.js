// Draws the timeline's page from its embedded data. Names are only written as text.

const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const summary = data.summary;
const wall = summary.wall_s || 0;
const causes = data.causes;
const ENDS = ["startup", "ending", "gone"];
const MARKS = { failure: "✕", stop: "■", checkpoint: "▲", evaluation: "◆" };

const MAX_SCALAR_CHARTS = 12;

// -- small helpers ----------------------------------------------------------------

function shape(tag, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

const color = (cause) => `var(--${cause})`;

function swatch(value) {
  const made = node("span", { class: "swatch" });
  made.style.background = value;
  return made;
}

function section(id, title, ...children) {
  return node("section", { id }, node("h2", {}, title), ...children);
}

function ticks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(t);
  return found;
}

function place(line, x) {
  for (const [key, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) line.setAttribute(key, value);
}

// -- head and table ------------------------------------------------------------------

function head() {
  const facts = summary.facts;
  const title = node("h1", {}, summary.model || "Timeline",
    node("span", { class: `badge ${summary.state}`, id: "state" }, summary.state));
  const list = node("ul", { class: "facts soft" });
  const add = (name, value) => list.append(node("li", {}, `${name} `, node("b", {}, String(value))));
  if (facts) {
    add("policy", `${facts.policy} over ${facts.backend}`);
    add("ranks", facts.devices.length);
    const sizes = facts.batch_sizes?.length ? facts.batch_sizes : [facts.batch_size];
    if (sizes[0]) add("batch size", sizes.map((n) => number(n)).join(", "));
    add("time", seconds(wall));
    if (facts.num_epochs) add("epochs", `${summary.num_epochs} of ${facts.num_epochs}`);
    add("samples", number(summary.ranks.reduce((n, r) => n + r.num_samples, 0), 6));
    add("averagings", summary.num_averagings);
    if (summary.num_failed_rounds) add("failed rounds", summary.num_failed_rounds);
    if (summary.anchor) add("anchor", summary.anchor);
    add("coordinator busy", percent(summary.coordinator_busy_s, wall));
  }
  const made = node("section", { id: "head" }, title, list);
  if (summary.error) made.append(node("p", { class: "error", id: "error" }, summary.error));
  return made;
}

function used() {
  return ORDER.filter((cause) => cause === "unattributed"
    || summary.ranks.some((rank) => rank.causes[cause] > 0));
}

function legend() {
  const list = node("ul", { class: "legend", id: "legend" });
  const whole = summary.ranks.reduce((n, r) => n + r.wall_s, 0);
  for (const cause of used()) {
    const part = summary.ranks.reduce((n, r) => n + r.causes[cause], 0);
    list.append(node("li", {}, swatch(color(cause)), `${WORDS[cause]} ${percent(part, whole)}`));
  }
  return list;
}

function cell(rank, name, text, value) {
  return node("td", { "data-rank": rank, "data-name": name, "data-value": value }, text);
}

function table() {
  const shown = used();
  const titles = ["rank", "time", "idle", "steps", "samples", "samples/s", "throttles", ...shown.map((c) => WORDS[c])];
  const header = node("tr", {}, ...titles.map((t) => node("th", {}, t)));
  const rows = summary.ranks.map((r) => {
    const row = node("tr", {},
      node("td", {}, `${r.rank} · ${r.device}`),
      cell(r.rank, "wall_s", seconds(r.wall_s), r.wall_s),
      cell(r.rank, "idle_share", percent(r.idle_share, 1), r.idle_share),
      cell(r.rank, "num_steps", number(r.num_steps, 6), r.num_steps),
      cell(r.rank, "num_samples", number(r.num_samples, 6), r.num_samples),
      cell(r.rank, "throughput", number(r.throughput), r.throughput),
      cell(r.rank, "num_throttles", r.num_throttles, r.num_throttles));
    for (const cause of shown) {
      const made = cell(r.rank, cause, seconds(r.causes[cause]), r.causes[cause]);
      made.append(node("span", { class: "share" }, percent(r.causes[cause], r.wall_s)));
      row.append(made);
    }
    return row;
  });
  return section("summary", "Time by cause",
    node("div", { class: "wide" }, node("table", {}, node("thead", {}, header), node("tbody", {}, ...rows))));
}

function simpleTable(id, title, note, names, rows) {
  const header = node("tr", {}, ...names.map((name) => node("th", { class: "text" }, name)));
  const body = rows.map((row) => node("tr", {}, ...row.map((text) => {
    const made = node("td", { class: "text cut" }, String(text));
    if (String(text).length > 30) made.title = String(text);
    return made;
  })));
  const made = section(id, title,
    node("div", { class: "wide" }, node("table", {}, node("thead", {}, header), node("tbody", {}, ...body))));
  if (note) made.append(node("p", { class: "soft small" }, note));
  return made;
}

// -- lanes -----------------------------------------------------------------------------

// Seconds by cause between two times, also for parts of bins.
function spent(lane, from, to) {
  const sums = new Array(causes.length).fill(0);
  const first = Math.max(0, Math.floor(from / lane.bin_s));
  for (let i = first; i < lane.bins.length && i * lane.bin_s < to; i += 1) {
    const begin = i * lane.bin_s;
    const end = Math.min(begin + lane.bin_s, Math.max(wall, begin));
    const part = Math.min(to, end) - Math.max(from, begin);
    if (!(part > 0) || !(end > begin)) continue;
    lane.bins[i].forEach((value, c) => { sums[c] += value * Math.min(1, part / (end - begin)); });
  }
  return sums;
}

function laneBars(lane, x, y, width, height) {
  const paths = Object.fromEntries(ORDER.map((cause) => [cause, ""]));
  const columns = Math.max(1, Math.min(Math.floor(width), Math.max(1, lane.bins.length)));
  const step = width / columns;
  for (let i = 0; i < columns; i += 1) {
    const sums = spent(lane, (i * wall) / columns, ((i + 1) * wall) / columns);
    const whole = sums.reduce((a, b) => a + b, 0);
    if (!(whole > 0)) continue;
    let top = y + height;
    for (const cause of ORDER) {
      const h = (sums[causes.indexOf(cause)] / whole) * height;
      if (!(h > 0.02)) continue;
      top -= h;
      paths[cause] += `M${(x + i * step).toFixed(2)} ${top.toFixed(2)}h${(step + 0.3).toFixed(2)}v${h.toFixed(2)}h${(-step - 0.3).toFixed(2)}z`;
    }
  }
  return ORDER.filter((cause) => paths[cause]).map((cause) =>
    shape("path", { d: paths[cause], fill: color(cause), class: "cause", "data-cause": cause }));
}

function drawLanes(svg, readout) {
  const width = Math.max(240, svg.parentNode.clientWidth);
  const narrow = width < 560;
  const left = narrow ? 6 : 116, right = 8, bar = 26;
  const lead = narrow ? 18 : 4, row = bar + lead + 14, top = 4;
  const inner = width - left - right;
  const scale = (t) => left + (wall > 0 ? (t / wall) * inner : 0);
  const rows = [null, ...summary.ranks.map((r) => r.rank)];
  const height = top + rows.length * row + 22;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  for (const t of ticks(0, wall, narrow ? 4 : 9)) {
    const x = scale(t);
    svg.append(shape("line", { x1: x, x2: x, y1: top, y2: height - 18, class: "axis" }));
    const anchor = x > width - 30 ? "end" : x < left + 12 ? "start" : "middle";
    svg.append(shape("text", { x, y: height - 5, "text-anchor": anchor }, seconds(t)));
  }
  rows.forEach((rank, index) => {
    const y = top + index * row + lead + 8;
    const device = rank === null ? "" : ` · ${summary.facts.devices[rank]}`;
    const name = rank === null ? "coordinator" : `rank ${rank}${device}`;
    const group = shape("g", { class: "lane", "data-lane": rank === null ? "coordinator" : rank });
    group.append(shape("text", {
      x: 0, y: narrow ? y - 8 : y + bar / 2 + 4, class: "name",
    }, name.length > 40 ? `${name.slice(0, 39)}…` : name));
    if (rank === null) group.append(...coordinatorBars(scale, y, bar));
    else group.append(...laneBars(data.lanes.find((l) => l.rank === rank), left, y, inner, bar));
    for (const event of data.events) {
      if (event.rank !== rank || !MARKS[event.kind]) continue;
      if (rank === null && event.kind !== "stop" && !isSave(event)) continue;
      const below = event.kind === "checkpoint" && (narrow || rank !== null);
      group.append(mark(event, scale, below ? y + bar + 11 : y));
    }
    svg.append(group);
  });
  const line = shape("line", { class: "cursor", y1: top, y2: height - 18, visibility: "hidden" });
  svg.append(line);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    const t = ((x - left) / inner) * wall;
    if (t < 0 || t > wall) return;
    place(line, x);
    readout.textContent = describe(t, wall / inner);
  };
}

// True for the coordinator's event of a checkpoint that was written or failed.
function isSave(event) {
  return event.kind === "checkpoint" && /^(saved|failed)/.test((event.args || {}).part || "");
}

function argumentText(event, separator) {
  return Object.entries(event.args || {}).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name}${separator}${value}`).join(", ");
}

function mark(event, scale, y) {
  const words = argumentText(event, " ");
  const made = shape("text", {
    x: scale(event.end_s), y: y - 1, "text-anchor": "middle", class: "mark", "data-kind": event.kind,
  }, MARKS[event.kind]);
  if (event.kind === "failure") made.style.fill = "var(--sync)";
  made.append(shape("title", {}, `${event.kind} at ${seconds(event.end_s)} ${words}`));
  return made;
}

function coordinatorBars(scale, y, bar) {
  let rounds = "", closes = "";
  for (const event of data.events) {
    if (event.rank !== null) continue;
    const x = scale(event.start_s), w = Math.max(1, scale(event.end_s) - x);
    if (event.kind === "averaging") rounds += `M${x.toFixed(2)} ${y + 4}h${w.toFixed(2)}v${bar - 8}h${(-w).toFixed(2)}z`;
    if (event.kind === "epoch") closes += `M${scale(event.end_s).toFixed(2)} ${y - 2}v${bar + 4}`;
  }
  const x = scale(0), end = scale(wall);
  return [
    shape("path", { d: `M${x} ${y + bar / 2}H${end}`, class: "axis" }),
    shape("path", { d: rounds || "M0 0", fill: color("averaging"), class: "rounds" }),
    shape("path", { d: closes || "M0 0", stroke: "var(--ink)", "stroke-width": 1.5, class: "closes" }),
  ];
}

function describe(t, width) {
  const parts = data.lanes.map((lane) => {
    const sums = spent(lane, Math.max(0, t - width), t + width);
    const whole = sums.reduce((a, b) => a + b, 0);
    const best = ORDER.filter((c) => sums[causes.indexOf(c)] > 0.05 * whole)
      .sort((a, b) => sums[causes.indexOf(b)] - sums[causes.indexOf(a)])
      .map((c) => `${WORDS[c]} ${Math.round((100 * sums[causes.indexOf(c)]) / whole)} %`);
    return `rank ${lane.rank}: ${best.join(", ") || "–"}`;
  });
  return `at ${seconds(t)} – ${parts.join(" · ")}`;
}

// -- curves ------------------------------------------------------------------------------

// series: {name, points: [[x, y], ...], step}
function chart(id, title, series, { unit = "", across = "s", low = null } = {}) {
  const svg = shape("svg", { role: "img", "aria-label": title });
  const readout = node("p", { class: "readout" });
  const list = node("ul", { class: "legend" });
  series.forEach((s, i) => {
    s.color = SERIES[i % SERIES.length];
    const last = s.points.length ? s.points[s.points.length - 1][1] : null;
    const item = node("li", { "data-points": s.points.length }, swatch(s.color),
      `${s.name.length > 28 ? `${s.name.slice(0, 27)}…` : s.name} ${number(last)}`);
    item.title = s.name;
    list.append(item);
  });
  const made = section(id, title + (unit ? ` (${unit})` : ""), node("div", {}, svg), list, readout);
  made.draw = () => drawChart(svg, readout, series, across, low);
  return made;
}

function drawChart(svg, readout, series, across, low) {
  const width = Math.max(220, svg.parentNode.clientWidth), height = 170;
  const left = 46, right = 10, top = 8, bottom = 22;
  const points = series.flatMap((s) => s.points).filter((p) => p[1] !== null);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  if (!points.length) {
    svg.append(shape("text", { x: left, y: height / 2 }, "nothing was recorded"));
    return;
  }
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const [x, y] of points) {
    x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
  }
  if (across === "s") { x0 = 0; x1 = Math.max(x1, wall); }
  if (low !== null) y0 = Math.min(low, y0);
  if (y1 - y0 <= 0) { y1 += Math.abs(y1) * 0.1 || 1; }
  if (x1 - x0 <= 0) x1 = x0 + 1;
  const sx = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const sy = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  for (const y of ticks(y0, y1, 4)) {
    svg.append(shape("line", { x1: left, x2: width - right, y1: sy(y), y2: sy(y), class: "axis" }));
    svg.append(shape("text", { x: left - 6, y: sy(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of ticks(x0, x1, width < 420 ? 3 : 6)) {
    if (across !== "s" && x !== Math.round(x)) continue;
    const words = across === "s" ? seconds(x) : String(x);
    svg.append(shape("text", { x: sx(x), y: height - 5, "text-anchor": sx(x) > width - 24 ? "end" : "middle" }, words));
  }
  for (const s of series) svg.append(...curve(s, sx, sy));
  const line = shape("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(line);
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) / box.width) * width;
    const x = x0 + ((px - left) / (width - left - right)) * (x1 - x0);
    place(line, px);
    const words = series.map((s) => {
      const before = s.points.filter((p) => p[0] <= x);
      return before.length ? `${s.name.slice(0, 40)} ${number(before[before.length - 1][1])}` : null;
    });
    const at = across === "s" ? seconds(Math.max(0, x)) : `${across} ${Math.round(x)}`;
    readout.textContent = `${at} – ${words.filter(Boolean).join(" · ")}`;
  };
}

function curve(s, sx, sy) {
  let path = "", pen = false, before = null;
  for (const [x, y] of s.points) {
    if (y === null) { pen = false; continue; }
    if (pen && s.step) path += `H${sx(x).toFixed(1)}V${sy(y).toFixed(1)}`;
    else path += `${pen ? "L" : "M"}${sx(x).toFixed(1)} ${sy(y).toFixed(1)}`;
    pen = true;
    before = [x, y];
  }
  if (s.step && before) path += `H${sx(Math.max(before[0], wall)).toFixed(1)}`;
  if (!path) return [];
  const found = [shape("path", { d: path, class: "line", stroke: s.color, "data-name": s.name })];
  if (s.points.length === 1 && before) {
    found.push(shape("circle", { cx: sx(before[0]), cy: sy(before[1]), r: 3, fill: s.color }));
  }
  return found;
}

function curves() {
  const found = [];
  const { anchor, throughput, resources } = data.curves;
  const rates = summary.ranks.map((r, i) => ({
    name: `rank ${r.rank}`,
    points: throughput.rates.map((row, n) => [(n + 0.5) * throughput.bin_s, row[i]])
      .map(([x, y]) => [Math.min(x, wall), y]),
  }));
  found.push(chart("throughput", "Throughput", rates, { unit: "samples/s", low: 0 }));
  found.push(chart("anchor", "Anchor", [{ name: "anchor", points: anchor, step: true }],
    { unit: "batches between averagings", low: 0 }));
  const loss = data.epochs.map((epoch) => [epoch.epoch, epoch.avg_loss]);
  found.push(chart("loss", "Loss", [{ name: "loss", points: loss }], { unit: "per epoch", across: "epoch" }));
  for (const [name, title] of [["divergence", "Divergence"], ["param_norm", "Parameter norm"]]) {
    const values = data.epochs.map((epoch) => [epoch.epoch, epoch[name]]).filter(([, value]) => typeof value === "number");
    if (values.length) found.push(chart(name, title, [{ name, points: values }], { unit: "per epoch", across: "epoch" }));
  }
  const scalars = new Map();
  for (const epoch of data.epochs) {
    for (const [name, value] of Object.entries(epoch.scalars)) {
      if (!scalars.has(name)) scalars.set(name, []);
      scalars.get(name).push([epoch.epoch, value]);
    }
  }
  [...scalars].slice(0, MAX_SCALAR_CHARTS).forEach(([name, points], index) => {
    const title = name.length > 60 ? `${name.slice(0, 59)}…` : name;
    found.push(chart(`scalar-${index}`, title || "(no name)", [{ name, points }],
      { unit: "per epoch", across: "epoch" }));
  });
  const column = (name) => resources.columns.indexOf(name) + 1;
  const points = (name, factor = 1) => resources.readings
    .map((row) => [row[0], row[column(name)] === null ? null : row[column(name)] * factor]);
  const MIB = 1 / 2 ** 20;
  const gpus = resources.columns.filter((name) => name.startsWith("gpu"));
  const pick = (end) => gpus.filter((name) => name.endsWith(end));
  if (resources.columns.length) {
    found.push(chart("cpu", "CPU", [
      { name: "process, of one core", points: points("process_cpu_percent") },
      { name: "machine, of all cores", points: points("machine_cpu_percent") },
    ], { unit: "%", low: 0 }));
    found.push(chart("memory", "Memory of the process", [
      { name: "resident", points: points("process_rss_bytes", MIB) }], { unit: "MiB", low: 0 }));
  }
  if (gpus.length) {
    found.push(chart("gpu", "GPU load", pick("_percent").map((name) => (
      { name: name.split("_")[0], points: points(name) })), { unit: "%", low: 0 }));
    found.push(chart("gpu-memory", "GPU memory", pick("_used_bytes").map((name) => (
      { name: name.split("_")[0], points: points(name, MIB) })), { unit: "MiB", low: 0 }));
  }
  return found;
}

// -- the page -----------------------------------------------------------------------------

function lanesNote() {
  const left = data.num_events_left_out + summary.num_dropped;
  return "Bars: share of the time in each column, by cause. Coordinator: averaging rounds, and a "
    + "line where an epoch closes. Marks: ▲ checkpoint, ◆ evaluation, ■ stop, ✕ failure."
    + (left ? ` ${number(left, 6)} older events are not shown; totals include all.` : "");
}

function build() {
  page.replaceChildren(head());
  if (!summary.facts) {
    page.append(section("empty", "Nothing was recorded"));
    return;
  }
  const svg = shape("svg", { id: "lanes-picture", role: "img", "aria-label": "swim lanes" });
  const readout = node("p", { class: "readout", id: "readout" }, "Point at a lane to see its causes.");
  const lanes = section("lanes", "Lanes", node("div", {}, svg), legend(), readout,
    node("p", { class: "soft small" }, lanesNote()));
  const charts = curves();
  page.append(lanes, table(), node("div", { class: "charts", id: "charts" }, ...charts));
  const longest = data.gaps.filter((g) => !ENDS.includes(g.cause)).slice(0, 12);
  page.append(simpleTable("gaps", "Longest gaps",
    `${number(data.num_gaps, 6)} gaps are kept; those at the start and end of the run are not listed, `
    + "and shorter ones are only in the totals.",
    ["rank", "cause", "start", "duration"],
    longest.map((g) => [g.rank, WORDS[g.cause], seconds(g.start_s), seconds(g.duration_s)])));
  const broken = (e) => ["failure", "stop"].includes(e.kind)
    || (isSave(e) && e.rank === null && e.args.part.startsWith("failed"));
  const found = data.events.filter(broken);
  if (found.length) {
    page.append(simpleTable("failures", "Failures and stops", null, ["at", "rank", "details"],
      found.map((e) => [seconds(e.end_s), e.rank ?? "–", argumentText(e, ": ")])));
  }
  const draw = () => {
    drawLanes(svg, readout);
    charts.forEach((c) => c.draw());
  };
  draw();
  let width = page.clientWidth;
  new ResizeObserver(() => {
    if (page.clientWidth !== width) { width = page.clientWidth; draw(); }
  }).observe(page);
  document.body.dataset.ready = "yes";
}

build();
