"use strict";
// The page: tiles, tables and dialogs around the panels, event handlers, and polling of a live server.

const POLL_MS = 2000;
const GROWING = ["steps", "probes", "evals", "tasks"];
const data = JSON.parse(element("data").textContent);
const state = { axis: "iteration", view: null, whole: [0, 1], facts: data.facts, tables: {} };

function prepare() {
  for (const table of Object.values(state.tables)) table.milliseconds = table.time.map((seconds) => seconds * 1000);
  const { steps } = state.tables;
  addLosses(steps);
  const xs = xsOf(state, steps), others = state.facts.marks.map((mark) => axisOf(state, mark));
  let first = xs.length ? xs[0] : Infinity, last = xs.length ? xs[xs.length - 1] : -Infinity;
  for (const x of others) { first = Math.min(first, x); last = Math.max(last, x); }
  if (!(first < last)) [first, last] = Number.isFinite(first) ? [first - 1, first + 1] : [0, 1];
  state.whole = [first - (last - first) / 80, last + (last - first) / 80];
}

// --- around the panels

function tile(label, value, more, extra) {
  const node = make("div", { class: "tile" }, make("div", { class: "label" }, label));
  node.append(value instanceof Node ? value : make("div", { class: "value" }, value));
  if (more) node.append(make("div", { class: "more" }, more));
  if (extra) node.append(extra);
  return node;
}

function showHead() {
  const { run, goodput } = state.facts;
  element("line").replaceChildren(
    [`started ${clock(run.started)}`, run.world_size === 1 ? "1 rank" : `${run.world_size} ranks`, run.num_starts > 1 ? `${run.num_starts} starts` : "", run.reason, run.unread].filter(Boolean).join(" · "));
  const share = run.num_steps ? Math.min(1, run.step / run.num_steps) : 0;
  const bar = make("div", { class: "bar" }, make("i", { style: { width: `${100 * share}%` } }));
  const money = run.cost === null ? "" : ` · cost ${number(run.cost)}`;
  element("tiles").replaceChildren(
    tile("state", make("div", { class: `value state-${run.state}` }, run.state), run.state_more),
    tile("step", `${number(run.step)} of ${number(run.num_steps)}`, `${metric(run.tokens)} tokens`, bar),
    tile("loss", run.loss, run.eval_loss === null ? "" : `held out ${run.eval_loss}`),
    tile("throughput", `${metric(run.tokens_per_s)} tokens/s`, run.mfu === null ? "" : `${percent(run.mfu)} MFU`),
    tile("goodput", percent(goodput.of_time), `${percent(goodput.of_tokens)} of the tokens kept`),
    tile("time lost to recovery", percent(goodput.lost), goodput.lost_more),
    tile("incidents", number(state.facts.incidents.length), state.facts.incidents_more),
    tile(run.eta_s === null ? "wall time" : "ETA", duration(run.eta_s === null ? goodput.wall_s : run.eta_s), (run.eta_s === null ? "" : `so far ${duration(goodput.wall_s)}`) + money),
  );
}

function showIncidents() {
  const cards = state.facts.incidents.map((incident) => make("button",
    { class: "card", type: "button", "data-incident": incident.number, onclick: () => openDrawer(incident.number) },
    make("span", { class: incident.verdict === "open" ? "number" : "number closed" }, `#${incident.number}`),
    make("span", { class: "what" }, `${incident.kinds.join(", ") || "no finding"} at iteration ${number(incident.onset)}: ${incident.answer}`),
    make("span", { class: "cost" }, `loss ${incident.losses} · ${incident.cost_steps} · ${incident.verdict}`)));
  element("incident-list").replaceChildren(cards.length ? make("div", { class: "cards" }, ...cards) : make("p", { class: "none" }, "None."));
}

const SHARES = { kept: "blue", refused: "red", undone: "orange", restoring: "violet", trying: "teal", saving: "green", evaluating: "pale", starting: "grey", paused: "quiet", stopped: "ink" };

const CAUSE_COLORS = {
  "killed rank": "red", "hung rank": "orange", "error in a rank": "violet", "out of memory": "brown", "lost launcher": "ink", "lost node": "quiet", "storage": "teal",
  "unknown failure": "grey", "stop and resume": "pale", "rewind or rollback": "violet", "trials of remedies": "teal", "rejected updates": "red", "first start": "grey", "checkpoints": "green",
  "evaluation": "pale", "pause": "quiet",
};

// A bar of shares; every item has a name, a share and a color.
function shareBar(items) {
  const shown = items.filter((item) => item.share > 0);
  return make("div", { class: "shares", role: "img", "aria-label": shown.map((item) => `${item.name} ${percent(item.share)}`).join(", ") },
    ...shown.map((item) => make("i", { title: `${item.name}: ${percent(item.share)}`, style: { flex: `${item.share} 0 0`, background: `var(--${item.color})` } })));
}

// The time outside kept steps by cause; shares and bar are of the wall time.
function lostByCause({ causes, lost_s: lost }) {
  if (!causes.length) return [];
  const color = (item) => CAUSE_COLORS[item.cause] || "grey";
  const head = make("tr", {}, make("th", {}, "cause"), ...["time", "share", "times", "steps"].map((text) => make("th", { class: "n" }, text)), make("th", { class: "meaning" }, "meaning"));
  const body = causes.map((item) => make("tr", {},
    make("td", {}, make("i", { class: "dot", style: { background: `var(--${color(item)})` } }), item.cause),
    make("td", { class: "n" }, duration(item.seconds)), make("td", { class: "n" }, percent(item.share)), make("td", { class: "n" }, number(item.times)),
    make("td", { class: "n" }, item.steps ? number(item.steps) : ""), make("td", { class: "quiet meaning" }, item.meaning)));
  return [make("h3", { class: "causes-title" }, `Lost time by cause: ${duration(lost)}`),
    shareBar(causes.map((item) => ({ name: item.cause, share: item.share, color: color(item) }))),
    make("div", { class: "wide" }, make("table", { id: "causes" }, make("thead", {}, head), make("tbody", {}, ...body)))];
}

function showGoodput() {
  const { goodput } = state.facts;
  const bar = shareBar(goodput.accounts.map((item) => ({ name: item.label, share: item.share, color: SHARES[item.account] })));
  const body = goodput.accounts.map((item) => make("tr", {},
    make("td", {}, make("i", { class: "dot", style: { background: `var(--${SHARES[item.account]})` } }), item.label),
    make("td", { class: "n" }, duration(item.seconds)), make("td", { class: "n" }, percent(item.share)),
    make("td", { class: "n" }, item.steps === null ? "" : number(item.steps)), make("td", { class: "quiet meaning" }, item.meaning)));
  const head = make("tr", {}, make("th", {}, "where the time went"), make("th", { class: "n" }, "time"), make("th", { class: "n" }, "share"),
    make("th", { class: "n" }, "steps"), make("th", { class: "meaning" }, "meaning"));
  element("goodput").replaceChildren(
    make("p", { class: "sums" }, ...goodput.sums.map(([value, text]) => make("span", {}, make("b", {}, percent(value)), ` ${text}`))),
    bar, make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))), ...lostByCause(goodput), make("p", { class: "quiet" }, goodput.note));
}

function showGuilty() {
  const { guilty } = state.facts;
  element("guilty").hidden = !guilty.length;
  const head = make("tr", {}, ...["batch", "iteration", "loss"].map((text) => make("th", { class: "n" }, text)),
    ...["why", "token (in the batch, in the corpus)", "rows by source"].map((text) => make("th", {}, text)));
  const body = guilty.map((batch) => make("tr", {}, make("td", { class: "n" }, number(batch.cursor)), make("td", { class: "n" }, number(batch.iteration)),
    make("td", { class: "n" }, batch.loss), make("td", {}, batch.why), make("td", {}, batch.rarest), make("td", {}, batch.rows)));
  element("guilty-list").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

function showLog() {
  const rows = state.facts.marks.slice(-400).reverse().map((mark) => make("div", {},
    make("span", { class: "quiet", title: clock(mark.time) }, number(mark.iteration)),
    make("span", { style: { color: `var(--${MARKS[mark.kind].color})` } }, MARKS[mark.kind].name), make("span", {}, mark.text)));
  element("log").replaceChildren(...(rows.length ? rows : [make("p", { class: "none" }, "Nothing yet.")]));
}

// The marks on the timeline; in the panels they are vertical lines, triangles and shaded areas.
function showKey() {
  const present = new Set(state.facts.marks.map((mark) => mark.kind)), inPanels = new Set([...Object.keys(LINED), "refused", "action"]);
  const entry = ([kind, look]) => make("li", {}, make("b", { style: { color: `var(--${look.color})` } }, GLYPHS[kind]), look.name);
  const entries = Object.entries(MARKS).filter(([kind]) => present.has(kind));
  element("key").replaceChildren(...entries.map(entry));
  const shaded = state.facts.incidents.length ? [make("li", {}, make("b", { class: "shade" }), "incident")] : [];
  element("panel-key").replaceChildren(...shaded, ...entries.filter(([kind]) => inPanels.has(kind)).map(entry));
}

// --- what the run is

function showSetup() {
  const { groups, starts, config } = data.setup;
  element("setup-groups").replaceChildren(...groups.map(([title, rows]) => make("div", { class: "group" }, make("h3", {}, title), facts(rows))));
  if (starts.length) element("setup-groups").append(make("div", { class: "group" }, make("h3", {}, "Starts"),
    table(["time", "commit", "ranks", "machine of rank 0"], starts.map(([time, ...rest]) => [time ? clock(time) : "", ...rest]))));
  element("setup").hidden = !groups.length;
  element("config").hidden = !config.length;
  element("config-list").replaceChildren(...config.map(([section, rows]) => {
    const changed = rows.filter((row) => row[2] !== null).length;
    const body = rows.map(([key, value, normal]) => make("tr", normal === null ? { "data-key": key } : { "data-key": key, class: "changed" },
      make("td", {}, key), make("td", {}, value), make("td", { class: "quiet" }, normal === null ? "" : `default: ${normal}`)));
    return make("details", changed ? { open: "" } : {},
      make("summary", {}, section, make("span", { class: "quiet" }, ` ${rows.length} keys${changed ? `, ${changed} changed` : ""}`)),
      make("div", { class: "wide" }, make("table", { class: "config" }, make("tbody", {}, ...body))));
  }));
  filterConfig();
}

// Shows the keys whose name or value contains the text; without a text, or with the box ticked, only the changed ones.
function filterConfig() {
  const wanted = element("config-search").value.trim().toLowerCase(), changedOnly = element("config-changed").checked && !wanted;
  let count = 0;
  for (const section of element("config-list").children) {
    let shown = 0;
    for (const row of section.querySelectorAll("tbody tr")) {
      row.hidden = changedOnly ? !row.classList.contains("changed") : !row.textContent.toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    section.hidden = shown === 0;
    if (wanted || changedOnly) section.open = shown > 0;
    count += shown;
  }
  element("config-count").textContent = `${count} ${count === 1 ? "key" : "keys"}`;
}

// --- the dialog of one incident

function openDrawer(wanted) {
  const incident = state.facts.incidents.find((item) => item.number === wanted);
  if (!incident) return;
  element("drawer-title").textContent = `Incident ${incident.number}: ${incident.kinds.join(", ") || "no finding"}`;
  const body = element("drawer-body"), list = (items) => items.join(", ");
  body.replaceChildren(facts([
    ["began", `iteration ${number(incident.onset)}, ${clock(incident.time)}`], ["until", `iteration ${number(incident.last)}`],
    ["outcome", incident.verdict + (incident.spike_type ? `, type ${incident.spike_type}` : "")], ["ranks", list(incident.ranks)], ["layers", list(incident.groups)],
    ["batches", list(incident.cursors)], ["loss", incident.losses], ["recovery loss", incident.recovery], ["resumed", incident.resumed], ["cost", incident.cost],
  ]), make("p", { class: "after" }, make("button", { class: "tool", type: "button", onclick: () => zoomTo(incident) }, "show in the panels")));
  if (incident.findings.length) body.append(make("h3", {}, "Findings"), table(["iteration", "finding"], incident.findings));
  if (incident.actions.length) body.append(make("h3", {}, "Actions"), table(["iteration", "action", "why", "result"], incident.actions));
  if (incident.links.length) body.append(make("h3", {}, "Evidence"), make("p", {}, ...incident.links.flatMap(([name, href]) => [make("a", { href }, name), " "])));
  // The post-mortem is HTML rendered from Markdown, with every tag of the text escaped.
  const report = make("div", { class: "postmortem" });
  if (incident.postmortem) report.innerHTML = incident.postmortem; else report.append(make("p", { class: "none" }, "No post-mortem yet."));
  body.append(report);
  if (!element("drawer").open) element("drawer").showModal();
  element("drawer").scrollTop = 0;
  history.replaceState(null, "", `#incident-${incident.number}`);
}

function zoomTo(incident) {
  const [first, last] = span(state, incident), margin = Math.max((last - first) * 2, (state.whole[1] - state.whole[0]) / 500);
  element("drawer").close();
  look([first - margin, last + margin]);
  element("panels-title").scrollIntoView();
}

// --- drawing: visible figures first, one per animation frame

const stale = new Set(), seen = new Set();
let drawing = false;

function figureOf(id) {
  if (id === "strip") return stripFigure(state);
  const panel = PANELS.find((item) => item.id === id);
  return panel.heat ? heatFigure(state, panel) : lineFigure(state, panel);
}

function draw(id) {
  const place = element(id === "strip" ? "strip" : `draw-${id}`);
  const isNew = !place.classList.contains("js-plotly-plot"), { traces, layout, unseen } = figureOf(id);
  if (paper.isPrinting) Object.assign(layout, { width: place.clientWidth, height: place.clientHeight });
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
  if (unseen) for (const entry of place.previousSibling.children) entry.hidden = unseen.includes(entry.dataset.name);
  if (isNew) {
    place.on("plotly_relayout", (change) => {
      const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined && [change["xaxis.range[0]"], change["xaxis.range[1]"]]);
      if (range) look(range.map((x) => (typeof x === "string" ? Date.parse(`${x.replace(" ", "T")}Z`) : x)));
    });
    place.on("plotly_doubleclick", () => look(null));
    place.on("plotly_click", ({ points }) => points[0].customdata && openDrawer(points[0].customdata));
  }
}

function drawNext() {
  const next = [...stale].find((id) => seen.has(id)) || [...stale][0];
  if (next === undefined) {
    drawing = false;
    document.body.dataset.drawn = String(Math.round(performance.now()));
    return;
  }
  stale.delete(next);
  draw(next);
  (seen.has(next) ? requestAnimationFrame : setTimeout)(drawNext);
}

function drawAll() {
  delete document.body.dataset.drawn;
  for (const id of figureIds()) stale.add(id);
  if (!drawing) { drawing = true; requestAnimationFrame(drawNext); }
}

const figureIds = () => ["strip", ...PANELS.map((panel) => panel.id).filter((id) => element(`draw-${id}`))];

function look(view) {
  state.view = view;
  element("whole").hidden = !view;
  drawAll();
}

// What each line of a panel is. Drawing hides the entries of lines that are outside the range; a heat map has a labelled colour bar instead.
function legend(panel) {
  const present = (panel.heat ? [] : linesOf(state, panel)).filter((line) => line.column in state.tables[line.table || panel.table].columns);
  const swatch = (line) => (line.mode === "markers" ? make("b", { style: { color: `var(--${line.color})` } }, "●")
    : make("b", { class: "line", style: { borderTop: `${line.filled ? 8 : 2}px ${line.dash === "dot" ? "dotted" : "solid"} var(--${line.color})` } }));
  return make("ul", { class: "key legend" }, ...present.map((line) => make("li", { "data-name": line.name }, swatch(line), line.name)));
}

function layPanels() {
  const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) =>
    (isIntersecting ? seen.add(target.dataset.id) : seen.delete(target.dataset.id))));
  for (const panel of PANELS) {
    if (element(`draw-${panel.id}`) || !hasData(state, panel)) continue;
    const drawn = make("div", { class: "draw", id: `draw-${panel.id}`, "data-id": panel.id });
    const note = [panel.note, panel.who && state.facts.who[panel.who], panel.table === "system" && state.facts.machines].filter(Boolean).join("; ");
    const parts = [make("h3", {}, panel.title), ...(note ? [make("p", { class: "quiet" }, note)] : []), legend(panel), drawn];
    element(panel.system ? "system-panels" : "panels").append(make("figure", { class: "panel", style: { margin: "0" } }, ...parts));
    watcher.observe(drawn);
  }
  element("system").hidden = !element("system-panels").children.length;
  element("strip").dataset.id = "strip";
  seen.add("strip");
}

function showAll() {
  prepare();
  showHead(); showKey(); showIncidents(); showGoodput(); showGuilty(); showLog(); layPanels();
  drawAll();
}

async function poll() {
  const { steps, probes, evals, tasks } = state.tables;
  try {
    const answer = await fetch(`data.json?steps=${steps.total}&probes=${probes.total}&evals=${evals.total}&tasks=${tasks.total}&seen=${state.facts.revision}&load=${state.facts.load}`);
    if (answer.status === 200) {
      const update = await answer.json();
      if (update.facts.log !== state.facts.log) return location.reload();  // its rows do not continue these tables
      for (const name of GROWING) state.tables[name] = append(state.tables[name], unpack(update[name]));
      if (update.system) state.tables.system = unpack(update.system);
      state.facts = update.facts;
      showAll();
    }
  } catch { /* the server does not answer; keep the page and poll again */ }
  setTimeout(poll, POLL_MS);
}

function start() {
  for (const name of [...GROWING, "system"]) state.tables[name] = unpack(data[name]);
  element("axis").onchange = (event) => { state.axis = event.target.value; state.view = null; element("whole").hidden = true; prepare(); drawAll(); };
  element("whole").onclick = () => look(null);
  onTheme(drawAll);
  element("close").onclick = () => element("drawer").close();
  element("drawer").addEventListener("close", () => history.replaceState(null, "", " "));
  element("drawer").addEventListener("click", (event) => event.target === element("drawer") && element("drawer").close());
  element("config-search").oninput = filterConfig;
  element("config-changed").onchange = filterConfig;
  onPrint(() => { stale.clear(); figureIds().forEach(draw); }, drawAll);
  showAll();
  showSetup();
  const wanted = /^#incident-(\d+)$/.exec(location.hash);
  if (wanted) openDrawer(Number(wanted[1]));
  if (data.live) setTimeout(poll, POLL_MS);
}

start();
