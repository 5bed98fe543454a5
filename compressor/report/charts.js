// What is drawn once: data come from the element chart-data.

const data = JSON.parse(document.getElementById("chart-data").textContent);
const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
};
const short = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

/** Draw into an element what `make(width)` describes, with a name for screen readers. */
function draw(target, label, make) {
  const width = Math.floor(target.clientWidth);
  if (!width) return null;
  const svg = Plot.plot({
    width,
    marginTop: 8,
    marginRight: 10,
    style: { fontSize: "11px", background: "none", overflow: "visible" },
    ...make(width),
  });
  if (label) {
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
  } else {
    svg.setAttribute("aria-hidden", "true");
  }
  target.replaceChildren(svg);
  return svg;
}

// Weights and inputs of the worst layers.

function histogram({ low, high, counts, after, range }) {
  const step = (high - low) / counts.length;
  const inside = (middle) => !range || (middle >= range[0] && middle <= range[1]);
  const bins = counts.map((count, i) => {
    const x1 = low + i * step;
    return { x1, x2: x1 + step, count, fill: inside(x1 + step / 2) ? "var(--base)" : "var(--cut)" };
  });
  const steps = (after ?? []).flatMap((count, i) => [
    { x: low + i * step, count },
    { x: low + (i + 1) * step, count },
  ]);
  return {
    height: 108,
    marginLeft: 10,
    marginBottom: 22,
    x: { domain: [Math.min(low, ...(range ?? [])), Math.max(high, ...(range ?? []))], label: null },
    y: { type: "sqrt", axis: null },
    marks: [
      Plot.rectY(bins, {
        x1: "x1",
        x2: "x2",
        y: "count",
        fill: "fill",
        insetLeft: 0.5,
        shapeRendering: "auto",
      }),
      Plot.lineY(steps, { x: "x", y: "count", stroke: "var(--ours)", strokeWidth: 1.5 }),
      Plot.ruleX(range ?? [], { stroke: "var(--ink)", strokeWidth: 1.5, strokeDasharray: "4 2" }),
      Plot.axisX({ ticks: 5, tickSize: 4, label: null, tickFormat: short }),
      Plot.ruleY([0], { stroke: "var(--line)" }),
    ],
  };
}

function drawHistograms() {
  for (const plot of document.querySelectorAll(".distributions .plot")) {
    const counts = data.histograms[plot.dataset.layer][plot.dataset.item];
    draw(plot, plot.dataset.label, () => histogram(counts));
  }
}

// How the loss of a training went.

function drawTrainings() {
  document.querySelectorAll(".trainings .plot").forEach((plot, i) =>
    draw(plot, plot.dataset.label, () => ({
      height: 150,
      marginLeft: 48,
      marginBottom: 24,
      y: { zero: true, nice: true },
      marks: [
        Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1, ticks: 4 }),
        Plot.axisY({ ticks: 4, tickSize: 0, label: null, tickFormat: short }),
        Plot.axisX({ ticks: 5, tickSize: 4, label: null, tickFormat: short }),
        Plot.lineY(data.losses[i], { x: "0", y: "1", stroke: "var(--ours)", strokeWidth: 1.5 }),
      ],
    })),
  );
}

// The metric above something else.

const metricText = (value) => short(value) + (data.metric.unit === "%" ? " %" : "");

function metricChart(height, domain, below, marks) {
  return {
    height,
    marginLeft: 52,
    marginBottom: 38,
    x: { domain },
    y: { nice: true },
    marks: [
      Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1, ticks: 5 }),
      Plot.axisY({ ticks: 5, tickSize: 0, label: null, tickFormat: metricText }),
      Plot.axisX({ tickSize: 4, labelAnchor: "center", labelArrow: "none", ...below }),
      ...marks,
    ],
  };
}

// What other runs traded for what.

function tradeOff(against) {
  const [ratio, interval, beaten] =
    against === "size"
      ? ["size_ratio", null, "beaten_in_size"]
      : ["latency_ratio", "latency_ci95", "beaten_in_latency"];
  const shown = data.points.filter((point) => point[ratio] !== null);
  const front = shown
    .filter((point) => !point[beaten])
    .sort((a, b) => a[ratio] - b[ratio] || a.metric - b.metric);
  const most = Math.max(1.05, ...shown.map((p) => p[ratio] * 1.08));
  const first = (point, i, all) => all.findIndex((other) => other.run === point.run) === i;
  const named = [...front].sort((a, b) => b.own - a.own).filter(first);
  const colour = (point) => (point.own ? "var(--ours)" : "var(--quiet)");
  const opacity = (point) => (point[beaten] ? 0.3 : 1);
  return {
    ...metricChart(280, [0, most], { ticks: 5, label: `${against} ratio` }, [
      Plot.ruleY([data.metric.float], { stroke: "var(--quiet)", strokeDasharray: "3 3" }),
      Plot.line(front, {
        x: ratio,
        y: "metric",
        stroke: "var(--ours)",
        strokeOpacity: 0.35,
        curve: "step-after",
      }),
      Plot.ruleX(shown, {
        x: ratio,
        y1: (p) => p.metric_ci95[0],
        y2: (p) => p.metric_ci95[1],
        stroke: colour,
        strokeOpacity: (p) => 0.45 * opacity(p),
      }),
      interval &&
        Plot.ruleY(shown, {
          y: "metric",
          x1: (p) => p[interval][0],
          x2: (p) => Math.min(p[interval][1], most),
          stroke: colour,
          strokeOpacity: (p) => 0.45 * opacity(p),
        }),
      Plot.dot(shown, {
        x: ratio,
        y: "metric",
        r: (p) => (p.own ? 5.5 : 4.5),
        fill: (p) => (p.own ? "var(--ours)" : "var(--card)"),
        stroke: colour,
        strokeWidth: 1.5,
        strokeOpacity: opacity,
        fillOpacity: opacity,
        title: (p) =>
          `${p.run}, ${p.artifact}: ${metricText(p.metric)} at ${p[ratio].toFixed(2)} ×`,
      }),
      Plot.dot([data.metric.float], {
        x: 1,
        y: (v) => v,
        symbol: "times",
        r: 4,
        stroke: "var(--quiet)",
        strokeWidth: 1.5,
      }),
      Plot.text(named, {
        x: ratio,
        y: "metric",
        text: "run",
        dx: 9,
        dy: -9,
        textAnchor: "start",
        fill: "var(--ink)",
        stroke: "var(--card)",
        strokeWidth: 4,
      }),
    ]),
    r: { type: "identity" },
  };
}

function drawTradeOff() {
  const charts = document.getElementById("trade-off-charts");
  if (!charts) return;
  charts.hidden = document.getElementById("trade-off-key").hidden = false;
  for (const plot of charts.querySelectorAll(".plot")) {
    const { against } = plot.dataset;
    const label = `${data.metric.title} against ${against} ratio of ${data.points.length} artifacts; the table below has the numbers`;
    const svg = draw(plot, label, () => tradeOff(against));
    if (svg) thinOut([...svg.querySelectorAll('g[aria-label="text"] text')]);
  }
}

// How the metric went from run to run; a dashed line where it stepped.

function drawHistory() {
  const figure = document.getElementById("history-chart");
  if (!figure) return;
  figure.hidden = false;
  const runs = data.history.map((run, i) => ({ ...run, place: i + 1 }));
  const label = `${data.metric.title} of ${runs.length} runs; the table below has the numbers`;
  const below = {
    ticks: runs.map((run) => run.place).filter((n) => n % Math.ceil(runs.length / 12) === 0),
    label: "run",
    tickFormat: String,
  };
  draw(figure.querySelector(".plot"), label, () =>
    metricChart(200, [0.5, runs.length + 0.5], below, [
      Plot.ruleX(
        runs.filter((run) => run.stepped),
        { x: (run) => run.place - 0.5, stroke: "var(--ink)", strokeDasharray: "4 2" },
      ),
      Plot.lineY(runs, { x: "place", y: "value", stroke: "var(--ours)", strokeOpacity: 0.35 }),
      Plot.ruleX(runs, {
        x: "place",
        y1: "low",
        y2: "high",
        stroke: "var(--ours)",
        strokeOpacity: 0.45,
      }),
      Plot.dot(runs, {
        x: "place",
        y: "value",
        r: 4,
        fill: (run) => (run.place === runs.length ? "var(--ours)" : "var(--card)"),
        stroke: "var(--ours)",
        strokeWidth: 1.5,
        title: (run) => `${run.label}: ${metricText(run.value)}`,
      }),
    ]),
  );
}

/** Leave out names that would lie on others. */
function thinOut(names) {
  const kept = [];
  for (const name of names) {
    const box = name.getBoundingClientRect();
    const free = kept.every(
      (other) =>
        box.left > other.right ||
        box.right < other.left ||
        box.top > other.bottom ||
        box.bottom < other.top,
    );
    if (free) kept.push(box);
    else name.remove();
  }
}
