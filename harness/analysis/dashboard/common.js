"use strict";
// Shared by the pages: elements, numbers, the theme button, and drawing for paper.

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

const clock = (seconds) => `${new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short", timeZone: "UTC" })} UTC`;

function facts(pairs) {
  const list = make("dl", { class: "facts" });
  for (const [name, value] of pairs) if (value) list.append(make("dt", {}, name), make("dd", {}, value));
  return list;
}

function table(heads, rows) {
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", {}, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell))))))));
}

// Calls `redraw` when the theme changes, by the button or by the system.
function onTheme(redraw) {
  element("theme").onclick = () => {
    const isDark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

// A sheet of paper is narrow and light: before the browser prints, `drawNow` draws every figure for it; afterwards `redraw` draws them
// for the screen again.
const paper = { isPrinting: false, theme: undefined };
function onPrint(drawNow, redraw) {
  addEventListener("beforeprint", () => {
    Object.assign(paper, { isPrinting: true, theme: document.documentElement.dataset.theme });
    document.documentElement.dataset.theme = "light";
    document.body.classList.add("printing");
    drawNow();
  });
  addEventListener("afterprint", () => {
    paper.isPrinting = false;
    document.body.classList.remove("printing");
    if (paper.theme) document.documentElement.dataset.theme = paper.theme; else delete document.documentElement.dataset.theme;
    redraw();
  });
}
