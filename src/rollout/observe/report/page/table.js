// The table of trajectories: filtered by a query, sorted, and drawn only where it is looked at.

const ROW_HEIGHT = 30;
const LEAST_SHARED = 20;
const SHOWN_COLUMNS = [
  { key: "name", title: "trajectory", wide: "minmax(110px, 1.4fr)", values: names },
  { key: "outcome", title: "outcome", wide: "minmax(104px, 1fr)", values: columns.outcome },
  { key: "reward", title: "reward", wide: "72px", numeric: true },
  { key: "turns", title: "turns", wide: "56px", numeric: true },
  { key: "generated", title: "sampled", wide: "76px", numeric: true, hint: "tokens that the model sampled" },
  { key: "prompt", title: "prompt", wide: "72px", numeric: true, hint: "tokens of prompts" },
  { key: "calls", title: "calls", wide: "56px", numeric: true, hint: "tool calls" },
  { key: "seconds", title: "seconds", wide: "76px", numeric: true },
  { key: "task", title: "task", wide: "minmax(140px, 3fr)", values: columns.task, hint: "the last question" },
];
const SHARED_BEGINNING = sharedBeginning(columns.task);

const table = { order: [], sort: { key: null, falling: false }, query: "", at: 0, deep: null };

function select() {
  const tests = compiled(table.query);
  const found = [];
  for (let at = 0; at < total; at++) {
    if (table.deep ? !table.deep.has(at) : !tests.every((test) => test(at))) continue;
    found.push(at);
  }
  const { key, falling } = table.sort;
  if (key) {
    const values = key === "name" ? names : columns[key];
    const side = falling ? -1 : 1;
    found.sort((one, other) => {
      const left = values[one], right = values[other];
      if (left === right) return one - other;
      if (left === null) return 1;
      if (right === null) return -1;
      if (typeof left === "string") return side * left.localeCompare(right, "en", { numeric: true });
      return side * (left < right ? -1 : 1);
    });
  }
  table.order = found;
  table.at = Math.min(table.at, Math.max(0, found.length - 1));
}

function tableView() {
  const search = el("input", {
    id: "search", type: "search", placeholder: "search, or outcome:length reward<0.5 tool:search tokens>1000 …",
    "aria-label": "filter the trajectories", spellcheck: "false", autocomplete: "off", value: table.query,
    oninput: () => filterBy(search.value, { typed: true }),
    onkeydown: (event) => {
      if (event.key === "ArrowDown" || (event.key === "Enter" && !event.shiftKey)) {
        byId("grid").focus();
        event.preventDefault();
      } else if (event.key === "Escape") {
        filterBy("");
        byId("grid").focus();
        event.stopPropagation();
      }
    },
  });
  const deep = el("button", { type: "button", id: "deep", title: "search in all tokens, arguments and results", onclick: searchTexts }, "in all texts");
  const clear = el("button", { type: "button", id: "clear", onclick: () => filterBy("") }, "clear");
  const outcomes = [...new Set(columns.outcome)].sort();
  const choose = el("select", { id: "outcome", "aria-label": "outcome", onchange: () => filterBy(withTerm(table.query, "outcome", choose.value)) },
    el("option", { value: "" }, "every outcome"), outcomes.map((each) => el("option", { value: each }, each)));
  const tools = [...new Set(columns.tools.flat())].sort();
  const chooseTool = tools.length > 0 && el("select", { id: "tool", "aria-label": "tool", onchange: () => filterBy(withTerm(table.query, "tool", chooseTool.value)) },
    el("option", { value: "" }, "every tool"), tools.map((each) => el("option", { value: each }, each)));
  const template = SHOWN_COLUMNS.map((column) => column.wide).join(" ");
  const head = el("div", { class: "row head", role: "row" }, SHOWN_COLUMNS.map((column) =>
    el("span", { role: "columnheader", id: `sort-${column.key}`, class: column.numeric ? "number" : "", title: column.hint ?? null },
      el("button", { type: "button", tabindex: -1, onclick: () => sortBy(column) }, column.title))));
  head.style.gridTemplateColumns = template;
  const body = el("div", { id: "rows", class: "rows", role: "rowgroup" });
  const grid = el("div", {
    id: "grid", class: "grid-box", role: "grid", tabindex: 0, "aria-label": "trajectories",
    "aria-rowcount": total, onscroll: drawRows, onkeydown: moveInTable,
  }, head, body);
  grid.style.setProperty("--columns", template);
  return el("section", { id: "list" },
    el("h2", {}, "Trajectories"),
    el("div", { class: "filters" }, search, deep, choose, chooseTool, clear, el("span", { id: "matched", role: "status" })),
    grid);
}

function filterBy(query, { typed = false } = {}) {
  table.query = query;
  table.deep = null;
  table.at = 0;
  if (!typed) byId("search").value = query;
  for (const field of ["outcome", "tool"]) {
    const chosen = byId(field);
    const told = valueIn(query, field);
    if (chosen) chosen.value = [...chosen.options].some((each) => each.value === told) ? told : "";
  }
  remember();
  refreshTable();
}

function showThese(query) {
  filterBy(query);
  byId("list").scrollIntoView({ behavior: "instant", block: "start" });
  byId("grid").focus({ preventScroll: true });
}

function sortBy(column) {
  const isSame = table.sort.key === column.key;
  const first = Boolean(column.numeric);
  if (isSame && table.sort.falling !== first) table.sort = { key: null, falling: false };
  else table.sort = { key: column.key, falling: isSame ? !first : first };
  refreshTable();
}

function refreshTable() {
  select();
  byId("rows").style.height = `${table.order.length * ROW_HEIGHT}px`;
  byId("matched").textContent = table.order.length === total ? count(total, "trajectory") : `${number(table.order.length)} of ${count(total, "trajectory")}`;
  byId("clear").hidden = !table.query;
  for (const column of SHOWN_COLUMNS) {
    const isSorted = table.sort.key === column.key;
    byId(`sort-${column.key}`).setAttribute("aria-sort", isSorted ? (table.sort.falling ? "descending" : "ascending") : "none");
  }
  drawRows();
}

function drawRows() {
  const grid = byId("grid"), body = byId("rows");
  if (!grid) return;
  const first = Math.max(0, Math.floor(grid.scrollTop / ROW_HEIGHT) - 6);
  const last = Math.min(table.order.length, first + Math.ceil(grid.clientHeight / ROW_HEIGHT) + 12);
  const drawn = [];
  for (let place = first; place < last; place++) drawn.push(rowView(place));
  if (!table.order.length) drawn.push(el("p", { class: "none" }, "No trajectory matches."));
  body.replaceChildren(...drawn);
  grid.setAttribute("aria-activedescendant", table.order.length ? `row-${table.at}` : "");
}

function rowView(place) {
  const at = table.order[place];
  const row = el("a", {
    id: `row-${place}`, class: place === table.at ? "row at" : "row", role: "row", href: linkTo(at), tabindex: -1,
    "aria-rowindex": place + 1, "aria-selected": place === table.at ? "true" : "false",
    onclick: () => { table.at = place; },
  }, SHOWN_COLUMNS.map((column) => cell(column, at)));
  row.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
  return row;
}

function cell(column, at) {
  const value = (column.values ?? columns[column.key])[at];
  if (column.key === "outcome") return el("span", { role: "gridcell" }, outcomeBadge(at));
  const kind = column.numeric ? "number" : "";
  let text = column.numeric ? number(value, column.key === "seconds" ? 2 : 3) : value;
  if (column.key === "task" && value && SHARED_BEGINNING) text = `… ${value.slice(SHARED_BEGINNING)}`;
  return el("span", { role: "gridcell", class: kind, title: column.numeric ? null : value }, text);
}

// Characters with which all tasks begin, in whole words: they would fill the column and tell nothing apart.
function sharedBeginning(tasks) {
  const [first = "", ...others] = [...new Set(tasks.filter(Boolean))];
  let shared = others.length ? first.length : 0;
  for (const other of others) while (!other.startsWith(first.slice(0, shared))) shared -= 1;
  shared = first.lastIndexOf(" ", shared - 1) + 1;
  return shared >= LEAST_SHARED ? shared : 0;
}

function outcomeBadge(at) {
  const reason = columns.reason[at];
  return el("span", { class: `badge ${columns.outcome[at]}`, title: reason || null }, columns.outcome[at], reason && el("small", {}, ` ${reason}`));
}

function moveInTable(event) {
  const page = Math.max(1, Math.floor(byId("grid").clientHeight / ROW_HEIGHT) - 2);
  const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in moves) {
    moveTo(table.at + moves[event.key]);
    event.preventDefault();
  } else if (event.key === "Enter" && table.order.length) {
    location.hash = linkTo(table.order[table.at]);
    event.preventDefault();
  }
}

function moveTo(place) {
  table.at = Math.max(0, Math.min(table.order.length - 1, place));
  const grid = byId("grid");
  const top = table.at * ROW_HEIGHT, height = grid.clientHeight - ROW_HEIGHT;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + ROW_HEIGHT > grid.scrollTop + height) grid.scrollTop = top + ROW_HEIGHT - height;
  drawRows();
}

let searching = 0;

// Looks into the tokens, arguments and results of every trajectory, some at a time.
async function searchTexts() {
  const wanted = byId("search").value.trim().toLowerCase();
  if (!wanted) return byId("search").focus();
  const turn = ++searching, button = byId("deep");
  const found = new Set();
  for (let at = 0; at < total; at++) {
    if ((await wholeText(at)).toLowerCase().includes(wanted)) found.add(at);
    if (turn !== searching || byId("search").value.trim().toLowerCase() !== wanted) break;
    if (at % 50 === 49) button.textContent = `looked into ${number(at + 1)} of ${number(total)} …`;
  }
  if (turn !== searching) return;
  button.textContent = "in all texts";
  if (byId("search").value.trim().toLowerCase() !== wanted) return;
  table.deep = found;
  table.at = 0;
  refreshTable();
  say(`${count(found.size, "trajectory")} contain the text`);
}
