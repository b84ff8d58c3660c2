// Tokens, coloured by what they are: trained or not, how likely, or of which weights.

const COLOURINGS = [
  { key: "mask", title: "mask" },
  { key: "log_prob", title: "log-prob" },
  { key: "version", title: "weight version" },
];
// A block of tokens that is drawn at once, and how much of a long prompt is shown before it is asked for.
const AT_ONCE = 1500, PROMPT_SHOWN = 60;

let colouring = "mask";

// Steps of the scale of log-probs: at least as likely as 90 %, 75 %, 50 %, 25 %, 10 %, 1 %, less.
const STEPS = [0.9, 0.75, 0.5, 0.25, 0.1, 0.01].map(Math.log);

function stepOf(logProb) {
  if (Number.isNaN(logProb)) return "unknown";
  const at = STEPS.findIndex((step) => logProb >= step);
  return at < 0 ? STEPS.length : at;
}

// Weight versions of each id of a span, from its runs.
function versionsOf(span) {
  const versions = new Int32Array(span.count).fill(-1);
  let at = 0;
  for (const [version, size] of span.versions ?? []) {
    versions.fill(version, at, at + size);
    at += size;
  }
  return versions;
}

function tokensView(span, known, allVersions) {
  const box = el("div", { class: `tokens ${span.kind}`, dir: "auto" });
  if (!known) {
    box.append(el("p", { class: "raw" }, span.text ?? ""), idsView(span));
    return box;
  }
  const versions = versionsOf(span);
  const isLong = span.kind !== "generated" && span.count > 3 * PROMPT_SHOWN;
  if (!isLong) {
    drawTokens(box, span, known, versions, allVersions, 0, span.count);
    return box;
  }
  const middle = span.count - 2 * PROMPT_SHOWN;
  drawTokens(box, span, known, versions, allVersions, 0, PROMPT_SHOWN);
  const more = el("button", {
    type: "button", class: "more",
    onclick: () => {
      const rest = el("span", {});
      drawTokens(rest, span, known, versions, allVersions, PROMPT_SHOWN, span.count - PROMPT_SHOWN);
      more.replaceWith(rest);
    },
  }, `… ${number(middle)} more tokens …`);
  box.append(more);
  drawTokens(box, span, known, versions, allVersions, span.count - PROMPT_SHOWN, span.count);
  return box;
}

function idsView(span) {
  return el("details", { class: "ids" }, el("summary", {}, `${number(span.count)} ids`), el("code", {}, Array.from(span.ids).join(" ")));
}

// Some at once, the rest when the page has time: a transcript may have a hundred thousand.
function drawTokens(box, span, known, versions, allVersions, from, to) {
  const upTo = Math.min(to, from + AT_ONCE);
  const drawn = document.createDocumentFragment();
  for (let at = from; at < upTo; at++) drawn.append(tokenView(span, at, known, versions, allVersions));
  const place = el("span", {});
  box.append(drawn, place);
  if (upTo >= to) return place.remove();
  requestAnimationFrame(() => {
    const rest = el("span", {});
    place.replaceWith(rest);
    drawTokens(rest, span, known, versions, allVersions, upTo, to);
  });
}

function tokenView(span, at, known, versions, allVersions) {
  const id = span.ids[at], text = runsOf(span).get(at) ?? known.get(String(id));
  const token = document.createElement("span");
  const isBlank = text === undefined || text === "" || text.includes("\ufffd");
  token.className = isBlank ? "k bare" : "k";
  token.textContent = isBlank ? `⟨${id}⟩` : visible(text);
  token.dataset.id = id;
  if (span.kind === "generated") {
    const logProb = span.logProbs[at];
    token.dataset.step = stepOf(logProb);
    if (!Number.isNaN(logProb)) token.dataset.lp = logProb.toFixed(3);
    token.dataset.version = versions[at];
    token.dataset.colour = Math.max(0, allVersions.indexOf(versions[at])) % 6;
  }
  return token;
}

// Characters that are several tokens: the first one shows the text, the others that they belong to it.
function runsOf(span) {
  if (span.shown) return span.shown;
  span.shown = new Map();
  for (const [start, size, text] of span.runs ?? []) {
    span.shown.set(start, text);
    for (let at = start + 1; at < start + size; at++) span.shown.set(at, "‥");
  }
  return span.shown;
}

// Signs without a shape, so that they are seen: they could also turn what stands around them.
function withSigns(text) {
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
      (sign) => `⟨U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// The same and line ends; lines still break.
function visible(text) {
  return withSigns(text)
    .replace(/\r/g, "␍").replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

function tokenTip(event) {
  const token = event.target.closest?.(".k");
  if (!token) return null;
  const told = [`id ${token.dataset.id}`];
  const box = token.closest(".tokens");
  told.push(box.classList.contains("generated") ? "sampled: mask 1" : `${box.classList.contains("prompt") ? "prompt" : "observation"}: mask 0`);
  if (token.dataset.lp) told.push(`log-prob ${token.dataset.lp} (${share(Math.exp(Number(token.dataset.lp)))})`);
  if (token.dataset.version && token.dataset.version !== "-1") told.push(`weight version ${token.dataset.version}`);
  return told;
}

function colouringBar(allVersions) {
  const bar = el("div", { class: "segmented", role: "radiogroup", "aria-label": "colour of tokens" });
  for (const each of COLOURINGS) {
    bar.append(el("button", { type: "button", role: "radio", "data-colouring": each.key, onclick: () => colourBy(each.key) }, each.title));
  }
  return el("div", { class: "colouring" }, bar, el("div", { id: "colours" }), el("template", { id: "versions", "data-all": allVersions.join(",") }));
}

function colourBy(key) {
  colouring = key;
  byId("trajectory").dataset.colouring = key;
  for (const button of document.querySelectorAll("[data-colouring][role=radio]")) {
    button.setAttribute("aria-checked", button.dataset.colouring === key ? "true" : "false");
  }
  const shown = byId("colours");
  if (!shown) return;
  const swatch = (name, style) => el("span", { class: "swatch" }, el("i", { class: style }), name);
  if (key === "mask") shown.replaceChildren(swatch("sampled, trained", "k-generated"), swatch("observation", "k-observation"), swatch("prompt", "k-prompt"));
  else if (key === "log_prob") shown.replaceChildren(...["≥ 90 %", "75", "50", "25", "10", "1", "< 1 %"].map((name, at) => swatch(name, `k-step-${at}`)));
  else {
    const all = byId("versions").dataset.all.split(",").filter(Boolean);
    shown.replaceChildren(...all.map((version, at) => swatch(`version ${version}`, `k-version-${at % 6}`)));
  }
}
