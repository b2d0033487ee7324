"use strict";
// The comparison of runs: curves of the same metric over each other, final numbers and configuration side by side.

const COMPARED = [
  { id: "loss", title: "Loss", note: "moving average of the applied steps; thin: each step", unit: "nats per token", table: "steps", column: "loss_smooth", thin: "loss", focus: true },
  { id: "heldout", title: "Held-out loss", unit: "nats per token", table: "evals", column: "loss", mode: "lines+markers" },
  { id: "grad", title: "Gradient norm", unit: "norm before clipping", table: "steps", column: "grad_norm", log: true },
  { id: "lr", title: "Learning rate", unit: "learning rate", table: "steps", column: "lr", zero: true },
  { id: "weights", title: "Weight norm", unit: "norm", table: "probes", column: "param_norm" },
  { id: "update", title: "Update norm / weight norm", unit: "ratio", table: "probes", column: "update_ratio" },
  { id: "scale", title: "Loss scale", unit: "factor", table: "steps", column: "loss_scale", log: true },
  { id: "speed", title: "Throughput", unit: "tokens per second", table: "steps", column: "tokens_per_s", zero: true, format: "~s" },
  { id: "mfu", title: "MFU", unit: "share of the peak FLOP/s", table: "steps", column: "mfu", zero: true, format: ".0%" },
  { id: "memory", title: "Peak memory of rank 0", unit: "bytes", table: "steps", column: "memory_bytes", zero: true, format: "~s" },
  { id: "loader", title: "Loader wait", unit: "seconds", table: "steps", column: "loader_wait_s", zero: true, format: "~s" },
  { id: "gpuutil", title: "GPU utilisation", note: "mean of all GPUs", unit: "share of the time", table: "system", column: "gpu_utilization_mean", zero: true, format: ".0%" },
  { id: "gpumemory", title: "GPU memory", note: "fullest GPU", unit: "bytes", table: "system", column: "gpu_memory_most", zero: true, format: "~s" },
  { id: "gpupower", title: "GPU power", note: "mean of all GPUs", unit: "watts", table: "system", column: "gpu_power_mean", zero: true },
  { id: "gputemperature", title: "GPU temperature", note: "hottest GPU", unit: "°C", table: "system", column: "gpu_temperature_most" },
  { id: "hostmemory", title: "Host memory in use", note: "fullest machine", unit: "bytes", table: "system", column: "host_memory_most", zero: true, format: "~s" },
  { id: "cpuload", title: "CPU load", note: "mean of all machines", unit: "load average / cores", table: "system", column: "cpu_load_mean", zero: true },
];
const COLORS = ["blue", "orange", "green", "violet", "red", "teal", "brown", "grey"], DASHES = ["solid", "dash", "dot"];
const BORDERS = { solid: "solid", dash: "dashed", dot: "dotted" };
const MOST_IN_A_LEGEND = 8;
const AXES = { iteration: "iteration", tokens: "tokens", hours: "hours since the start" };

const data = JSON.parse(element("data").textContent);
const state = { axis: "iteration", view: null };
const runs = data.runs.map((run, index) => ({ ...run, shown: true, color: COLORS[index % COLORS.length],
  dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length],
  tables: Object.fromEntries(Object.entries(run.tables).map(([name, packed]) => [name, unpack(packed)])) }));
for (const { tables } of runs) addLosses(tables.steps);

// The x values of a table's rows; tokens are those of the step at or after the row.
function placesOf(run, table) {
  if (state.axis === "hours") return table.time.map((seconds) => (seconds - run.started) / 3600);
  if (state.axis === "iteration") return table.iteration;
  const { steps } = run.tables, tokens = steps.columns.tokens;
  if (!tokens) return table.iteration.map(() => NaN);
  if (table === steps) return Float64Array.from(tokens.high);
  return table.iteration.map((iteration) => tokens.high[Math.min(steps.length - 1, seek(steps.iteration, iteration))]);
}

function traceOf(run, panel, name, isThin) {
  const table = run.tables[panel.table], column = table.columns[name];
  if (!column) return [];
  const { x, y } = thinned(placesOf(run, table), column, null, MOST_GROUPS);
  return [{ type: "scatter", mode: panel.mode || (x.length === 1 ? "markers" : "lines"), x, y, name: run.name, yaxis: "y", optional: isThin,
    line: { color: ink(run.color, isThin ? 0.3 : 1), width: isThin ? 0.8 : 1.6, dash: run.dash }, marker: { size: 5 },
    hovertemplate: `%{x}: %{y:.5~g}<extra>${plain(run.name)}</extra>`, hoverinfo: isThin ? "skip" : undefined }];
}

function compareFigure(panel) {
  const shown = runs.filter((run) => run.shown), traces = [];
  for (const run of shown) if (panel.thin) traces.push(...traceOf(run, panel, panel.thin, true));
  for (const run of shown) traces.push(...traceOf(run, panel, panel.column, false));
  const layout = base({ axis: "iteration", view: state.view, whole: [0, 1] });
  Object.assign(layout.xaxis, { autorange: !state.view, range: state.view || undefined, tickformat: { tokens: "~s", iteration: ",d" }[state.axis],
    title: axisTitle(AXES[state.axis], 6) });
  Object.assign(layout.yaxis, scaled(rangeOf({ view: null }, panel, traces)), { tickformat: panel.format, title: axisTitle(panel.unit, 8) });
  return { traces, layout };
}

const present = (panel) => runs.some((run) => panel.column in run.tables[panel.table].columns);

const lineOf = (run) => make("b", { class: "line", style: { borderTop: `3px ${BORDERS[run.dash]} var(--${run.color})` } });

// The runs of a panel; the list at the top of the page names them too, and stays in view.
function legendOf(panel) {
  const drawn = runs.filter((run) => run.shown && panel.column in run.tables[panel.table].columns);
  return drawn.length > MOST_IN_A_LEGEND ? [make("li", {}, `${drawn.length} runs`)] : drawn.map((run) => make("li", {}, lineOf(run), run.name));
}

function drawPanel(panel) {
  element(`legend-${panel.id}`).replaceChildren(...legendOf(panel));
  const place = element(`draw-${panel.id}`), isNew = !place.classList.contains("js-plotly-plot"), { traces, layout } = compareFigure(panel);
  if (paper.isPrinting) Object.assign(layout, { width: place.clientWidth, height: place.clientHeight });
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
  if (isNew) {
    place.on("plotly_relayout", (change) => { if (change["xaxis.range[0]"] !== undefined) look([change["xaxis.range[0]"], change["xaxis.range[1]"]]); });
    place.on("plotly_doubleclick", () => look(null));
  }
}

let pending = [];
function drawNext() {
  const panel = pending.shift();
  if (!panel) { document.body.dataset.drawn = "1"; return; }
  drawPanel(panel);
  requestAnimationFrame(drawNext);
}

function drawAll() {
  const isIdle = !pending.length;
  delete document.body.dataset.drawn;
  pending = COMPARED.filter(present);
  if (isIdle) requestAnimationFrame(drawNext);
}

function look(view) {
  state.view = view;
  element("whole").hidden = !view;
  drawAll();
}

// Which runs are shown is part of the address, so that a link to some of them can be kept.
function chooseRuns() {
  const wanted = new URLSearchParams(location.hash.slice(1)).getAll("run");
  if (wanted.length) for (const run of runs) run.shown = wanted.includes(run.path) || wanted.includes(run.name);
  if (!runs.some((run) => run.shown)) for (const run of runs) run.shown = true;
}

function showRuns() {
  element("runs").replaceChildren(...runs.map((run) => {
    const box = make("input", { type: "checkbox" });
    box.checked = run.shown;
    box.onchange = () => {
      run.shown = box.checked;
      const query = new URLSearchParams(runs.filter((other) => other.shown).map((other) => ["run", other.path]));
      history.replaceState(null, "", runs.every((other) => other.shown) ? " " : `#${query}`);
      showTables();
      drawAll();
    };
    return make("li", {}, make("label", {}, box, " ", lineOf(run), " ", run.name), ...(run.href ? [" ", make("a", { href: run.href }, "page")] : []),
      make("span", { class: `quiet state-${run.state}` }, ` ${run.state}`));
  }));
}

function showTables() {
  const indices = runs.flatMap((run, index) => (run.shown ? [index] : []));
  const head = (first) => make("tr", {}, make("th", {}, first), ...indices.map((index) => make("th", { class: "n" }, lineOf(runs[index]), ` ${runs[index].name}`)));
  const grid = (title, rows) => make("table", { class: "compare" }, make("thead", {}, head(title)), make("tbody", {}, ...rows));
  element("numbers").replaceChildren(grid("", data.numbers.map((row) => {
    const values = indices.map((index) => row.numbers && row.numbers[index]).filter((value) => value !== null && value !== undefined);
    const best = row.better && new Set(values).size > 1 ? (row.better === "lower" ? Math.min(...values) : Math.max(...values)) : null;
    return make("tr", {}, make("td", {}, row.label), ...indices.map((index) => make("td",
      { class: best !== null && row.numbers[index] === best ? "n best" : "n" }, row.texts[index])));
  })));
  const rows = data.differences.filter((row) => new Set(indices.map((index) => row.values[index])).size > 1);
  element("differences").replaceChildren(rows.length ? grid("key", rows.map((row) => make("tr", {}, make("td", {}, row.key),
    ...indices.map((index) => make("td", { class: "n" }, row.values[index]))))) : make("p", { class: "none" }, "None: these runs have the same configuration."));
}

function start() {
  element("line").textContent = `${runs.length} runs`;
  for (const panel of COMPARED.filter(present)) {
    const note = panel.note ? [make("p", { class: "quiet" }, panel.note)] : [];
    element("panels").append(make("figure", { class: "panel", style: { margin: "0" } }, make("h3", {}, panel.title), ...note,
      make("ul", { class: "key", id: `legend-${panel.id}` }), make("div", { class: "draw", id: `draw-${panel.id}` })));
  }
  element("axis").onchange = (event) => { state.axis = event.target.value; look(null); };
  element("whole").onclick = () => look(null);
  onTheme(drawAll);
  onPrint(() => { pending = []; COMPARED.filter(present).forEach(drawPanel); }, drawAll);
  addEventListener("hashchange", () => { chooseRuns(); showRuns(); showTables(); drawAll(); });
  chooseRuns();
  showRuns();
  showTables();
  drawAll();
}

start();
