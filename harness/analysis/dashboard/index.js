"use strict";
// Sorts a table by a column when its header is clicked; a second click reverses the order. Compares the selected runs of a table.

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const isNumeric = head.classList.contains("n");
      const value = (row) => {
        const text = row.cells[column].dataset.value;
        return isNumeric ? (Number.isNaN(Number(text)) ? Infinity : Number(text)) : text;
      };
      const before = (a, b) => (isNumeric ? value(a) - value(b) || 0 : value(a).localeCompare(value(b)));
      body.append(...[...body.rows].sort((a, b) => (rising ? before(a, b) : before(b, a))));
    });
  });
}

// The arguments of a shell command, quoted where needed.
const shellQuoted = (text) => (/^[\w./=:@%+,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

for (const button of document.querySelectorAll("button.compare")) {
  const section = button.closest("section"), output = section.querySelector("output");
  button.addEventListener("click", () => {
    const picked = [...section.querySelectorAll(".pick:checked")], { page } = button.dataset;
    const names = picked.map((box) => box.closest("tr").cells[1].dataset.value);
    if (picked.length < 2) output.textContent = "Select two or more runs.";
    else if (page) location.href = `${page}#${new URLSearchParams(picked.map((box) => ["run", box.dataset.path]))}`;
    else output.textContent = `Run here: harness dashboard ${names.map(shellQuoted).join(" ")}`;
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, isDark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
});
