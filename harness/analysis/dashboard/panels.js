"use strict";
// Panels of the page, and the Plotly figure of a panel for the zoomed range.

const MOST_GROUPS = 500, MOST_HEAT = 160, MOST_LINES = 150;

const PANELS = [
  { id: "loss", title: "Loss", unit: "nats per token", table: "steps", focus: true, lines: [
    { column: "loss", name: "each step", color: "pale", width: 1 },
    { column: "loss_bound", name: "gate bound: the update is rejected above it", color: "grey", width: 1.2, dash: "dot", optional: true },
    { column: "loss_smooth", name: "moving average, applied", color: "blue", width: 2 },
    { column: "loss_rejected", name: "rejected, not applied", color: "red", mode: "markers" },
    { column: "loss", name: "held out", color: "orange", table: "evals", mode: "lines+markers", width: 1 } ] },
  { id: "lr", title: "Learning rate", unit: "learning rate", table: "steps", zero: true, lines: [
    { column: "lr", name: "learning rate", color: "blue" } ] },
  { id: "grad", title: "Gradient norm", unit: "norm before clipping", table: "steps", log: true, lines: [
    { column: "grad_bound", name: "gate bound: the update is rejected above it", color: "grey", width: 1.2, dash: "dot", optional: true },
    { column: "grad_norm", name: "gradient norm", color: "blue" } ] },
  { id: "tasks", title: "Benchmarks", note: "lm-evaluation-harness, at the iterations of the checkpoints", unit: "score", table: "tasks", each: ["blue", "orange", "green", "violet", "red", "grey"] },
  { id: "activation", title: "Activations by layer", note: "the highest value of each time interval", unit: "layer", colors: "RMS of the residual stream", table: "probes", heat: "activation:" },
  { id: "moment", title: "Adam's second moment", note: "a ratio of about 1 is normal; far above 1, the second moment is stale", unit: "norm of v", rightUnit: "ratio", table: "probes", log: true, lines: [
    { column: "v_norm", name: "norm of v", color: "blue" },
    { column: "square_ratio", name: "gradient / sqrt(v), right axis", color: "orange", right: true } ] },
  { id: "weights", title: "Weights", unit: "norm", rightUnit: "ratio", table: "probes", lines: [
    { column: "param_norm", name: "weight norm", color: "blue" },
    { column: "update_ratio", name: "update norm / weight norm, right axis", color: "orange", right: true } ] },
  { id: "tokens", title: "Token losses", note: "how many tokens have a loss in each range", unit: "loss (nats)", colors: "share of the tokens", table: "probes", heat: "token_loss:" },
  { id: "rankgrad", title: "Gradient norm by rank", note: "before the reduction", unit: "norm", table: "steps", log: true, lines: [
    { column: "rank_grad_worst", name: "rank farthest from the median", color: "orange", width: 1 },
    { column: "rank_grad_median", name: "median of the ranks", color: "blue" } ], who: "rank_grad_who" },
  { id: "ranktime", title: "Busy time by rank", note: "without waiting for other ranks", unit: "seconds per step", table: "steps", zero: true, lines: [
    { column: "rank_time_worst", name: "rank farthest from the median", color: "orange", width: 1 },
    { column: "rank_time_median", name: "median of the ranks", color: "blue" } ], who: "rank_time_who" },
  { id: "scale", title: "Loss scale", note: "fp16 only", unit: "factor", table: "steps", log: true, lines: [
    { column: "loss_scale", name: "loss scale", color: "blue" } ] },
  { id: "fp8", title: "fp8 underflow and saturation", note: "the worst layer group", unit: "share of the values", table: "probes", zero: true, format: ".2~%", lines: [
    { column: "in_bf16", name: "step computed in bf16", color: "grey", table: "steps", width: 0.5, filled: true },
    { column: "fp8_saturated", name: "saturated", color: "orange", width: 1 },
    { column: "fp8_underflow", name: "underflow to zero", color: "blue", mode: "lines+markers" } ] },
  { id: "fp8scale", title: "fp8 scales", unit: "log2 of the scale", table: "probes", lines: [
    { column: "fp8_scale_least", name: "smallest", color: "orange", mode: "lines+markers" },
    { column: "fp8_scale_most", name: "largest", color: "blue", mode: "lines+markers" } ] },
  { id: "speed", title: "Throughput", unit: "tokens per second", rightUnit: "MFU", table: "steps", zero: true, format: "~s", rightFormat: ".0%", lines: [
    { column: "tokens_per_s", name: "all ranks together", color: "blue" },
    { column: "mfu", name: "MFU, right axis", color: "orange", right: true } ] },
  { id: "memory", title: "Peak memory of rank 0", note: "its device; on CPU, its process", unit: "bytes", table: "steps", zero: true, format: "~s", lines: [
    { column: "memory_bytes", name: "peak memory", color: "blue" } ] },
  { id: "loader", title: "Loader wait", note: "time for which rank 0 waits for its batch", unit: "seconds", table: "steps", zero: true, system: true, format: "~s", lines: [
    { column: "loader_wait_s", name: "wait for the batch", color: "blue" } ] },
  { id: "gpuutil", title: "GPU utilisation", unit: "share of the time", table: "system", zero: true, system: true, format: ".0%", lines: [
    { column: "gpu_utilization_least", name: "lowest GPU", color: "orange", width: 1 },
    { column: "gpu_utilization_mean", name: "mean of all GPUs", color: "blue" } ] },
  { id: "gpumemory", title: "GPU memory", note: "all processes on the GPU", unit: "bytes", table: "system", zero: true, system: true, format: "~s", lines: [
    { column: "gpu_memory_most", name: "fullest GPU", color: "orange", width: 1 },
    { column: "gpu_memory_mean", name: "mean of all GPUs", color: "blue" } ] },
  { id: "gpupower", title: "GPU power", unit: "watts", table: "system", zero: true, system: true, lines: [
    { column: "gpu_power_most", name: "highest GPU", color: "orange", width: 1 },
    { column: "gpu_power_mean", name: "mean of all GPUs", color: "blue" } ] },
  { id: "gputemperature", title: "GPU temperature", unit: "°C", table: "system", system: true, lines: [
    { column: "gpu_temperature_most", name: "hottest GPU", color: "orange", width: 1 },
    { column: "gpu_temperature_mean", name: "mean of all GPUs", color: "blue" } ] },
  { id: "hostmemory", title: "Host memory", unit: "bytes", table: "system", zero: true, system: true, format: "~s", lines: [
    { column: "host_memory_total", name: "installed", color: "grey", width: 1.2, dash: "dot" },
    { column: "host_memory_most", name: "in use, fullest machine", color: "blue" },
    { column: "process_memory_most", name: "first rank of a machine, resident", color: "orange", width: 1 } ] },
  { id: "cpuload", title: "CPU load", unit: "load average / cores", table: "system", zero: true, system: true, lines: [
    { column: "cpu_load_most", name: "highest machine", color: "orange", width: 1 },
    { column: "cpu_load_mean", name: "mean of all machines", color: "blue" } ] },
];

const MARKS = {
  start: { name: "start", color: "grey", symbol: "line-ns-open", lane: "starts" },
  restart: { name: "ranks restarted", color: "red", symbol: "line-ns-open", lane: "starts" },
  end: { name: "end", color: "grey", symbol: "square", lane: "starts" },
  checkpoint: { name: "checkpoint", color: "green", symbol: "circle", lane: "saves" },
  trouble: { name: "bad checkpoint", color: "red", symbol: "x-thin-open", lane: "saves" },
  fault: { name: "fault injected", color: "violet", symbol: "star", lane: "faults" },
  intervention: { name: "operator command", color: "orange", symbol: "diamond", lane: "operator" },
  refused: { name: "update rejected", color: "red", symbol: "triangle-up", lane: "sentinel" },
  finding: { name: "finding", color: "orange", symbol: "circle-open", lane: "sentinel" },
  action: { name: "action", color: "red", symbol: "triangle-down", lane: "sentinel" },
  restored: { name: "state restored", color: "blue", symbol: "triangle-left", lane: "sentinel" },
};
const LANES = ["starts", "saves", "faults", "operator", "sentinel", "incidents"];
const GLYPHS = { start: "|", restart: "↻", end: "■", checkpoint: "●", trouble: "✕", fault: "★", intervention: "◆", refused: "▲", finding: "○", action: "▼", restored: "◀" };
const LINED = { start: "dot", restart: "dot", fault: "dash", intervention: "dash", restored: "solid" };

const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);

// A colour of the style sheet in the current theme, with an opacity.
function ink(name, strength = 1) {
  probe.style.color = `var(--${name})`;
  const color = getComputedStyle(probe).color;
  return strength === 1 ? color : color.replace(/^rgb\((.*)\)$/, `rgba($1, ${strength})`);
}

// Plotly interprets some HTML tags in texts; tags from files are escaped.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const folded = (text) => plain(text.length > 300 ? `${text.slice(0, 300)} …` : text).replace(/(.{1,70})(\s|$)/g, "$1<br>").replace(/<br>$/, "");

const axisOf = (state, item) => (state.axis === "time" ? item.time * 1000 : item.iteration);
const xsOf = (state, table) => (state.axis === "time" ? table.milliseconds : table.iteration);

const axisTitle = (text, standoff) => ({ text, standoff, font: { size: 11.5 } });

function base(state) {
  const grid = ink("grid"), quiet = ink("quiet");
  return {
    margin: { l: 64, r: 16, t: 8, b: state.axis === "time" ? 58 : 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11.5, color: quiet },
    showlegend: false,
    hovermode: "closest",
    hoverlabel: { bgcolor: ink("card"), bordercolor: grid, font: { color: ink("ink"), size: 12 }, align: "left" },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: {
      type: state.axis === "time" ? "date" : "linear", range: [...(state.view || state.whole)], autorange: false,
      gridcolor: grid, zeroline: false, tickformat: state.axis === "time" ? undefined : ",d", nticks: 6, automargin: false,
      title: axisTitle(state.axis === "time" ? "wall clock (UTC)" : "iteration", 6),
    },
    yaxis: { gridcolor: grid, zeroline: false, fixedrange: true, automargin: false, tickmode: "auto", nticks: 5, exponentformat: "power" },
  };
}

// Incidents as shaded areas, starts, faults, interventions and restores as lines; at most the newest MOST_LINES of each.
function shapes(state) {
  const [first, last] = state.view || state.whole, inside = (x) => x >= first && x <= last;
  const shaded = state.facts.incidents.map((incident) => span(state, incident))
    .filter(([begin, end]) => end >= first && begin <= last).slice(-MOST_LINES)
    .map(([x0, x1]) => ({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, layer: "below",
      fillcolor: ink("red", 0.12), line: { width: 1, color: ink("red", 0.25) } }));
  const lines = state.facts.marks.filter((mark) => LINED[mark.kind] && inside(axisOf(state, mark))).slice(-MOST_LINES)
    .map((mark) => ({ type: "line", xref: "x", yref: "paper", x0: axisOf(state, mark), x1: axisOf(state, mark), y0: 0, y1: 1,
      line: { width: 1, dash: LINED[mark.kind], color: ink(MARKS[mark.kind].color, 0.7) } }));
  return [...shaded, ...lines];
}

// First and last x of an incident; on the time axis, the times of its iterations.
function span(state, incident) {
  if (state.axis !== "time") return [incident.onset, incident.last + 1];
  const { iteration, milliseconds } = state.tables.steps, last = iteration.length - 1;
  if (last < 0) return [incident.time * 1000, incident.time * 1000];
  const at = (x) => milliseconds[Math.min(last, Math.max(0, seek(iteration, x)))];
  return [at(incident.onset), Math.max(at(incident.last), incident.time * 1000)];
}

function marksTrace(state, place) {
  const [first, last] = state.view || state.whole;
  const marks = state.facts.marks.filter((mark) => (LINED[mark.kind] || mark.kind === "refused" || mark.kind === "action")
    && axisOf(state, mark) >= first && axisOf(state, mark) <= last).slice(-MOST_LINES);
  return {
    type: "scatter", mode: "markers", x: marks.map((mark) => axisOf(state, mark)), y: marks.map(place), yaxis: "y3",
    marker: { symbol: marks.map((mark) => MARKS[mark.kind].symbol), size: 8, color: marks.map((mark) => ink(MARKS[mark.kind].color)) },
    text: marks.map((mark) => folded(mark.text)), hovertemplate: "%{text}<extra></extra>", cliponaxis: false,
    customdata: marks.map((mark) => mark.incident || 0),
  };
}

// Range of the y axis; the view of a whole run ignores the first tenth, where the loss falls steeply.
function rangeOf(state, panel, traces) {
  let values = [];
  for (const trace of traces) {
    if (trace.optional) continue;
    const skipped = panel.focus && !state.view ? Math.floor(trace.y.length / 10) : 0;
    values = values.concat(trace.y.slice(skipped).filter((y) => y !== null && y === y));
  }
  if (!values.length) return { log: false, range: [0, 1] };
  let least = Infinity, greatest = -Infinity;
  for (const value of values) { if (value < least) least = value; if (value > greatest) greatest = value; }
  if (panel.log && least > 0 && greatest > 30 * least)
    return { log: true, range: [Math.log10(least) - 0.1, Math.log10(greatest) + 0.1] };
  if (panel.zero) least = Math.min(0, least);
  const room = Math.max((greatest - least) * 0.08, Math.abs(greatest) * 0.02, 1e-12);
  return { log: false, range: [panel.zero && least === 0 ? 0 : least - room, greatest + room] };
}

// An axis with that range; a logarithmic one has a tick at each decade, or at 1, 2 and 5 if it spans few decades.
// Plotly labels its own ticks between decades with the first digit alone, so these are given as values.
function scaled({ log, range }) {
  if (!log) return { type: "linear", range, tickmode: "auto" };
  const [first, last] = range, decades = last - first;
  if (decades >= 2) return { type: "log", range, tickmode: "linear", dtick: Math.ceil(decades / 4) };
  const powers = Array.from({ length: Math.ceil(last) - Math.floor(first) }, (_, i) => Math.floor(first) + i);
  return { type: "log", range, tickmode: "array", tickvals: powers.flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`))) };
}

// Whether any value of a line is in the range of its axis.
const isInRange = (trace, { log, range }) => trace.y.some((y) => {
  const place = log ? Math.log10(y) : y;
  return y !== null && place >= range[0] && place <= range[1];
});

// The lines of a panel; one with `each` has a line for every column of its table, in these colours.
const linesOf = (state, panel) => panel.each
  ? Object.keys(state.tables[panel.table].columns).map((column, i) => ({ column, name: plain(column), color: panel.each[i % panel.each.length], mode: "lines+markers" }))
  : panel.lines;

function lineFigure(state, panel) {
  const layout = base(state), traces = [];
  for (const line of linesOf(state, panel)) {
    const table = state.tables[line.table || panel.table], column = table.columns[line.column];
    if (!column) continue;
    const { x, y } = thinned(xsOf(state, table), column, state.view, MOST_GROUPS);
    traces.push({
      type: "scatter", mode: line.mode || (x.length === 1 ? "markers" : "lines"), x, y, name: line.name, optional: line.optional,
      yaxis: line.right ? "y2" : "y", line: { color: ink(line.color), width: line.width || 1.4, dash: line.dash, simplify: false },
      fill: line.filled ? "tozeroy" : "none", fillcolor: ink(line.color, 0.25), marker: { size: 5, color: ink(line.color) }, hovertemplate: `%{x}: %{y:.5~g}<extra>${line.name}</extra>`,
    });
  }
  const left = rangeOf(state, panel, traces.filter((trace) => trace.yaxis === "y"));
  Object.assign(layout.yaxis, scaled(left), { tickformat: panel.format, title: axisTitle(panel.unit, 8) });
  if (traces.some((trace) => trace.yaxis === "y2")) {
    const right = rangeOf(state, panel, traces.filter((trace) => trace.yaxis === "y2"));
    layout.yaxis2 = { ...layout.yaxis, dtick: undefined, ...scaled(right), side: "right", showgrid: false, tickfont: { color: ink("orange") }, tickformat: panel.rightFormat,
      title: { ...axisTitle(panel.rightUnit, 8), font: { size: 11.5, color: ink("orange") } } };
    layout.yaxis.overlaying = "y2";
    layout.margin.r = 64;
  }
  layout.yaxis3 = { overlaying: layout.yaxis2 ? "y2" : "y", range: [0, 1], visible: false, fixedrange: true };
  layout.shapes = shapes(state);
  const unseen = traces.filter((trace) => trace.optional && !isInRange(trace, left)).map((trace) => trace.name);
  traces.push(marksTrace(state, (mark) => (mark.kind === "refused" ? 0.02 : 0.98)));
  return { traces, layout, unseen };
}

function heatFigure(state, panel) {
  const table = state.tables[panel.table], layout = base(state);
  const names = Object.keys(table.columns).filter((name) => name.startsWith(panel.heat));
  const { x, z } = heat(table, xsOf(state, table), names, state.view, MOST_HEAT);
  const labels = panel.heat === "token_loss:" ? bands(state.facts.edges, names.length) : names.map((name) => name.slice(panel.heat.length));
  layout.yaxis = { ...layout.yaxis, type: "category", nticks: 8, gridcolor: "rgba(0,0,0,0)", title: axisTitle(panel.unit, 6) };
  layout.margin.l = Math.min(126, 40 + 6.4 * Math.max(...labels.map((label) => label.length), 1));
  layout.shapes = shapes(state).map((shape) => ({ ...shape, layer: "above" }));
  const trace = {
    type: "heatmap", x, y: labels, z, hovertemplate: "%{x}, %{y}: %{z:.4~g}<extra></extra>", zsmooth: false,
    colorscale: [[0, ink("card")], [0.5, ink("pale")], [1, ink("blue")]],
    colorbar: { thickness: 8, outlinewidth: 0, len: 1, tickfont: { size: 10 }, nticks: 4,
      title: { text: panel.colors, side: "right", font: { size: 11 } } },
  };
  layout.margin.r = 72;
  return { traces: [trace], layout };
}

const bands = (edges, count) => Array.from({ length: count }, (_, i) =>
  i === 0 ? `below ${edges[0]}` : i < edges.length ? `${edges[i - 1]} to ${edges[i]}` : `${edges[edges.length - 1]} or more`);

function hasData(state, panel) {
  const names = Object.keys(state.tables[panel.table].columns);
  if (panel.heat) return names.some((name) => name.startsWith(panel.heat));
  return linesOf(state, panel).some((line) => line.column in state.tables[line.table || panel.table].columns);
}

function stripFigure(state) {
  const layout = base(state), traces = [];
  for (const [kind, look] of Object.entries(MARKS)) {
    const marks = state.facts.marks.filter((mark) => mark.kind === kind);
    traces.push({
      type: "scatter", mode: "markers", name: look.name, x: marks.map((mark) => axisOf(state, mark)), y: marks.map(() => look.lane),
      marker: { symbol: look.symbol, size: kind === "checkpoint" ? 6 : 9, color: ink(look.color), line: { width: 1.5, color: ink(look.color) } },
      text: marks.map((mark) => `iteration ${mark.iteration.toLocaleString("en")}: ${folded(mark.text)}`),
      hovertemplate: "%{text}<extra></extra>", customdata: marks.map((mark) => mark.incident || 0),
    });
  }
  for (const incident of state.facts.incidents) {
    const [first, last] = span(state, incident), middle = (first + last) / 2;
    traces.push({
      type: "scatter", mode: "lines+markers", name: "incident", x: [first, middle, last], y: Array(3).fill("incidents"),
      line: { width: 9, color: ink("red", 0.55) }, marker: { size: [1, 13, 1], symbol: "circle", color: ink("red") },
      text: Array(3).fill(`incident ${incident.number}: ${plain(incident.kinds.join(", "))}<br>click for details`),
      hovertemplate: "%{text}<extra></extra>", customdata: Array(3).fill(incident.number),
    });
  }
  layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: LANES, range: [-0.6, LANES.length - 0.4],
    tickmode: "array", tickvals: LANES };
  layout.margin = { ...layout.margin, l: 72, t: 4 };
  return { traces, layout };
}
