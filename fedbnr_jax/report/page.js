// A click on the head of a sortable table sorts its rows by that column.
for (const head of document.querySelectorAll("table.sortable th")) {
  head.tabIndex = 0;
  const sort = () => {
    const table = head.closest("table"), body = table.tBodies[0];
    const column = head.cellIndex, down = head.ariaSort === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].innerText;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)], [m, n] = [parseFloat(x), parseFloat(y)];
      if (isNaN(m) !== isNaN(n)) return isNaN(m) ? 1 : -1;  // What is missing stays last.
      const order = isNaN(m) ? x.localeCompare(y) : m - n;
      return down ? -order : order;
    });
    body.append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
}
