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
  if (facts.batch_text) list.append(node("li", {}, node("b", {}, facts.batch_text)));
  else add("batch size", sizes.map((n) => number(n)).join(", "));
  add("samples", number(facts.num_samples, 6));
  add("started", new Date(facts.begun * 1000).toLocaleString());
  view.fill = node("div", { class: "fill" });
  const bar = node("div", { id: "progress", class: "track", role: "progressbar", "aria-label": "progress" }, view.fill);
  const counted = facts.total_batches === facts.steps_per_epoch * facts.num_epochs ? "steps" : "batches";
  const [box, values] = tiles([
    ["progress", "done"], ["left", "left"], ["elapsed", "elapsed"],
    ["epoch", `of ${number(facts.num_epochs, 6)} epochs`],
    ["step", `of ${number(facts.total_batches, 6)} ${counted}`], ["loss", "loss"], ["rate", "samples/s"],
    ...(hasAnchor() ? [["anchor", "anchor"]] : []),
    ["averagings", facts.policy === "SYNC" ? "global steps" : "averagings"],
  ]);
  view.bar = bar;
  view.values = values;
  view.headline = node("p", { id: "headline" });
  view.advice = node("p", { id: "advice" });
  view.ended = node("p", { id: "ended" });
  view.ended.hidden = true;
  view.error = node("p", { class: "error", id: "error" });
  view.error.hidden = true;
  view.machines = node("p", { id: "machines" });
  view.machines.hidden = true;
  view.events = node("ol");
  head.append(view.headline, view.advice, list, bar, box, view.ended, view.error, view.machines);
  page.append(node("div", { class: "lead", id: "lead" }), ranks(), node("div", { class: "charts", id: "charts" }),
    node("section", { id: "events" }, node("h2", {}, "Events"), view.events));
  chart("loss", "Loss", "by epoch", { across: "epoch", within: "lead", series: losses });
  chart("throughput", "Throughput", "samples/s of each rank", { low: 0, series: () => rates() });
  if (hasAnchor()) {
    chart("anchor", "Anchor", "batches between averagings", {
      low: 0, series: () => [{ name: "anchor", points: readings((t) => t.anchor), step: true }] });
  }
  chart("load", "Load", "%", { low: 0, series: load });
  chart("memory", "Memory", "MiB", { low: 0, series: memory });
}

// Lockstep and a single rank have no interval between averagings.
const hasAnchor = () => facts.policy !== "SYNC" && facts.devices.length > 1;

function ranks() {
  const box = node("div", { class: "ranks", id: "ranks" });
  facts.devices.forEach((device, rank) => {
    const name = node("span", {}, `Rank ${rank} `);
    const badge = node("span", { class: "badge gone" }, "gone");
    badge.hidden = true;
    const fill = node("div", { class: "fill" });
    const share = node("div", { class: "track share" }, fill);
    const [grid, values] = tiles([
      ["share", "share"], ["rate", "samples/s"], ["throughput", "when busy"],
      ["num_batches", "batches"], ["num_throttles", "throttles"],
      ["memory", device.startsWith("cuda") ? "memory of the GPU" : "memory of the process"],
    ]);
    const causes = node("div", { class: "track causes" });
    const listed = node("p", { class: "listed" });
    const lane = node("canvas");
    const axis = node("div", { class: "times" });
    const doing = node("p", { class: "doing" });
    const label = (words) => node("p", { class: "label" }, words);
    box.append(node("section", { class: "rank", "data-rank": rank },
      node("h3", {}, name, node("span", { class: "soft" }, device), badge),
      label("share of the samples"), share, grid,
      label("time by cause"), causes, listed, label("time by cause over the run"), lane, axis, doing));
    panels.push({ badge, fill, values, causes, listed, lane, axis, doing });
  });
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
  write(view.headline, now.headline || "");
  view.headline.hidden = !now.headline;
  write(view.advice, now.advice || "");
  view.advice.hidden = !now.advice;
  const loss = epochs.length ? last(epochs).loss : (last(ticks) || {}).loss;
  set(view.values, "loss", number(loss, 4), loss);
  set(view.values, "rate", number(speeds.reduce((a, b) => a + (b || 0), 0)));
  if (hasAnchor()) set(view.values, "anchor", String(now.anchor), now.anchor);
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
  if (tick.causes && tick.causes.length) {
    const totals = tick.causes[rank.rank];
    const whole = totals.reduce((a, b) => a + b, 0) || 1;
    const parts = ORDER.map((cause) => [cause, totals[facts.causes.indexOf(cause)]]).filter(([, spent]) => spent > 0);
    panel.causes.replaceChildren(...parts.map(([cause, spent]) => {
      const part = node("div", { class: "fill", "data-cause": cause, "data-value": spent,
        title: `${WORDS[cause]} ${seconds(spent)}` }, spent / whole >= 0.12 ? percent(spent / whole) : "");
      part.style.width = `${(100 * spent) / whole}%`;
      part.style.background = `var(--${cause})`;
      return part;
    }));
    const largest = [...parts].sort((a, b) => b[1] - a[1]).filter(([, spent]) => spent / whole >= 0.005);
    write(panel.listed, largest.map(([cause, spent]) => `${WORDS[cause]} ${percent(spent / whole)}`).join(", "));
    drawLane(panel, rank.rank);
  }
}

// The whole run, from its start at the left to now at the right.
function drawLane(panel, rank) {
  const width = panel.lane.clientWidth, height = panel.lane.clientHeight;
  const scale = window.devicePixelRatio || 1;
  const known = ticks.filter((tick) => tick.causes && tick.causes.length);
  const end = known.length ? last(known).t : 0;
  if (!width || !(end > 0)) return;
  panel.lane.width = width * scale;
  panel.lane.height = height * scale;
  const context = panel.lane.getContext("2d");
  context.scale(scale, scale);
  const colors = ORDER.map((cause) => css(`--${cause}`));
  let before = { t: 0, causes: known[0].causes.map((row) => row.map(() => 0)) }, drawnColumns = 0, busiest = null;
  for (const tick of known) {
    const left = Math.round((before.t / end) * width), right = Math.round((tick.t / end) * width);
    // Narrower columns than a pixel are joined, so that nothing is left out.
    if (right - left < 1 && tick !== last(known)) continue;
    const spent = tick.causes[rank].map((value, c) => Math.max(0, value - before.causes[rank][c]));
    before = tick;
    const whole = spent.reduce((a, b) => a + b, 0);
    if (!(whole > 0)) continue;
    let bottom = height;
    busiest = null;
    ORDER.forEach((cause, c) => {
      const part = spent[facts.causes.indexOf(cause)] / whole;
      if (!(part > 0)) return;
      if (!busiest || part > busiest[1]) busiest = [cause, part];
      context.fillStyle = colors[c];
      context.fillRect(left, bottom - part * height, right - left, part * height);
      bottom -= part * height;
    });
    drawnColumns += 1;
  }
  panel.lane.setAttribute("data-columns", drawnColumns);
  const marks = width < 240 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1];
  panel.axis.replaceChildren(...marks.map((part) => node("span", {}, seconds(part * end))));
  write(panel.doing, busiest && now.state === "running" ? `now: ${WORDS[busiest[0]]} ${percent(busiest[1])}` : "");
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
