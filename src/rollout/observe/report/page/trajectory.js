// One trajectory, turn by turn.

const PHASES = [
  { key: "place", name: "waits for a place" },
  { key: "queue", name: "engine's queue" },
  { key: "prefill", name: "prefill" },
  { key: "decode", name: "decoding" },
  { key: "tool", name: "tool" },
  { key: "user", name: "simulated user" },
  { key: "reward", name: "reward" },
  { key: "group", name: "waits for its group" },
  { key: "held", name: "weights change, or engines sleep" },
  { key: "other", name: "agent's own work, and other waits" },
];
const PHASE_NAMES = new Map(PHASES.map((phase) => [phase.key, phase.name]));

let opening = 0;

async function openTrajectory(at) {
  const turn = ++opening;
  const view = byId("trajectory");
  const [facts, times, known] = await Promise.all([readTrajectory(at), readTimes(at), tokenTexts()]);
  if (turn !== opening) return;
  const versions = [...new Set(facts.segments.flatMap((segment) => segment.spans.flatMap((span) => (span.versions ?? []).map(([version]) => version))))].sort((a, b) => a - b);
  view.replaceChildren(
    headOf(at, facts),
    factsOf(at, facts),
    causeOf(facts),
    times.length > 0 && waterfall(times, facts.segments),
    colouringBar(versions),
    ...facts.segments.map((segment, index) => segmentView(segment, index, facts, times, known, versions)),
    restOf(facts),
  );
  for (const child of [...view.childNodes]) if (child.nodeType === Node.TEXT_NODE) child.remove();
  view.onmousemove = (event) => { if (event.target.closest?.(".k")) showTip(event, tokenTip(event)); else if (event.target.closest?.(".tokens")) hideTip(); };
  view.onmouseleave = hideTip;
  colourBy(colouring);
  show("trajectory");
  view.focus({ preventScroll: true });
  say(`trajectory ${names[at]}, ${columns.outcome[at]}`);
}

function headOf(at, facts) {
  const shared = ["group", "uid", "step", "validate", "call"].map((name) => columns[name]);
  const siblings = columns.uid.flatMap((_, other) => (shared.every((each) => each[other] === each[at]) ? [other] : []));
  return el("div", { class: "path" },
    el("a", { class: "button", href: "#", id: "back", title: "back to the table (Escape)" }, "← all trajectories"),
    el("h1", {}, columns.uid[at], el("small", {}, ` member ${columns.member[at]}`)),
    outcomeBadge(at),
    el("span", { class: "steps" },
      el("button", { type: "button", id: "previous", title: "previous of the table (k)", onclick: () => step(-1) }, "↑"),
      el("button", { type: "button", id: "next", title: "next of the table (j)", onclick: () => step(1) }, "↓")),
    siblings.length > 1 && el("nav", { class: "siblings", "aria-label": "members of its group" }, "its group:",
      siblings.map((other) => el("a", { href: linkTo(other), class: other === at ? "at" : "", "aria-current": other === at ? "true" : null, title: `member ${columns.member[other]}, reward ${number(columns.reward[other])}` },
        `${columns.member[other]}`, el("small", {}, ` · ${number(columns.reward[other], 2)}`)))));
}

function factsOf(at) {
  const told = [
    ["reward", number(columns.reward[at])],
    ["trainable", columns.trainable[at] ? "yes" : "no"],
    ["turns", number(columns.turns[at])],
    ["sampled", count(columns.generated[at], "token")],
    ["observed", count(columns.observed[at], "token")],
    ["prompt", count(columns.prompt[at], "token")],
    ["tool calls", columns.errors[at] ? `${columns.calls[at]}, ${count(columns.errors[at], "error")}` : number(columns.calls[at])],
    ["took", seconds(columns.seconds[at])],
    ["generating", seconds(columns.generation_s[at])],
    ["tools", seconds(columns.tool_s[at])],
    columns.versions[at].length > 0 && ["weights", columns.versions[at].join(", ")],
    columns.drift[at] && ["text vs. rendering", columns.drift[at].replaceAll("_", " ")],
  ].filter(Boolean);
  return el("dl", { class: "facts" }, told.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function causeOf(facts) {
  if (!facts.cause && !facts.limit_source) return null;
  return el("section", { class: "cause" },
    facts.limit_source && el("p", {}, "ended by ", el("code", {}, facts.limit_source)),
    facts.cause && el("p", {}, el("b", {}, facts.cause.type), ": ", facts.cause.message),
    facts.cause?.traceback && el("details", {}, el("summary", {}, "traceback"), el("pre", {}, facts.cause.traceback)));
}

// Lanes: the waits of the whole, and each turn, with what it did after each other; each segment has its own.
function waterfall(times, segments) {
  const first = Math.min(...times.map((each) => each.start)), last = Math.max(...times.map((each) => each.end));
  const lanes = lanesOf(times, segments);
  const room = document.documentElement.clientWidth - 50;
  const width = Math.max(600, Math.min(1270, room)), left = 140, height = 20, bottom = 24;
  const x = scale(0, last - first || 1e-9, left, width - 60);
  const chart = svg("svg", { class: "waterfall", viewBox: `0 0 ${width} ${lanes.length * height + bottom}`, role: "img", "aria-label": `waterfall of ${seconds(last - first)}` });
  for (const value of ticks(0, last - first, 6)) {
    chart.append(svg("line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: lanes.length * height }),
      svg("text", { class: "tick", x: x(value), y: lanes.length * height + 16, "text-anchor": "middle" }, seconds(value)));
  }
  lanes.forEach((lane, index) => {
    const top = index * height + 3;
    if (!lane.items.length) return chart.append(svg("text", { class: "lane title", x: 0, y: top + 11 }, lane.name));
    chart.append(svg("text", { class: "lane", x: left - 8, y: top + 11, "text-anchor": "end" }, lane.name));
    for (const each of lane.items) {
      const from = x(each.start - first), to = x(each.end - first);
      const box = svg("rect", { class: `p-${each.phase}`, x: from, y: top, width: Math.max(1.5, to - from), height: height - 6, rx: 1.5 });
      const told = [PHASE_NAMES.get(each.phase) ?? each.phase, each.label, `${seconds(each.end - each.start)}, from ${seconds(each.start - first)}`, each.note];
      chart.append(withTip(box, told.filter(Boolean)));
    }
    const end = Math.max(...lane.items.map((each) => each.end)) - first;
    const spent = sum(lane.items.map((each) => each.end - each.start));
    chart.append(svg("text", { class: "tick", x: x(end) + 5, y: top + 11 }, seconds(spent)));
  });
  const used = PHASES.filter((phase) => times.some((each) => each.phase === phase.key));
  return el("section", {}, el("h2", {}, "Where its time went"), el("div", { class: "scrolls" }, chart),
    legend(used.map((phase) => ({ name: `${phase.name} ${seconds(sum(times.filter((each) => each.phase === phase.key).map((each) => each.end - each.start)))}`, style: `p-${phase.key}` }))));
}

// Of several segments each has a lane of nothing but its title above those of its turns.
function lanesOf(times, segments) {
  const groups = new Map();
  for (const each of times) {
    const place = placeOf(each, segments);
    if (!groups.has(place)) groups.set(place, new Map());
    const lanes = groups.get(place), name = laneName(each);
    if (!lanes.has(name)) lanes.set(name, { name: name.length > 20 ? `${name.slice(0, 19)}…` : name, start: each.start, items: [] });
    const lane = lanes.get(name);
    lane.start = Math.min(lane.start, each.start);
    lane.items.push(each);
  }
  const found = [...groups].map(([place, lanes]) => ({ place, lanes: [...lanes.values()].sort((one, other) => one.start - other.start) }));
  if (segments.length === 1) return found.flatMap((group) => group.lanes).sort((one, other) => one.start - other.start);
  found.sort((one, other) => one.place - other.place);
  const title = (place) => ({ name: segments[place] ? titleOf(segments[place], place) : "The trajectory", items: [] });
  return found.flatMap(({ place, lanes }) => (place < 0 ? lanes : [title(place), ...lanes]));
}

// The index of the segment in which it happened; one before all of them, or after, is of the whole.
function placeOf(each, segments) {
  if (each.phase === "place") return -1;
  const hasTurn = each.turn !== null && each.turn !== undefined;
  if (!hasTurn && !each.path) return segments.length;
  const own = segments.findIndex((segment) => segment.path === each.path && segment.spans.some((span) => span.turn === each.turn));
  if (own >= 0) return own;
  const last = segments.findLastIndex((segment) => segment.path === each.path); // its turn has no tokens
  return last >= 0 ? last : segments.length;
}

function laneName(each) {
  if (each.turn !== null && each.turn !== undefined) return each.phase === "tool" ? `turn ${each.turn} ${each.label ?? "tool"}` : `turn ${each.turn}`;
  return { place: "start", reward: "reward", group: "its group" }[each.phase] ?? "beside turns";
}

function titleOf(segment, index) {
  return `Segment ${index}: ${segment.purpose}`;
}

function segmentView(segment, index, facts, times, known, versions) {
  const isOnly = facts.segments.length === 1;
  const parts = [];
  for (const span of segment.spans) {
    const told = span.turn ? times.filter((each) => each.turn === span.turn && each.path === segment.path) : [];
    parts.push(spanView(span, told, known, versions), callsView(span.calls, told));
  }
  const parent = segment.parent && el("small", {}, ` from segment ${segment.parent[0]} at token ${number(segment.parent[1])}`);
  const title = isOnly ? el("h2", {}, "Turn by turn")
    : el("h2", {}, titleOf(segment, index), parent, segment.reward !== null && segment.reward !== undefined && el("small", {}, ` reward ${number(Number(segment.reward))}`));
  return el("section", { class: "segment" }, title, parts.filter(Boolean));
}

function spanView(span, told, known, versions) {
  const spent = ["queue", "prefill", "decode"].map((phase) => [phase, sum(told.filter((each) => each.phase === phase).map((each) => each.end - each.start))]).filter(([, value]) => value > 0);
  const replica = told.find((each) => each.phase === "decode" || each.phase === "prefill")?.label;
  const name = span.kind === "generated" ? `turn ${span.turn}` : span.kind;
  const notes = [count(span.count, "token")];
  if (span.kind === "generated") {
    if (span.finish && span.finish !== "stop") notes.push(`ended by ${span.finish}`);
    if (span.versions?.length) notes.push(`weights ${span.versions.map(([version]) => version).join(", ")}`);
    const logProbs = Array.from(span.logProbs).filter((value) => !Number.isNaN(value));
    if (logProbs.length) notes.push(`mean log-prob ${number(sum(logProbs) / logProbs.length)}`);
    if (replica) notes.push(replica);
    for (const [phase, value] of spent) notes.push(`${PHASE_NAMES.get(phase)} ${seconds(value)}`);
  }
  return el("article", { class: `span ${span.kind}` },
    el("header", {}, el("b", {}, name), el("span", {}, notes.join(" · "))),
    tokensView(span, known, versions));
}

function callsView(calls, told) {
  if (!calls?.length) return null;
  const timed = told.filter((each) => each.phase === "tool");
  return el("div", { class: "calls" }, calls.map((call) => {
    const at = timed.findIndex((each) => each.label === call.name);
    const time = at < 0 ? null : timed.splice(at, 1)[0];
    const isError = time?.note?.startsWith("error");
    return el("article", { class: isError ? "call error" : "call" },
      el("header", {}, el("b", {}, call.name || "invalid call"), el("span", {}, [time && seconds(time.end - time.start), time?.note].filter(Boolean).join(" · "))),
      el("div", { class: "sides" },
        el("div", {}, el("h3", {}, "arguments"), el("pre", { dir: "auto" }, withSigns(call.arguments === null || call.arguments === undefined ? call.raw ?? "" : JSON.stringify(call.arguments, null, 2)))),
        el("div", {}, el("h3", {}, "result"), el("pre", { dir: "auto" }, call.result === null ? "no result" : withSigns(call.result)))));
  }));
}

function restOf(facts) {
  const shown = { prompt: facts.prompt, extra: facts.extra, metrics: facts.metrics, turn_scores: facts.turn_scores };
  const parts = Object.entries(shown).filter(([, value]) => value && Object.keys(value).length);
  if (!parts.length) return null;
  return el("section", {}, el("h2", {}, "Also recorded"), parts.map(([name, value]) =>
    el("details", {}, el("summary", {}, name.replaceAll("_", " ")), el("pre", { dir: "auto" }, JSON.stringify(value, null, 2)))));
}
