"use strict";
document.documentElement.classList.add("js");
(() => {
  const table = document.getElementById("table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];

  // What a row is sorted by: null comes last, whichever way.
  const value = (row, index, isNumber) => {
    const cell = row.cells[index];
    if (!isNumber) return cell.textContent;
    const text = cell.dataset.v;
    return text === "" ? null : text === "inf" ? Infinity : Number(text);
  };
  const text = new Intl.Collator("en", { numeric: true });
  heads.forEach((head, index) => {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const isNumber = button.dataset.kind === "number";
      const keyed = rows.map((row, place) => [value(row, index, isNumber), place, row]);
      keyed.sort(([a, i], [b, j]) => {
        if (a === null || b === null) return (a === null) - (b === null) || i - j;
        const order = isNumber ? (a < b ? -1 : a > b ? 1 : 0) : text.compare(a, b);
        return (down ? -order : order) || i - j;
      });
      body.append(...keyed.map(([, , row]) => row));
    });
  });

  const filter = document.getElementById("filter");
  const count = document.getElementById("count");
  const words = rows.map((row) =>
    [1, 2, 3].map((i) => row.cells[i].textContent).join(" ").toLowerCase());
  const apply = () => {
    const wanted = filter.value.trim().toLowerCase();
    let shown = 0;
    rows.forEach((row, place) => {
      row.hidden = !words[place].includes(wanted);
      shown += !row.hidden;
    });
    count.textContent = `${shown} of ${rows.length} tensors`;
  };
  filter.addEventListener("input", apply);
  if (filter.value) apply();
})();
