// Elements and numbers. Text of a run reaches the page through text nodes only.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

// 1234567 -> "1,234,567"; 0.12345 -> "0.123"; unknown -> "–".
function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size < 10 ** -digits) return String(Number(value.toPrecision(2)));
  const places = size >= 100 ? 0 : size >= 10 ? Math.min(1, digits) : size >= 1 ? Math.min(2, digits) : digits;
  return value.toLocaleString("en-US", { maximumFractionDigits: places });
}

function share(value) {
  return `${number(100 * value, value < 0.1 ? 1 : 0)} %`;
}

// Seconds as people say them.
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${number(value * 1e6, 0)} µs`;
  if (value < 1) return `${number(value * 1000, value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${number(value, 2)} s`;
  const whole = Math.round(value);
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

// "1 row", "2 rows", "2 trajectories".
function count(value, noun) {
  const many = noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`;
  return `${number(value)} ${value === 1 ? noun : many}`;
}

function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

function quantile(sorted, at) {
  if (!sorted.length) return null;
  return sorted[Math.min(sorted.length - 1, Math.floor(at * sorted.length))];
}

// What a screen reader is told, beside what is seen.
function say(text) {
  byId("spoken").textContent = text;
}

function withTip(node, lines) {
  node.addEventListener("mousemove", (event) => showTip(event, lines));
  node.addEventListener("mouseleave", hideTip);
  return node;
}

function showTip(event, lines) {
  const tip = byId("tip");
  const told = typeof lines === "function" ? lines(event) : lines;
  if (!told) return hideTip();
  tip.replaceChildren(...told.map((line) => el("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const below = event.clientY + 16;
  const top = below + box.height > window.innerHeight ? event.clientY - box.height - 10 : below;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
