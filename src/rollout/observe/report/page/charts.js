// Plots in SVG. Widths are those of a viewBox: the page scales them.

const WIDTH = 420, HEIGHT = 170;
const LONG_LABEL = 8; // of more signs there is room for two, the last one not at the end
const LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 26;

function card(title, note, ...content) {
  return el("figure", { class: "card" }, el("figcaption", {}, el("b", {}, title), note && el("span", {}, note)), ...content);
}

function frame(label) {
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
}

// A few round numbers from 0 or `low` to `high`.
function ticks(low, high, wanted = 4) {
  const span = high - low || 1;
  const rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => span / each <= wanted + 0.5);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(+at.toPrecision(15));
  return found;
}

function axes(chart, x, y, formatX, formatY, givenX = null) {
  for (const value of ticks(y.low, y.high, 3)) {
    chart.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, formatY(value)),
    );
  }
  const places = givenX ?? ticks(x.low, x.high, 5);
  const isTold = new Set(places.map(formatX)).size === places.length; // else they are close, and far from 0
  const told = places.map((value) => [value, isTold ? formatX(value) : exact(value)]);
  const isLong = told.some(([, label]) => label.length > LONG_LABEL);
  for (const [value, label] of told.filter((_, at) => !isLong || at === 0 || at === told.length - 2)) {
    chart.append(svg("text", { class: "tick", x: x(value), y: HEIGHT - 8, "text-anchor": "middle" }, label));
  }
  chart.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(y.low), y2: y(y.low) }));
}

function scale(low, high, from, to) {
  const place = (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  place.low = low;
  place.high = high;
  place.inverse = (at) => low + ((at - from) / (to - from)) * (high - low);
  return place;
}

function acrossX(low, high) {
  return scale(low, high, LEFT, WIDTH - RIGHT);
}

function upY(high) {
  return scale(0, high || 1, HEIGHT - BOTTOM, TOP);
}

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6, 1)}M`;
  if (size >= 1e4) return `${number(value / 1e3, 1)}k`;
  return number(value, 2);
}

// Smaller values count as 0: a step between them would be less than a number can be.
const TINY = 1e-290;

// How many values fall where; `onPick` gets the bounds of a bar that is clicked.
function histogram(title, values, { whole = false, unit = "", onPick = null } = {}) {
  const known = values.filter((value) => value !== null).map((value) => Math.abs(value) < TINY ? 0 : value).sort((a, b) => a - b);
  if (!known.length) return null;
  const low = known[0], high = known[known.length - 1];
  const width = binWidth(low, high, whole);
  const edges = binEdges(low, high, width);
  const first = edges[0], size = edges.length - 1;
  const bins = new Array(size).fill(0);
  let bin = 0;
  for (const value of known) {
    while (value >= edges[bin + 1]) bin++;
    bins[bin]++;
  }
  const half = whole && width === 1 ? 0.5 : 0;
  const x = acrossX(first - half, edges[size] - half), y = upY(Math.max(...bins));
  const chart = frame(`${title}: from ${number(low)} to ${number(high)}`);
  const counted = whole && width === 1 ? edges.slice(0, size) : null;
  const few = counted && counted.length > 9 ? null : counted;
  axes(chart, x, y, compact, compact, few);
  bins.forEach((times, at) => {
    if (!times) return;
    const from = edges[at], to = edges[at + 1];
    const middle = x((from + to) / 2 - half), wide = Math.min(x(to - half) - x(from - half) - 1.5, 46);
    const told = counted ? number(from) : `${exact(from)} – ${exact(to)}`;
    const bar = svg("rect", {
      class: onPick ? "bar pick" : "bar", x: middle - wide / 2, width: Math.max(1, wide),
      y: Math.min(y(times), y(0) - 1), height: Math.max(1, y(0) - y(times)), rx: 1.5,
      onclick: onPick && (() => onPick(from, counted ? from : to)),
    });
    chart.append(withTip(bar, [`${told} ${unit}`, count(times, "trajectory")]));
  });
  const mean = sum(known) / known.length;
  const middle = quantile(known, 0.5), most = quantile(known, 0.95);
  return card(title, `mean ${number(mean)} · median ${number(middle)} · 95 % ≤ ${number(most)}`, chart);
}

// Round numbers, a bar's width apart, the last one above `high`: a filter by them finds what a bar has.
function binEdges(low, high, width) {
  const edge = (number) => +(number * width).toPrecision(15);
  const near = Math.floor(low / width + 1e-9), start = edge(near) > low ? near - 1 : near;
  const edges = [];
  for (let at = 0; at < 2 || edges[at - 1] <= high; at++) edges.push(edge(start + at));
  return edges;
}

function exact(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 15 });
}

function binWidth(low, high, whole) {
  const span = high - low;
  if (span === 0) return whole ? 1 : Math.max(Math.abs(low) / 10, 0.1);
  const rough = span / 24, power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return whole ? Math.max(1, Math.ceil(width)) : width;
}

// Named amounts, the largest first; each may have its own colour.
function bars(title, note, entries, { format = number, onPick = null } = {}) {
  const most = Math.max(...entries.map((entry) => entry.value), 1e-12);
  const list = el("div", { class: "bars" });
  for (const entry of entries) {
    const fill = el("i", { class: entry.style ?? "" });
    fill.style.width = `${(100 * entry.value) / most}%`;
    const inner = [el("span", { class: "name" }, entry.name), el("span", { class: "track" }, fill), el("span", { class: "value" }, format(entry.value), entry.share !== undefined && el("small", {}, ` ${share(entry.share)}`))];
    list.append(onPick ? el("button", { type: "button", onclick: () => onPick(entry), title: "show these" }, inner) : el("div", {}, inner));
  }
  return card(title, note, list);
}

// Lines over time; `series`: [{name, values, style}], `step` seconds each.
function lines(title, note, series, step, { format = compact, unit = "" } = {}) {
  const size = Math.max(...series.map((each) => each.values.length));
  const high = Math.max(...series.flatMap((each) => each.values.filter((value) => value !== null)), 1e-9);
  const x = acrossX(0, size * step), y = upY(high);
  const chart = frame(title);
  axes(chart, x, y, (value) => seconds(value), format);
  for (const each of series) {
    const points = each.values.map((value, at) => [x((at + 0.5) * step), y(value ?? 0)]);
    const path = points.map(([left, top], at) => `${at ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`).join("");
    if (series.length === 1 || each.filled) {
      const floor = y(0).toFixed(1);
      chart.append(svg("path", { class: `area ${each.style}`, d: `${path}L${points[points.length - 1][0].toFixed(1)} ${floor}L${points[0][0].toFixed(1)} ${floor}Z` }));
    }
    chart.append(svg("path", { class: `line ${each.style}`, d: path }));
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const field = svg("rect", { class: "field", x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM });
  withTip(field, (event) => {
    const box = chart.getBoundingClientRect();
    const time = x.inverse(((event.clientX - box.left) / box.width) * WIDTH);
    const at = Math.max(0, Math.min(size - 1, Math.floor(time / step)));
    const place = x((at + 0.5) * step);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    return [`at ${seconds(at * step)}`, ...series.map((each) => `${each.name}: ${number(each.values[at])}${unit}`)];
  });
  field.addEventListener("mouseleave", () => cursor.setAttribute("visibility", "hidden"));
  chart.append(cursor, field);
  return card(title, note, chart, series.length > 1 && legend(series));
}

function legend(entries) {
  return el("div", { class: "legend" }, entries.map((each) => el("span", {}, el("i", { class: each.style }), each.name)));
}

// One bar of shares that make up a whole.
function stacked(entries, format) {
  const whole = sum(entries.map((entry) => entry.value)) || 1;
  const bar = el("div", { class: "stacked" });
  for (const entry of entries) {
    if (entry.value <= 0) continue;
    const part = el("i", { class: entry.style });
    part.style.width = `${(100 * entry.value) / whole}%`;
    bar.append(withTip(part, [entry.name, `${format(entry.value)} · ${share(entry.value / whole)}`]));
  }
  return bar;
}
