"use strict";
// The page: tiles, tables and dialogs around the panels, event handlers, and polling of a live server.

const POLL_MS = 2000;
const element = (id) => document.getElementById(id);

// An element with attributes and children; strings become text nodes, never HTML.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const number = (value) => Number(value).toLocaleString("en", { maximumFractionDigits: 0 });
const percent = (share) => `${share === 0 || share === 1 ? 100 * share : (100 * share).toFixed(share < 0.1 || share > 0.99 ? 2 : 1)} %`;
const metric = (value) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  const days = Math.floor(whole / 86400), rest = `${Math.floor((whole % 86400) / 3600)}:${pad(Math.floor((whole % 3600) / 60))}:${pad(whole % 60)}`;
  return days ? `${days} d ${rest}` : rest;
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

const data = JSON.parse(element("data").textContent);
const state = { axis: "iteration", view: null, whole: [0, 1], facts: data.facts, tables: {} };

function prepare() {
  for (const table of Object.values(state.tables)) table.milliseconds = table.time.map((seconds) => seconds * 1000);
  const { steps } = state.tables;
  if (steps.columns.loss) steps.columns.loss_smooth = smoothed(steps.columns.loss);
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
    [`started ${clock(run.started)}`, `${run.world_size} ranks`, run.num_starts > 1 ? `${run.num_starts} starts` : "", run.reason, run.unread].filter(Boolean).join(" · "));
  const share = run.num_steps ? Math.min(1, run.step / run.num_steps) : 0;
  const bar = make("div", { class: "bar" }, make("i", { style: { width: `${100 * share}%` } }));
  const money = run.cost === null ? "" : ` · cost ${number(run.cost)}`;
  element("tiles").replaceChildren(
    tile("state", make("div", { class: `value state-${run.state}` }, run.state), run.state_more),
    tile("step", `${number(run.step)} of ${number(run.num_steps)}`, `${metric(run.tokens)} tokens`, bar),
    tile("loss", run.loss, run.eval_loss === null ? "" : `held out ${run.eval_loss}`),
    tile("throughput", `${metric(run.tokens_per_s)} tokens/s`, run.mfu === null ? "" : `${percent(run.mfu)} MFU`),
    tile("goodput", percent(goodput.of_time), `${percent(goodput.of_tokens)} of the tokens kept`),
    tile("stability tax", percent(goodput.tax), goodput.tax_more),
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

const SHARES = { kept: "blue", refused: "red", undone: "orange", restoring: "violet", saving: "green", evaluating: "pale", starting: "grey", paused: "quiet", stopped: "ink" };

function showGoodput() {
  const { goodput } = state.facts;
  const rows = goodput.accounts.filter((account) => account.seconds > 0);
  const bar = make("div", { class: "shares", role: "img", "aria-label": rows.map((item) => `${item.label} ${percent(item.share)}`).join(", ") },
    ...rows.map((item) => make("i", { title: `${item.label}: ${percent(item.share)}`, style: { flex: `${item.share} 0 0`, background: `var(--${SHARES[item.account]})` } })));
  const body = goodput.accounts.map((item) => make("tr", {},
    make("td", {}, make("i", { class: "dot", style: { background: `var(--${SHARES[item.account]})` } }), item.label),
    make("td", { class: "n" }, duration(item.seconds)), make("td", { class: "n" }, percent(item.share)),
    make("td", { class: "n" }, item.steps === null ? "" : number(item.steps)), make("td", { class: "quiet meaning" }, item.meaning)));
  const head = make("tr", {}, make("th", {}, "where the time went"), make("th", { class: "n" }, "time"), make("th", { class: "n" }, "share"),
    make("th", { class: "n" }, "steps"), make("th", { class: "meaning" }, "meaning"));
  element("goodput").replaceChildren(
    make("p", { class: "sums" }, ...goodput.sums.map(([value, text]) => make("span", {}, make("b", {}, percent(value)), ` ${text}`))),
    bar, make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body))), make("p", { class: "quiet" }, goodput.note));
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

function showKey() {
  const present = new Set(state.facts.marks.map((mark) => mark.kind));
  const glyphs = { start: "|", end: "■", checkpoint: "●", trouble: "✕", fault: "★", intervention: "◆", refused: "▲", finding: "○", action: "▼", restored: "◀" };
  element("key").replaceChildren(...Object.entries(MARKS).filter(([kind]) => present.has(kind)).map(([kind, look]) =>
    make("li", {}, make("b", { style: { color: `var(--${look.color})` } }, glyphs[kind]), look.name)));
}

// --- the dialog of one incident

function facts(pairs) {
  const list = make("dl", { class: "facts" });
  for (const [name, value] of pairs) if (value) list.append(make("dt", {}, name), make("dd", {}, value));
  return list;
}

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

function table(heads, rows) {
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell))))))));
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
  const isNew = !place.classList.contains("js-plotly-plot"), { traces, layout } = figureOf(id);
  Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true, doubleClick: false });
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
  stale.add("strip");
  for (const panel of PANELS) if (element(`draw-${panel.id}`)) stale.add(panel.id);
  if (!drawing) { drawing = true; requestAnimationFrame(drawNext); }
}

function look(view) {
  state.view = view;
  element("whole").hidden = !view;
  drawAll();
}

function layPanels() {
  const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) =>
    (isIntersecting ? seen.add(target.dataset.id) : seen.delete(target.dataset.id))));
  for (const panel of PANELS) {
    if (element(`draw-${panel.id}`) || !hasData(state, panel)) continue;
    const drawn = make("div", { class: "draw", id: `draw-${panel.id}`, "data-id": panel.id });
    const note = [panel.note, panel.who && state.facts.who[panel.who]].filter(Boolean).join("; ");
    element("panels").append(make("figure", { class: "panel", style: { margin: "0" } }, make("h3", {}, panel.title), make("p", { class: "quiet" }, note), drawn));
    watcher.observe(drawn);
  }
  element("strip").dataset.id = "strip";
  seen.add("strip");
}

function showAll() {
  prepare();
  showHead(); showKey(); showIncidents(); showGoodput(); showGuilty(); showLog(); layPanels();
  drawAll();
}

async function poll() {
  const { steps, probes, evals } = state.tables;
  try {
    const answer = await fetch(`data.json?steps=${steps.total}&probes=${probes.total}&evals=${evals.total}&seen=${state.facts.revision}`);
    if (answer.status === 200) {
      const update = await answer.json();
      for (const name of Object.keys(state.tables)) state.tables[name] = append(state.tables[name], unpack(update[name]));
      state.facts = update.facts;
      showAll();
    }
  } catch { /* the server does not answer; keep the page and poll again */ }
  setTimeout(poll, POLL_MS);
}

function start() {
  for (const name of ["steps", "probes", "evals"]) state.tables[name] = unpack(data[name]);
  element("axis").onchange = (event) => { state.axis = event.target.value; state.view = null; element("whole").hidden = true; prepare(); drawAll(); };
  element("whole").onclick = () => look(null);
  element("theme").onclick = () => {
    const isDark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    drawAll();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  element("close").onclick = () => element("drawer").close();
  element("drawer").addEventListener("close", () => history.replaceState(null, "", " "));
  element("drawer").addEventListener("click", (event) => event.target === element("drawer") && element("drawer").close());
  showAll();
  const wanted = /^#incident-(\d+)$/.exec(location.hash);
  if (wanted) openDrawer(Number(wanted[1]));
  if (data.live) setTimeout(poll, POLL_MS);
}

start();
