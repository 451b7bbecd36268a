"use strict";
// Without this script the title of each place still tells it; with it the keyboard reaches every place.
for (const grid of document.querySelectorAll("details.grid")) {
  const said = grid.querySelector("output");
  const rows = [...grid.querySelectorAll("tr")].map((row) => [...row.querySelectorAll("td")]);
  const tell = (event) => { if (event.target.matches("td.c")) said.textContent = event.target.title; };
  grid.addEventListener("mouseover", tell);
  grid.addEventListener("focusin", tell);
  grid.addEventListener("click", (event) => { if (event.target.matches("td.c")) move(event.target); });
  grid.addEventListener("keydown", (event) => {
    const y = rows.findIndex((row) => row.includes(event.target));
    if (y < 0) return;
    const x = rows[y].indexOf(event.target);
    const to = {
      ArrowLeft: rows[y][x - 1], ArrowRight: rows[y][x + 1], ArrowUp: rows[y - 1]?.[x], ArrowDown: rows[y + 1]?.[x],
      Home: rows[y][0], End: rows[y].at(-1),
    }[event.key];
    if (to) { event.preventDefault(); move(to); }
  });
  const move = (cell) => {
    for (const other of grid.querySelectorAll("td[tabindex='0']")) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
  };
}
// A printed page has no closed parts.
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
