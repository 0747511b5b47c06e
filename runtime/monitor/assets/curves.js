// The plots. Names chosen by others are not passed to Plotly, which interprets some markup.

// -- curves ---------------------------------------------------------------------------------------

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const found = charts.get(entry.target.id);
    if (found) found.visible = entry.isIntersecting;
  }
  drawSoon();
});

function chart(id, title, unit, options, next = null) {
  const place = node("div", { class: "chart" });
  const heading = node("h2", { title }, title.length > 80 ? `${title.slice(0, 79)}…` : title || "(no name)", " ",
    node("span", { class: "soft" }, unit));
  const box = node("section", { id, class: "plot" }, heading, place);
  charts.set(id, { ...options, box, place, visible: false, dirty: true, width: 0 });
  document.getElementById(options.within || "charts").insertBefore(box, next);
  seen.observe(box);
}

const curve = (name) => epochs.map((epoch) => [epoch.epoch, epoch[name]]);
const readings = (read) => ticks.map((tick) => [tick.t, read(tick)]).filter(([, value]) => value !== undefined && value !== null);

// Means of epochs at whole numbers. A loss trained after n epochs belongs to the mean around n - 0.5.
function losses() {
  const running = ticks.filter((tick) => typeof tick.loss === "number").map((tick) => [tick.epochs - 0.5, tick.loss]);
  return [{ name: "mean of an epoch", points: curve("loss") }, { name: "running", points: running, thin: true }];
}

function rates() {
  return facts.devices.map((_, rank) => {
    const points = [];
    let before = { t: 0, samples: facts.devices.map(() => 0) };
    // Without a timeline, counters include batches trained before the run was resumed.
    if (ticks.length && !facts.recorded) [before] = ticks;
    let first = before;
    for (const tick of ticks) {
      if (tick.t <= before.t) continue;
      // The last reading may follow the previous one closely: merge the two intervals.
      if (points.length && tick === last(ticks) && tick.t - before.t < (before.t - first.t) / 2) {
        points.pop();
        before = first;
      }
      points.push([tick.t, Math.max(0, (tick.samples[rank] - before.samples[rank]) / (tick.t - before.t))]);
      first = before;
      before = tick;
    }
    return { name: `rank ${rank}`, points };
  });
}

function load() {
  const found = [
    { name: "process, of one core", points: readings((t) => t.cpu) },
    { name: "machine, of all cores", points: readings((t) => t.all) },
  ];
  for (const key of gpus("_percent")) found.push({ name: key.split("_")[0], points: readings((t) => t[key]) });
  return found;
}

function memory() {
  const found = [{ name: "process", points: readings((t) => (t.rss === undefined ? null : t.rss / MIB)) }];
  const devices = [...new Set(facts.devices)].filter((name) => name.startsWith("cuda"));
  for (const device of devices) {
    const rank = facts.devices.indexOf(device);
    found.push({ name: `${device}, held by PyTorch`,
      points: readings((t) => (t.memory && t.memory[rank] !== null ? t.memory[rank] / MIB : null)) });
  }
  return found;
}

function gpus(end) {
  return Object.keys(last(ticks) || {}).filter((key) => /^gpu\d+_/.test(key) && key.endsWith(end));
}

function addScalars(added) {
  for (const epoch of added) {
    for (const [name, value] of epoch.scalars) {
      if (!scalars.has(name)) {
        if (scalars.size >= MAX_SCALARS) continue;
        const id = `scalar-${scalars.size}`, points = [];
        scalars.set(name, points);
        chart(id, name, "per epoch", { across: "epoch", series: () => [{ name: "value", points }] },
          document.getElementById("throughput"));
      }
      scalars.get(name).push([epoch.epoch, value]);
    }
  }
}

function addPieces() {
  if (charts.has("pieces") || !ticks.some((tick) => tick.pieces)) return;
  const piece = (rank) => readings((tick) => (tick.pieces ? tick.pieces[rank] : null));
  chart("pieces", "Shares", "samples of a micro-batch of each rank", {
    low: 0, series: () => facts.devices.map((_, rank) => ({ name: `rank ${rank}`, points: piece(rank), step: true })) });
}

function unitOf(end) {
  if (end < 180) return [1, " s"];
  return end < 10800 ? [60, " min"] : [3600, " h"];
}

// Whole epochs, in steps that leave room for the labels.
function epochStep(width) {
  const span = epochs.length ? last(epochs).epoch - epochs[0].epoch : 0;
  const raw = Math.max(1, span / (width < 420 ? 5 : 9));
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= raw) || 1;
}

function layoutOf(found, width, many, across, suffix) {
  const every = epochStep(width);
  const ink = css("--soft"), line = css("--line");
  const axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: false, fixedrange: false };
  const bottom = many ? 52 : 26;
  return {
    width, height: 210, margin: { l: 54, r: 10, t: 6, b: bottom }, showlegend: many,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept",
    font: { color: ink, size: 11, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: css("--paper"), bordercolor: line, font: { color: css("--ink"), size: 11 } },
    hovermode: "x", colorway: SERIES,
    legend: { orientation: "h", x: 0, y: -0.16, yanchor: "top", font: { size: 11 } },
    xaxis: { ...axis, ticksuffix: suffix, nticks: width < 420 ? 5 : 8,
      ...(across === "epoch" ? { tick0: 0, dtick: every } : { rangemode: "tozero" }) },
    yaxis: { ...axis, nticks: 5, rangemode: found.low === 0 ? "tozero" : "normal", exponentformat: "SI" },
  };
}

function draw(found) {
  const width = found.place.clientWidth;
  if (!width || typeof Plotly === "undefined") return;
  const series = found.series();
  const epochwise = found.across === "epoch";
  const [unit, suffix] = epochwise ? [1, ""] : unitOf(last(ticks) ? last(ticks).t : 0);
  const traces = series.map((s) => ({
    type: "scatter", name: s.name, x: s.points.map((p) => p[0] / unit), y: s.points.map((p) => p[1]),
    mode: epochwise && !s.thin && s.points.length < 60 ? "lines+markers" : "lines",
    line: { width: s.thin ? 0.8 : 1.6, shape: s.step ? "hv" : "linear" }, marker: { size: 4 },
    hovertemplate: series.length > 1 ? "%{y:.4~g}" : "%{y:.5~g}<extra><\/extra>", connectgaps: false,
  }));
  const layout = layoutOf(found, width, series.length > 1, found.across, suffix);
  const heights = series.flatMap((s) => s.points.map((p) => p[1])).filter((y) => typeof y === "number");
  const low = Math.min(...heights), high = Math.max(...heights);
  // A constant has no range of its own, and Plotly's goes from -1 to 1 around small ones.
  if (heights.length && low === high && low !== 0 && found.low !== 0) {
    layout.yaxis.range = [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  }
  found.box.setAttribute("data-points", series.map((s) => s.points.length).join(" "));
  found.box.setAttribute("data-last", series.map((s) => (s.points.length ? last(s.points)[1] : "")).join(" "));
  found.width = width;
  found.dirty = false;
  Plotly.react(found.place, traces, layout,
    { displayModeBar: false, displaylogo: false, responsive: false, scrollZoom: false });
}

let waiting = false, drawn = 0;

function drawSoon() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => {
    waiting = false;
    if (document.hidden) return;
    drawn = performance.now();
    for (const found of charts.values()) {
      if (found.visible && (found.dirty || found.width !== found.place.clientWidth)) draw(found);
    }
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }, Math.max(0, drawn + DRAW_MS - performance.now()));
}
