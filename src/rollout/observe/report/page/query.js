// Queries of the table: words, and comparisons such as tool:search, reward<0.5 or outcome:failed|rejected.

// Names of a query, and the column that each means.
const FIELDS = {
  uid: "uid", group: "group", member: "member", outcome: "outcome", reason: "reason", reward: "reward",
  turns: "turns", tokens: "generated", sampled: "generated", prompt: "prompt", observed: "observed",
  calls: "calls", errors: "errors", seconds: "seconds", generation: "generation_s", tools: "tool_s",
  tool: "tools", finish: "finish", version: "versions", drift: "drift", resumes: "resumes",
  trainable: "trainable", task: "task", answer: "answer", replica: "replicas",
};

// Within quotes spaces and | are a value's own; \" and \\ are a quote and a backslash there.
const QUOTED = String.raw`"((?:[^"\\]|\\[^])*)"?`;
const TERMS = new RegExp(String.raw`(?:[^\s"]|${QUOTED})+`, "g");
const VALUES = new RegExp(String.raw`(?:[^|"]|${QUOTED})+`, "g");

function quoted(value) {
  return /^[\w./-]+$/.test(value) && value !== "none" ? value : `"${value.replace(/[\\"]/g, "\\$&")}"`;
}

function unquoted(text) {
  return text.replace(new RegExp(QUOTED, "g"), (_, inner) => inner.replace(/\\([\\"])/g, "$1"));
}

function termsOf(query) {
  return query.match(TERMS) ?? [];
}

// A query as tests of a row; a term that is no comparison is searched in what the table knows.
function compiled(query) {
  return termsOf(query).map((term) => {
    const found = /^(-?)([a-z_]+)(:|<=|>=|<|>|=)([^]*)$/i.exec(term);
    const key = found && FIELDS[found[2].toLowerCase()];
    if (!key || !columns[key]) return containing(unquoted(term).toLowerCase());
    const [, not, , sign, raw] = found;
    const tests = (raw.match(VALUES) ?? [""]).map((each) => comparing(columns[key], sign, each));
    return (at) => tests.some((test) => test(at)) !== Boolean(not);
  });
}

function containing(text) {
  return (at) => {
    if (names[at].toLowerCase().includes(text)) return true;
    return ["outcome", "reason", "task", "answer", "drift"].some((key) => columns[key][at].toLowerCase().includes(text))
      || columns.tools[at].some((name) => name.toLowerCase().includes(text));
  };
}

function comparing(values, sign, raw) {
  const given = unquoted(raw), wanted = Number(given), text = given.toLowerCase();
  if (sign === "<") return (at) => values[at] !== null && values[at] < wanted;
  if (sign === ">") return (at) => values[at] !== null && values[at] > wanted;
  if (sign === "<=") return (at) => values[at] !== null && values[at] <= wanted;
  if (sign === ">=") return (at) => values[at] !== null && values[at] >= wanted;
  if (raw === "none") return (at) => values[at] === null || values[at] === "" || values[at].length === 0;
  return (at) => {
    const value = values[at];
    if (Array.isArray(value)) return value.some((each) => String(each).toLowerCase() === text);
    if (typeof value === "number") return value === wanted;
    if (typeof value === "boolean") return String(value) === text;
    if (value === null) return false;
    return sign === "=" ? value.toLowerCase() === text : value.toLowerCase().includes(text);
  };
}

// The query with this field's term replaced.
function withTerm(query, field, value) {
  const rest = termsOf(query).filter((term) => !term.startsWith(`${field}:`));
  if (value) rest.push(`${field}:${quoted(value)}`);
  return rest.join(" ");
}

// What the query says that a field be; "" where it says nothing of it.
function valueIn(query, field) {
  const term = termsOf(query).find((each) => each.startsWith(`${field}:`));
  return term ? unquoted(term.slice(field.length + 1)) : "";
}
