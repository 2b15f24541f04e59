"use strict";
// Okabe and Ito's colours, except yellow, which is invisible on white; `null` is the colour of text. Seven colours and
// six kinds of line distinguish 42 groups.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", null];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
// Parts of cividis that contrast with the background, more for better scores.
const ON_WHITE = [[150, 142, 112], [104, 106, 112], [52, 66, 108], [0, 34, 78]];
const ON_BLACK = [[105, 112, 124], [150, 143, 115], [200, 184, 98], [254, 232, 56]];
const AXES = { opt_steps: "optimisation steps", env_steps: "environment steps", seconds: "seconds" };
const METRICS = { score: "evaluation score", return: "training return" };
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
const BELOW = { orientation: "h", yref: "container", y: 0, yanchor: "bottom", itemwidth: 44 };
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function colour(group) { return COLOURS[group % COLOURS.length] || css("--ink"); }
function dash(group) { return DASHES[group % DASHES.length]; }
function faded(group, alpha) {
  const [r, g, b] = colour(group).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

function layout(more) {
  const axis = { gridcolor: css("--faint"), zerolinecolor: css("--faint"), linecolor: css("--faint"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 13 },
    margin: { l: 50, r: 12, t: 12, b: 44 }, hovermode: "closest", ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

// A group of one run is always drawn as the points of that run.
function curveTraces(metric, axis, shown) {
  const at = Object.keys(AXES).indexOf(axis);
  const { runs, bands } = data.curves[metric];
  const traces = [], named = new Set();
  data.groups.forEach((name, group) => {
    const band = shown === "runs" ? null : bands[at][group];
    const common = { mode: "lines", legendgroup: String(group), name };
    if (band) {
      const edge = { ...common, x: band.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ ...edge, y: band.low },
        { ...edge, y: band.high, fill: "tonexty", fillcolor: faded(group, 0.18) },
        { ...common, x: band.x, y: band[shown], line: { color: colour(group), dash: dash(group), width: 2.2 } });
      return;
    }
    for (const run of runs.filter((one) => one.group === group)) {
      traces.push({ ...common, x: run.x[at], y: run.y, text: run.name, showlegend: !named.has(group),
        mode: run.y.length < 3 ? "lines+markers" : "lines", hovertemplate: "%{x:,}, %{y}<br>%{text}<extra></extra>",
        line: { color: colour(group), dash: dash(group), width: 1.5 } });
      named.add(group);
    }
  });
  return traces;
}

function drawCurves() {
  const [metric, axis, shown] = ["metric", "axis", "shown"].map((id) => byId(id).value);
  Plotly.react("curves", curveTraces(metric, axis, shown), layout({
    xaxis: { title: { text: AXES[axis] } }, yaxis: { title: { text: METRICS[metric] } },
    legend: BELOW, showlegend: true,
  }), CONFIG);
}

function drawEpisodes() {
  if (!data.episodes.length) return;
  const traces = data.episodes.map((run) => ({ type: "box", x: run.returns, name: run.name, boxpoints: false,
    line: { color: colour(run.group), width: 1.5 }, showlegend: false, orientation: "h" }));
  Plotly.react("episodes", traces, layout({ height: 90 + 26 * traces.length, xaxis: { title: { text: "return" } },
    yaxis: { autorange: "reversed", type: "category" } }), CONFIG);
}

function shade(height) {
  if (height === null) return css("--faint");
  const scale = matchMedia("(prefers-color-scheme: dark)").matches ? ON_BLACK : ON_WHITE;
  const at = height * (scale.length - 1), low = Math.min(Math.floor(at), scale.length - 2);
  return `rgb(${scale[low].map((part, i) => Math.round(part + (at - low) * (scale[low + 1][i] - part)))})`;
}

// An axis for each setting and one for the score; a member is a line, stronger for better scores.
function drawPopulation(population, id) {
  const { axes, members } = population, names = axes.map((axis) => axis.name), scores = axes[axes.length - 1];
  const traces = members.map((member, i) => ({ x: names, y: axes.map((axis) => axis.heights[i]), mode: "lines+markers",
    text: axes.map((axis) => `member ${member}: ${axis.name} ${axis.values[i]}`), hoverinfo: "text", showlegend: false,
    line: { color: shade(scores.heights[i]), width: 2 } }));
  const annotations = axes.flatMap((axis) => axis.ticks.map(([y, text]) => ({ x: axis.name, y, text, showarrow: false,
    xanchor: "left", xshift: 6, bgcolor: css("--paper"), font: { size: 11 } })));
  Plotly.react(id, traces, layout({ title: { text: population.name, font: { size: 13 } }, annotations, height: 380,
    margin: { l: 20, r: 60, t: 40, b: 44 }, xaxis: { type: "category", showgrid: true },
    yaxis: { visible: false, range: [-0.06, 1.06] } }), CONFIG);
}

// Each member has a height, and changes colour when it copies another; founders without descendants are faint.
function drawLineage(lineage, id) {
  const alive = lineage.lines.filter((line) => line.alive).map((line) => line.founder);
  const traces = lineage.lines.map((line) => {
    const group = alive.indexOf(line.founder), color = line.alive ? colour(group) : css("--faint");
    return { x: line.x, y: line.y, text: line.text, mode: "lines+markers", marker: { size: 4, color },
      name: `from ${line.founder}`, showlegend: line.alive, hovertemplate: "%{x:,}: %{text}<extra></extra>",
      line: { color, dash: line.alive ? dash(group) : "solid", width: line.alive ? 2.2 : 1.2 } };
  });
  Plotly.react(id, traces, layout({ title: { text: lineage.name, font: { size: 13 } }, legend: BELOW,
    height: Math.min(180 + 22 * lineage.members.length, 900), margin: { l: 50, r: 12, t: 40, b: 44 },
    xaxis: { title: { text: AXES.opt_steps }, rangemode: "tozero" },
    yaxis: { title: { text: "member" }, autorange: "reversed", tickformat: "d", zeroline: false } }), CONFIG);
}

// Draw one plot for each of `found`, below one another in the section `place`.
function drawEach(found, place, draw) {
  found.forEach((one, i) => {
    const id = `${place}-${i}`;
    if (!byId(id)) byId(place).insertAdjacentHTML("beforeend", `<div id="${id}"></div>`);
    draw(one, id);
  });
}

function drawAll() {
  drawCurves();
  drawEpisodes();
  drawEach(data.populations, "population", drawPopulation);
  drawEach(data.lineages, "lineage", drawLineage);
}

// Selections survive a reload of the page; a page opened as a file may have no storage.
function remember(id) { try { sessionStorage.setItem(`jaxrl-${id}`, byId(id).value); } catch { /* none */ } }
function recall(id) {
  let value = null;
  try { value = sessionStorage.getItem(`jaxrl-${id}`); } catch { /* none */ }
  if (value !== null) byId(id).value = value;
}

async function reloadIfNewer() {
  try {
    const answer = await fetch("stamp", { cache: "no-store" });
    if (answer.ok && (await answer.text()) !== data.stamp) location.reload();
  } catch { /* the server has ended; what is shown stays */ }
}

for (const id of ["metric", "axis", "shown"]) {
  recall(id);
  byId(id).addEventListener("change", () => { remember(id); drawCurves(); });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
if (data.stamp) setInterval(reloadIfNewer, 5000);
