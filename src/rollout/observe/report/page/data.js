// What the run was: the report as it stands in the page, and what is inflated when it is asked for.

const report = JSON.parse(byId("report").textContent);
const columns = report.rows;
const total = columns.uid.length;
const names = columns.name;
const rowOf = new Map(names.map((name, at) => [name, at]));

const parsed = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
  else resolve();
});

// The JSON and the bytes after it of a packed block; null where there is none.
async function unpacked(id) {
  if (!byId(id)) await parsed;
  const block = byId(id);
  if (!block) return null;
  const packed = Uint8Array.from(atob(block.textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const text = new TextDecoder().decode(bytes.subarray(4, 4 + length));
  return { facts: JSON.parse(text), planes: bytes.subarray(4 + length) };
}

let texts = null;

// Texts of tokens by id; null where the run's tokenizer was not at hand.
function tokenTexts() {
  texts ??= unpacked("texts").then((block) => (block ? new Map(Object.entries(block.facts)) : null));
  return texts;
}

const UNKNOWN = 65535;

// A trajectory with `ids` and `logProbs` in each of its spans.
async function readTrajectory(at) {
  const block = await unpacked(`t${at}`);
  const { facts, planes } = block;
  const spans = facts.segments.flatMap((segment) => segment.spans);
  const size = sum(spans.map((span) => span.count));
  const sampled = sum(spans.map((span) => (span.kind === "generated" ? span.count : 0)));
  let token = 0, drawn = 0;
  for (const span of spans) {
    span.ids = new Uint32Array(span.count);
    for (let i = 0; i < span.count; i++, token++) {
      span.ids[i] = planes[token] | (planes[size + token] << 8) | (planes[2 * size + token] << 16);
    }
    if (span.kind !== "generated") continue;
    span.logProbs = new Float32Array(span.count);
    for (let i = 0; i < span.count; i++, drawn++) {
      const value = planes[3 * size + drawn] | (planes[3 * size + sampled + drawn] << 8);
      span.logProbs[i] = value === UNKNOWN ? NaN : -value / 1000;
    }
  }
  return facts;
}

// [{phase, start, end, label, ...}] in seconds from the start of the run; `path` is the conversation.
async function readTimes(at) {
  const block = await unpacked(`w${at}`);
  if (!block) return [];
  return block.facts.map(([phase, start, end, label, turn, note, path]) => ({ phase, start, end, label, turn, note, path }));
}

// The text of all spans, one after the other, for the search through everything.
async function wholeText(at) {
  const known = await tokenTexts();
  const facts = await readTrajectory(at);
  const pieces = [];
  for (const segment of facts.segments) {
    for (const span of segment.spans) {
      pieces.push(textOf(span, known));
      for (const call of span.calls ?? []) pieces.push(JSON.stringify(call.arguments), call.result ?? "");
    }
  }
  return pieces.join("\n");
}

function textOf(span, known) {
  if (span.text !== undefined) return span.text;
  if (!known) return "";
  let text = "";
  const runs = new Map((span.runs ?? []).map((run) => [run[0], run]));
  for (let at = 0; at < span.count; at++) {
    const run = runs.get(at);
    text += run ? run[2] : known.get(String(span.ids[at])) ?? "";
    if (run) at += run[1] - 1;
  }
  return text;
}
