// The whole page: what the run was, findings, plots, the table; where a link leads; keys.

const KEYS = [
  ["/", "search"], ["j k  ↓ ↑", "next, previous trajectory"], ["Enter", "open it"], ["Escape", "back to the table"],
  ["m l w", "colour tokens by mask, log-prob, weight version"], ["g", "to the table"], ["f", "to the findings"],
  ["t", "light, dark, as the system"], ["?", "these keys"],
];

function linkTo(at) {
  return `#${encodeURIComponent(names[at])}`;
}

function topBar() {
  byId("top").append(...[
    el("a", { class: "brand", href: "#" }, "rollout"),
    el("span", { class: "where", title: report.directory }, report.title),
    report.is_growing && el("span", { class: "badge growing" }, "still running"),
    report.is_growing && el("label", {}, el("input", { type: "checkbox", id: "reload", onchange: keepReloading }), " reload"),
    el("span", { class: "space" }),
    el("span", { class: "muted", title: "when this page was written" }, report.made_at),
    el("button", { type: "button", id: "theme", title: "light or dark (t)", onclick: nextTheme }, "◐"),
    el("button", { type: "button", id: "keys", title: "keys (?)", onclick: toggleHelp }, "?"),
  ].filter(Boolean));
}

function overview() {
  const view = byId("overview");
  for (const section of [summary(), about(), findings(), timeSpent(), plots(), toolsTable(), replicasTable(), tableView(), notes()]) {
    if (section) view.append(section);
  }
}

function summary() {
  return el("section", { class: "tiles" }, report.summary.map(([name, value, note]) =>
    el("div", {}, el("span", {}, name), el("b", {}, value), note && el("small", {}, note))));
}

function findings() {
  const found = report.findings;
  const list = found.length
    ? el("ol", {}, found.map((each) => el("li", { class: each.severity, "data-kind": each.kind },
        el("h3", {}, each.title), el("p", {}, each.text),
        each.filter && el("button", { type: "button", onclick: () => showThese(each.filter) }, "show these"))))
    : el("p", { class: "good" }, report.looked_for);
  return el("section", { id: "findings", tabindex: -1 }, el("h2", {}, "Findings"), list);
}

function timeSpent() {
  const spent = report.spent;
  if (!spent.length) return null;
  const entries = spent.map(([key, value]) => ({ name: PHASE_NAMES.get(key) ?? key, value, style: `p-${key}` }));
  const whole = sum(entries.map((entry) => entry.value)) || 1;
  return el("section", {}, el("h2", {}, "Where the time of trajectories went"),
    el("div", { class: "card" }, stacked(entries, seconds),
      legend(entries.map((entry) => ({ name: `${entry.name} ${share(entry.value / whole)}`, style: entry.style })))));
}

function plots() {
  const cards = el("div", { class: "plots" });
  const pick = (field) => (from, to) => showThese(from === to ? `${field}:${from}` : `${field}>=${from} ${field}<${to}`);
  const outcomes = new Map();
  columns.outcome.forEach((outcome, at) => {
    const name = columns.reason[at] ? `${outcome} ${columns.reason[at]}` : outcome;
    const entry = outcomes.get(name) ?? { name, outcome, reason: columns.reason[at], value: 0, style: `o-${outcome}` };
    entry.value++;
    outcomes.set(name, entry);
  });
  const ordered = [...outcomes.values()].sort((one, other) => other.value - one.value);
  for (const entry of ordered) entry.share = entry.value / total;
  const most = ordered.slice(0, 7);
  const rewards = histogram("Rewards", columns.reward, { onPick: pick("reward") });
  cards.append(...[
    rewards,
    ordered.length && bars("Outcomes", count(total, "trajectory"), most, {
      format: (value) => number(value),
      onPick: (entry) => showThese(queryOf(entry, ordered)),
    }),
    histogram("Sampled tokens", columns.generated, { whole: true, unit: "tokens", onPick: pick("tokens") }),
    histogram("Turns", columns.turns, { whole: true, unit: "turns", onPick: pick("turns") }),
    ...overTime(),
    tail(),
  ].filter(Boolean));
  return cards.childElementCount ? el("section", {}, el("h2", {}, "The run in pictures"), cards) : null;
}

// Exactly those with an outcome and its reason; without one, where others with the outcome have one.
function queryOf({ outcome, reason }, entries) {
  const isOnly = entries.filter((each) => each.outcome === outcome).length === 1;
  if (isOnly) return `outcome:${outcome}`;
  return `outcome:${outcome} reason${reason ? `=${quoted(reason)}` : ":none"}`;
}

function overTime() {
  const series = report.series;
  if (!series.step) return [];
  const made = [];
  if (series.throughput.length) made.push(lines("Throughput", "sampled tokens a second", [{ name: "tokens/s", values: series.throughput, style: "s-0" }], series.step));
  if (series.in_flight.length) made.push(lines("In flight", "trajectories, by what they do", [
    { name: "in flight", values: series.in_flight, style: "s-0", filled: true }, // else another line may hide it
    { name: "on engines", values: series.on_engines, style: "s-1" },
    { name: "with tools", values: series.with_tools, style: "s-2" },
  ], series.step));
  const replicas = series.replicas.slice(0, 6);
  if (replicas.length > 1) made.push(lines("Requests on replicas", series.replicas.length > 6 ? `the first 6 of ${series.replicas.length}` : "at once", replicas.map((each, at) => ({ ...each, style: `s-${at}` })), series.step));
  if (series.lag.some((value) => value > 0)) made.push(lines("Loop lag", "longest delay of the event loop", [{ name: "lag", values: series.lag, style: "s-3" }], series.step, { format: (value) => seconds(value), unit: " s" }));
  return made;
}

// How many had not ended when; the last of them keep GPUs waiting.
function tail() {
  const { ends, step } = report.series;
  if (!ends || ends.length < 2) return null;
  const last = ends[ends.length - 1], late = quantile(ends, 0.9);
  const size = 120, width = last / size;
  const left = Array.from({ length: size + 1 }, (_, at) => ends.length - ends.findLastIndex((end) => end <= at * width) - 1);
  const told = `the last 10 % took ${share((last - late) / (last || 1))} of the time`;
  return lines("The tail", told, [{ name: "not ended", values: left, style: "s-4" }], width || 1e-9);
}

function simpleTable(id, title, head, rows) {
  return el("section", { id }, el("h2", {}, title), el("div", { class: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, at) => el("th", { scope: "col", class: at ? "number" : "" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value, at) => el("td", { class: at ? "number" : "" }, value))))))));
}

function toolsTable() {
  if (!report.tools.length) return null;
  const called = new Set(columns.tools.flat());
  // What no call has as its name, such as (unknown), stands for calls that failed.
  const those = (name) => called.has(name) ? `tool:${quoted(name)}` : "errors>0";
  return simpleTable("tools", "Tools", ["tool", "calls", "not run", "errors", "mean", "median", "95 %", "longest", "altogether"], report.tools.map((tool) => [
    el("button", { type: "button", class: "plain", onclick: () => showThese(those(tool.name)) }, tool.name),
    number(tool.calls), number(tool.refused), number(tool.errors),
    ...[tool.mean, tool.median, tool.p95, tool.longest, tool.total].map((took) => tool.refused < tool.calls ? seconds(took) : "–")]));
}

function replicasTable() {
  if (!report.replicas.length) return null;
  return simpleTable("replicas", "Replicas", ["replica", "requests", "tokens", "tokens/s", "busy", "at once", "queue", "losses"], report.replicas.map((replica) => [
    replica.name, number(replica.requests), number(replica.tokens), number(replica.speed, 1), replica.busy === null ? "–" : share(replica.busy), number(replica.at_once, 1), seconds(replica.queue), number(replica.losses)]));
}

function about() {
  return el("section", { id: "about", "aria-label": "what the run was" },
    el("dl", { class: "facts" }, report.run.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    report.config && el("details", {}, el("summary", {}, "configuration"), el("pre", {}, JSON.stringify(report.config, null, 2))));
}

function notes() {
  return el("section", {}, report.notes.map((note) => el("p", { class: "note" }, note)));
}

function show(which) {
  byId("overview").hidden = which !== "overview";
  byId("trajectory").hidden = which !== "trajectory";
  hideTip();
}

let scrolled = 0, opened = null;

async function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  const at = rowOf.get(name);
  if (at === undefined) {
    opening++;
    show("overview");
    byId("trajectory").replaceChildren();
    drawRows();
    if (opened !== null) {
      window.scrollTo(0, scrolled);
      moveTo(Math.max(0, table.order.indexOf(opened)));
      byId("grid").focus({ preventScroll: true });
      opened = null;
    } else if (name && byId(name)) byId(name).scrollIntoView();
    return;
  }
  if (opened === null) scrolled = window.scrollY;
  opened = at;
  await openTrajectory(at);
  window.scrollTo(0, 0);
}

function step(by) {
  const place = table.order.indexOf(opened) + by;
  if (place < 0 || place >= table.order.length) return;
  opened = table.order[place];
  location.hash = linkTo(opened);
}

const THEMES = ["auto", "light", "dark"];

function kept(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(`rollout-${name}`);
    localStorage.setItem(`rollout-${name}`, value);
  } catch {
    // A browser may keep nothing for files.
  }
  return null;
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-label", `theme: ${theme}`);
  byId("theme").textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  setTheme(theme);
  kept("theme", theme);
  say(`theme: ${theme}`);
}

function toggleHelp() {
  const help = byId("help");
  if (help.open) return help.close();
  help.replaceChildren(el("h2", {}, "Keys"), el("dl", { class: "keys" }, KEYS.map(([key, what]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)))),
    el("p", { class: "muted" }, "Filters: words, field:value, field:one|other, field<number; a dash before a term excludes. Fields: ", Object.keys(FIELDS).join(", "), "."),
    el("button", { type: "button", onclick: () => help.close() }, "close"));
  help.showModal();
}

// A page of a run that grows is loaded again from its file, where it stands.
let reloading = null;

function keepReloading() {
  clearInterval(reloading);
  const wanted = byId("reload").checked;
  try {
    sessionStorage.setItem("rollout-reload", wanted ? "1" : "");
  } catch {
    // As above.
  }
  if (wanted) reloading = setInterval(() => { remember(); location.reload(); }, 5000);
}

function remember() {
  try {
    sessionStorage.setItem("rollout-query", table.query);
  } catch {
    // As above.
  }
}

function recall() {
  try {
    table.query = sessionStorage.getItem("rollout-query") ?? "";
    if (report.is_growing && sessionStorage.getItem("rollout-reload")) {
      byId("reload").checked = true;
      keepReloading();
    }
  } catch {
    // As above.
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping) return;
  const isOpened = opened !== null;
  const actions = {
    "/": () => { if (isOpened) location.hash = ""; byId("search").focus(); byId("search").select(); },
    "?": toggleHelp,
    t: nextTheme,
    m: () => isOpened && colourBy("mask"),
    l: () => isOpened && colourBy("log_prob"),
    w: () => isOpened && colourBy("version"),
    j: () => (isOpened ? step(1) : startTable(1)),
    k: () => (isOpened ? step(-1) : startTable(-1)),
    Escape: () => isOpened && (location.hash = ""),
    g: () => { if (isOpened) location.hash = ""; byId("list").scrollIntoView(); byId("grid").focus(); },
    f: () => { if (isOpened) location.hash = ""; byId("findings").scrollIntoView(); byId("findings").focus(); },
  };
  if (!(event.key in actions) || (event.target.id === "grid" && "jk".includes(event.key))) return;
  actions[event.key]();
  event.preventDefault();
}

function startTable(by) {
  byId("grid").focus();
  moveTo(table.at + by);
}

topBar();
setTheme(kept("theme") ?? "auto");
recall();
overview();
filterBy(table.query);
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", follow);
window.addEventListener("resize", drawRows);
follow();
document.documentElement.dataset.ready = "yes";
