"use strict";
(() => {
  // Light or dark: as the system has it until the button says otherwise.
  const root = document.documentElement, button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  try { // a page opened from a file may have no storage
    const kept = localStorage.getItem("kvfold-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* then it is not kept */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("kvfold-theme", root.dataset.theme); } catch { /* as above */ }
    label();
  });
  system.addEventListener("change", label);
  button.hidden = false;
  label();

  // A click, Enter or Space on a column's name sorts by it; again, the other way round. What is not known stays last.
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  };
  const sort = (table, head) => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row.cells[head.cellIndex].dataset.value, row]);
    rows.sort(([a], [b]) => (a === undefined || b === undefined ? (a === undefined) - (b === undefined) : sign * compare(a, b)));
    body.append(...rows.map(([, row]) => row));
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  };
  for (const table of document.querySelectorAll("table")) {
    for (const head of table.tHead.rows[0].cells) {
      const name = document.createElement("button");
      name.type = "button";
      name.append(...head.childNodes);
      name.addEventListener("click", () => sort(table, head));
      head.append(name);
    }
  }
})();
