// The table of layers, and the chart of its rows.

function layerTable() {
  const table = document.getElementById("layer-table");
  if (!table) return () => {};
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const keys = heads.map((head) => head.dataset.key);
  const read = (row) => {
    const values = { row, changed: row.classList.contains("changed") };
    keys.forEach((key, i) => {
      const cell = row.cells[i];
      const text = (cell.querySelector("code") ?? cell).textContent;
      values[key] =
        cell.dataset.v === undefined ? text : cell.dataset.v === "" ? null : Number(cell.dataset.v);
    });
    return values;
  };
  let rows = [...body.rows].map(read);
  let shown = rows;

  const form = document.getElementById("layer-filter");
  const chart = layerChart(document.getElementById("layer-chart"));
  form.hidden = false;

  const filter = () => {
    const { text, scheme, changed } = form.elements;
    const wanted = text.value.trim().toLowerCase();
    shown = rows.filter((values) => {
      const named = `${values.layer}\n${values.scheme}`.toLowerCase().includes(wanted);
      const fits = !scheme.value || values.scheme === scheme.value;
      const kept = named && fits && (values.changed || !changed.checked);
      values.row.hidden = !kept;
      return kept;
    });
    form.querySelector("output").textContent = `${shown.length} of ${rows.length} layers`;
    chart.show(shown);
  };

  const sort = (head, key) => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const compare = (a, b) =>
      typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    rows = rows.toSorted((a, b) => {
      const [one, other] = [a[key], b[key]];
      if (one === null || other === null) return (one === null) - (other === null);
      return up ? compare(one, other) : compare(other, one);
    });
    body.append(...rows.map((values) => values.row));
    filter();
  };

  heads.forEach((head, i) =>
    head.querySelector("button").addEventListener("click", () => sort(head, keys[i])),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", filter);
  form.elements.details.addEventListener("change", (event) =>
    table.classList.toggle("compact", !event.target.checked),
  );
  form.elements.csv.addEventListener("click", () => save(shown, keys));
  table.classList.add("compact");
  let pointer = "";
  body.addEventListener("pointermove", (event) => {
    const here = `${event.clientX} ${event.clientY}`;
    if (here === pointer) return; // the table scrolled below a pointer that rests
    pointer = here;
    const row = event.target.closest("tr");
    chart.mark(shown.findIndex((values) => values.row === row));
  });
  filter();
  return () => chart.show(shown);
}

function save(shown, keys) {
  const quoted = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const lines = [keys, ...shown.map((values) => keys.map((key) => values[key]))];
  const text = lines.map((line) => line.map(quoted).join(",")).join("\r\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "layers.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function layerChart(figure) {
  const caption = figure.querySelector("figcaption");
  const hint = caption.textContent;
  const places = [...figure.querySelectorAll(".plot")];
  let shown = [];
  let drawn = [];
  let current = -1;
  figure.hidden = false;

  const panels = {
    bytes: (bars) => ({
      y: {
        domain: [0, Math.max(1, ...shown.flatMap((v) => [v.before ?? 0, v.after ?? 0]))],
        nice: true,
      },
      tickFormat: bytes,
      marks: [bars("before", "var(--base)"), bars("after", "var(--ours)")],
    }),
    sqnr: (bars, dots) => ({
      y: { nice: true, zero: false },
      tickFormat: short,
      marks: [dots("sqnr")],
    }),
    share: (bars) => ({
      y: { zero: true, nice: true },
      tickFormat: short,
      marks: [bars("share", "var(--ours)")],
    }),
  };

  const panel = (name, width) => {
    const inset = shown.length * 4 < width ? 0.14 : 0;
    const at = (side) => (_, i) => i + (side ? 1.5 - inset : 0.5 + inset);
    const bars = (key, fill) => Plot.rectY(shown, { x1: at(0), x2: at(1), y: key, fill });
    const dots = (key) =>
      Plot.dot(shown, {
        x: (_, i) => i + 1,
        y: key,
        r: shown.length > 100 ? 1.6 : 3,
        fill: "var(--ours)",
      });
    const { y, tickFormat, marks } = panels[name](bars, dots);
    return {
      height: 124,
      marginLeft: 52,
      marginBottom: 8,
      x: { domain: [0.5, shown.length + 0.5], axis: null },
      y,
      marks: [
        Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1, ticks: 4 }),
        Plot.axisY({ ticks: 4, tickSize: 0, label: null, tickFormat }),
        ...marks,
      ],
    };
  };

  const words = ({ layer, scheme, before, after, sqnr, share }) =>
    [
      layer,
      scheme,
      before !== null && after !== null ? `${bytes(before)} → ${bytes(after)}` : null,
      sqnr === null ? null : `${sqnr.toFixed(1)} dB`,
      share === null ? null : `${share.toFixed(1)} % of the noise`,
    ]
      .filter(Boolean)
      .join(", ");

  const mark = (index) => {
    shown[current]?.row.classList.remove("marked");
    current = index >= 0 && index < shown.length ? index : -1;
    const values = shown[current];
    values?.row.classList.add("marked");
    caption.textContent = values ? words(values) : hint;
    figure.setAttribute("aria-valuenow", current < 0 ? 1 : current + 1);
    figure.setAttribute("aria-valuetext", values ? words(values) : "no layer");
    for (const { cursor, scale } of drawn) {
      cursor.style.display = values ? "" : "none";
      const x = values ? scale.apply(current + 1) : 0;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
  };

  const reveal = () => {
    const row = shown[current]?.row;
    const box = row?.closest(".card");
    if (!row) return;
    const top = row.offsetTop - row.closest("table").tHead.offsetHeight;
    if (top < box.scrollTop || row.offsetTop + row.offsetHeight > box.scrollTop + box.clientHeight)
      box.scrollTop = top - box.clientHeight / 3;
  };

  const indexAt = (event) => {
    const first = drawn[0];
    if (!first) return -1;
    const left = first.svg.getBoundingClientRect().left;
    return Math.round(first.scale.invert(event.clientX - left)) - 1;
  };

  figure.addEventListener("pointermove", (event) => mark(indexAt(event)));
  figure.addEventListener("pointerleave", () => mark(-1));
  figure.addEventListener("click", (event) => {
    mark(indexAt(event));
    reveal();
  });
  figure.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: current + 1,
      ArrowUp: current + 1,
      ArrowLeft: Math.max(current - 1, 0),
      ArrowDown: Math.max(current - 1, 0),
      PageUp: current + 10,
      PageDown: Math.max(current - 10, 0),
      Home: 0,
      End: shown.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    mark(Math.min(to, shown.length - 1));
    reveal();
  });

  const show = (rows) => {
    mark(-1);
    shown = rows;
    figure.setAttribute("aria-valuemax", Math.max(1, shown.length));
    drawn = places.flatMap((place) => {
      if (!shown.length) {
        place.replaceChildren();
        return [];
      }
      const svg = draw(place, "", (width) => panel(place.dataset.panel, width));
      if (!svg) return [];
      const cursor = document.createElementNS(svg.namespaceURI, "line");
      cursor.setAttribute("class", "cursor");
      cursor.setAttribute("y1", 4);
      cursor.setAttribute("y2", 118);
      cursor.style.display = "none";
      svg.append(cursor);
      return [{ svg, cursor, scale: svg.scale("x") }];
    });
  };
  return { show, mark };
}
