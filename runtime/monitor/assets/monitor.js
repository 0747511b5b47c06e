// Shows a live run, or the run whose data is embedded in the page. Names and messages are only
// written as text.

// -- drawn once per run ---------------------------------------------------------------------

function tile(name, title) {
  const value = node("b", { "data-name": name }, "–");
  return [node("div", { class: "tile" }, value, node("span", {}, title)), value];
}

function tiles(names) {
  const box = node("div", { class: "tiles" }), found = new Map();
  for (const [name, title] of names) {
    const [made, value] = tile(name, title);
    box.append(made);
    found.set(name, value);
  }
  return [box, found];
}

function set(values, name, text, value) {
  const target = values.get(name);
  write(target, text);
  if (value !== undefined && value !== null) target.setAttribute("data-value", value);
}

function build() {
  charts = new Map();
  scalars = new Map();
  panels = [];
  seen.disconnect();
  const title = node("span", { id: "model" });
  const badge = node("span", { class: "badge", id: "state" });
  const head = node("section", { id: "head" }, link, node("h1", {}, title, badge));
  page.replaceChildren(head);
  view = { title, badge };
  if (!facts) {
    write(title, "No run yet");
    badge.hidden = true;
    head.append(node("p", { class: "soft", id: "empty" }, "This page shows a run once one is attached."));
    return;
  }
  const list = node("ul", { class: "facts soft" });
  const add = (name, value) => list.append(node("li", {}, `${name} `, node("b", {}, String(value))));
  add("policy", `${facts.policy} over ${facts.backend}`);
  view.policy = list.querySelector("b");
  add("ranks", facts.devices.length);
  const sizes = facts.batch_sizes?.length ? facts.batch_sizes : [facts.batch_size];
  add("batch size", sizes.map((n) => number(n)).join(", "));
  add("samples", number(facts.num_samples, 6));
  add("started", new Date(facts.begun * 1000).toLocaleString());
  view.fill = node("div", { class: "fill" });
  const bar = node("div", { id: "progress", class: "track", role: "progressbar", "aria-label": "progress" }, view.fill);
  const [box, values] = tiles([
    ["progress", "done"], ["left", "left"], ["elapsed", "elapsed"],
    ["epoch", `of ${number(facts.num_epochs, 6)} epochs`],
    ["step", `of ${number(facts.total_batches, 6)} batches`], ["loss", "loss"], ["rate", "samples/s"], ["anchor", "anchor"],
    ["averagings", "averagings"],
  ]);
  view.bar = bar;
  view.values = values;
  view.ended = node("p", { id: "ended" });
  view.ended.hidden = true;
  view.error = node("p", { class: "error", id: "error" });
  view.error.hidden = true;
  view.machines = node("p", { id: "machines" });
  view.machines.hidden = true;
  view.events = node("ol");
  head.append(list, bar, box, view.ended, view.error, view.machines);
  page.append(ranks(), node("div", { class: "charts", id: "charts" }),
    node("section", { id: "events" }, node("h2", {}, "Events"), view.events));
  chart("loss", "Loss", "per epoch", { across: "epoch", series: () => [{ name: "loss", points: curve("loss") }] });
  chart("throughput", "Throughput", "samples/s of each rank", { low: 0, series: () => rates() });
  chart("anchor", "Anchor", "batches between averagings", {
    low: 0, series: () => [{ name: "anchor", points: readings((t) => t.anchor), step: true }] });
  chart("load", "Load", "%", { low: 0, series: load });
  chart("memory", "Memory", "MiB", { low: 0, series: memory });
}

function ranks() {
  const box = node("div", { class: "ranks", id: "ranks" });
  facts.devices.forEach((device, rank) => {
    const name = node("span", {}, `Rank ${rank} `);
    const badge = node("span", { class: "badge gone" }, "gone");
    badge.hidden = true;
    const fill = node("div", { class: "fill" });
    const share = node("div", { class: "track share", title: "share of the samples" }, fill);
    const [grid, values] = tiles([
      ["share", "share"], ["rate", "samples/s"], ["throughput", "when busy"],
      ["num_batches", "batches"], ["num_throttles", "throttles"], ["memory", "memory"],
    ]);
    const causes = node("div", { class: "track causes", title: "total time by cause" });
    const lane = node("canvas", { title: "time by cause; the newest at the right" });
    const doing = node("p", { class: "doing" });
    const panel = node("section", { class: "rank", "data-rank": rank },
      node("h3", {}, name, node("span", { class: "soft" }, device), badge), share, grid);
    if (facts.recorded) panel.append(causes, lane, doing);
    box.append(panel);
    panels.push({ badge, fill, values, causes, lane, doing });
  });
  if (!facts.recorded) {
    return node("div", {}, box, node("p", { class: "soft small" },
      "A run with .timeline(Timeline()) also shows the time of each rank by cause."));
  }
  const legend = node("ul", { class: "legend", id: "legend" });
  for (const cause of ORDER) {
    if (cause === "unattributed") continue;
    const color = node("span", { class: "swatch" });
    color.style.background = `var(--${cause})`;
    legend.append(node("li", {}, color, WORDS[cause]));
  }
  return node("div", {}, box, legend);
}

// -- updated with each message ---------------------------------------------------------------

function recent(rank) {
  const end = last(ticks);
  if (!end) return null;
  let start = null;
  for (let i = ticks.length - 2; i >= 0; i -= 1) {
    start = ticks[i];
    if (end.t - start.t >= RECENT_S) break;
  }
  if (now.state !== "running") start = ticks[0] === end ? null : ticks[0];
  const lasted = start ? end.t - start.t : end.t;
  if (lasted <= 0) return null;
  return (end.samples[rank] - (start ? start.samples[rank] : 0)) / lasted;
}

function update() {
  if (!facts || !now) return;
  const over = now.state !== "running";
  write(view.title, now.model || "Training run");
  write(view.badge, now.state);
  view.badge.className = `badge ${now.state}`;
  write(view.policy, `${facts.policy} over ${now.backend || facts.backend}`);
  view.policy.title = now.backend_reason || facts.backend_reason;
  view.bar.setAttribute("aria-valuenow", Math.round(100 * now.progress));
  view.fill.style.width = `${100 * now.progress}%`;
  document.title = `${over ? now.state : percent(now.progress)} · gpuworker monitor`;
  const speeds = panels.map((_, rank) => recent(rank));
  set(view.values, "progress", percent(now.progress), now.progress);
  set(view.values, "left", over ? "–" : seconds(now.left_s), now.left_s);
  set(view.values, "elapsed", seconds(now.elapsed_s), now.elapsed_s);
  set(view.values, "epoch", number(now.num_epochs, 6), now.num_epochs);
  set(view.values, "step", number(now.step, 6), now.step);
  const loss = epochs.length ? last(epochs).loss : null;
  set(view.values, "loss", number(loss, 4), loss);
  set(view.values, "rate", number(speeds.reduce((a, b) => a + (b || 0), 0)));
  set(view.values, "anchor", String(now.anchor), now.anchor);
  set(view.values, "averagings", number(now.num_averagings, 6), now.num_averagings);
  view.ended.hidden = !over;
  const words = { finished: "The run has finished", stopped: "The run was stopped", failed: "The run failed" };
  write(view.ended, over ? `${words[now.state] || "The run has ended"} after ${seconds(now.elapsed_s)}.` : "");
  view.error.hidden = !now.error;
  write(view.error, now.error || "");
  view.machines.hidden = !now.machines.length;
  write(view.machines, `Machines: ${now.machines.map((m) => `${m.machine} (${number(m.num_samples, 6)} samples in the last round)`).join(", ")}`);
  now.ranks.forEach((rank, index) => updateRank(panels[index], rank, speeds[index]));
}

function updateRank(panel, rank, speed) {
  const tick = last(ticks) || {};
  const held = tick.memory && tick.memory[rank.rank] !== null ? tick.memory[rank.rank] : tick.rss;
  panel.badge.hidden = rank.alive;
  panel.fill.style.width = `${100 * rank.share}%`;
  set(panel.values, "share", percent(rank.share), rank.share);
  set(panel.values, "rate", number(speed));
  set(panel.values, "throughput", number(rank.throughput), rank.throughput);
  set(panel.values, "num_batches", number(rank.num_batches, 6), rank.num_batches);
  set(panel.values, "num_throttles", number(rank.num_throttles, 6), rank.num_throttles);
  set(panel.values, "memory", bytes(held), held);
  if (facts.recorded && tick.causes) {
    const totals = tick.causes[rank.rank];
    const whole = totals.reduce((a, b) => a + b, 0) || 1;
    panel.causes.replaceChildren(...ORDER.map((cause) => [cause, totals[facts.causes.indexOf(cause)]])
      .filter(([, spent]) => spent > 0).map(([cause, spent]) => {
        const part = node("div", { class: "fill", "data-cause": cause, "data-value": spent,
          title: `${WORDS[cause]} ${seconds(spent)}` });
        part.style.width = `${(100 * spent) / whole}%`;
        part.style.background = `var(--${cause})`;
        return part;
      }));
    drawLane(panel, rank.rank);
  }
}

function drawLane(panel, rank) {
  const width = panel.lane.clientWidth, height = panel.lane.clientHeight, step = 4;
  const scale = window.devicePixelRatio || 1;
  const known = ticks.filter((tick) => tick.causes);
  if (!width || known.length < 2) return;
  const columns = known.slice(-Math.floor(width / step) - 1);
  panel.lane.width = width * scale;
  panel.lane.height = height * scale;
  const context = panel.lane.getContext("2d");
  context.scale(scale, scale);
  const colors = ORDER.map((cause) => css(`--${cause}`));
  let busiest = null;
  for (let i = 1; i < columns.length; i += 1) {
    const spent = columns[i].causes[rank].map((value, c) => Math.max(0, value - columns[i - 1].causes[rank][c]));
    const whole = spent.reduce((a, b) => a + b, 0);
    if (!(whole > 0)) continue;
    let bottom = height;
    busiest = null;
    ORDER.forEach((cause, c) => {
      const part = spent[facts.causes.indexOf(cause)] / whole;
      if (!(part > 0)) return;
      if (!busiest || part > busiest[1]) busiest = [cause, part];
      context.fillStyle = colors[c];
      context.fillRect(width - (columns.length - i) * step, bottom - part * height, step - 0.5, part * height);
      bottom -= part * height;
    });
  }
  panel.lane.setAttribute("data-columns", columns.length - 1);
  if (busiest) write(panel.doing, now.state === "running" ? `now: ${WORDS[busiest[0]]} ${percent(busiest[1])}` : "");
}

// -- events ------------------------------------------------------------------------------------

function describe(event) {
  const a = event.args || {};
  const times = a.times === 1 ? "" : ` ${number(a.times, 6)} times`;
  const lasted = a.lasted_s === undefined ? "" : `, ${seconds(a.lasted_s)} in all`;
  switch (event.kind) {
    case "epoch": return `epoch ${a.epoch} closed`;
    case "averaging": return `averaged${times}${lasted}`;
    case "throttle": return `parked${times}${lasted}`;
    case "anchor": return `anchor ${a.before} → ${a.anchor}${a.times > 1 ? ` in ${a.times} steps` : ""}`;
    case "machines": return `round ${a.round} between machines: ${a.machines} samples`;
    case "transport": return `averages over ${a.backend}: ${a.reason}`;
    case "checkpoint": return `checkpoint ${a.version}`;
    case "evaluation": return `evaluated epoch ${a.epoch}`;
    case "failure": return a.error === undefined ? "died" : `died in epoch ${a.epoch}, step ${a.step}: ${a.error}`;
    case "more": return `… ${number(a.events, 6)} earlier events are not shown`;
    case "stop": return String(a.reason);
    default: return `the run ${event.kind === "failed" ? "failed" : event.kind === "stopped" ? "was stopped" : `has ${event.kind}`}`;
  }
}

function showEvents(added) {
  const lines = added.map((event) => node("li", { "data-kind": event.kind },
    node("time", {}, seconds(event.t)),
    node("span", { class: "who" }, event.rank === null ? "run" : `rank ${event.rank}`),
    node("span", { class: event.kind }, describe(event))));
  view.events.prepend(...lines.reverse());
  while (view.events.children.length > MAX_EVENTS) view.events.lastChild.remove();
}

// -- messages ----------------------------------------------------------------------------------------

function add(message) {
  now = message.now;
  ticks.push(...message.ticks);
  epochs.push(...message.epochs);
  if (ticks.length > MAX_TICKS) ticks = ticks.filter((_, i) => i % 2 === 0 || i === ticks.length - 1);
  if (facts) {
    addScalars(message.epochs);
    addPieces();
    showEvents(message.events);
    update();
  }
  for (const found of charts.values()) found.dirty = true;
  drawSoon();
}

function restart(message) {
  ({ facts } = message);
  ticks = [];
  epochs = [];
  build();
  drawn = 0;
  if (message.now) add(message);
  document.body.dataset.ready = "yes";
}

const link = node("span", { id: "link" });
const setLink = (state, text) => { link.className = state; write(link, text); };

function follow() {
  const source = new EventSource("events");
  source.addEventListener("history", (event) => {
    setLink("live", "live");
    restart(JSON.parse(event.data));
  });
  source.addEventListener("news", (event) => add(JSON.parse(event.data)));
  source.addEventListener("bye", () => {
    // A live run may get another monitor at this address; an ended run sends nothing more.
    if (now && now.state !== "running") source.close();
    setLink("gone", "no longer served");
  });
  source.addEventListener("error", () => {
    if (link.className === "gone" && source.readyState === EventSource.CLOSED) return;
    setLink("lost", "not connected");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 5000);
  });
}

let shown = 0;
new ResizeObserver(() => {
  if (page.clientWidth === shown) return;
  shown = page.clientWidth;
  drawSoon();
  update();
}).observe(page);
document.addEventListener("visibilitychange", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const found of charts.values()) found.dirty = true;
  drawSoon();
  update();
});
const data = document.getElementById("data");
if (data) {
  setLink("gone", "saved");
  restart(JSON.parse(data.textContent));
} else {
  setLink("lost", "connecting");
  follow();
}
