// The dashboard: requests the measurements once a second, and subscribes to views and topics. No libraries; nothing is loaded from elsewhere.

import { barChart, brief, bytes, clockSpan, el, lineChart, number, ownTable, plain, replaceKeeping, right, rowsOf, shortRate, tableOf, when } from "./drawing.js";

const EVERY_MS = 1000, MAX_ROWS = 200, MAX_TAIL_ROWS = 50;
const $ = (id) => document.getElementById(id);
let measurements = null, tab = "pipeline", shown = {}, streams = new AbortController();

// ---- requests

function headers(more = {}) {
  const token = sessionStorage.getItem("token");
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.status === 401 && !options.again) {
    const token = prompt("The token of this server:");
    if (token) { sessionStorage.setItem("token", token); return request(path, { ...options, again: true }); }
  }
  const body = await response.json();
  if (!response.ok) throw new Error(body.fix ? `${body.message}\nTo fix: ${body.fix}` : body.message);
  return body;
}

async function subscribe(path, signal, onEvent) {
  let last = null, wait = 500;
  while (!signal.aborted) {
    try {
      const response = await fetch(path, { headers: headers(last ? { "Last-Event-ID": last } : {}), signal });
      if (!response.ok || !response.body) throw new Error(String(response.status));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      wait = 500;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        let end;
        while ((end = text.indexOf("\n\n")) >= 0) {
          const event = parseEvent(text.slice(0, end));
          text = text.slice(end + 2);
          if (event.id) last = event.id;
          if (event.data) onEvent(event.kind, JSON.parse(event.data));
        }
      }
    } catch (problem) {
      if (signal.aborted) return;
      last = null;
    }
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 8000);
  }
}

function parseEvent(block) {
  const event = { kind: "message", data: "", id: null };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const name = line.slice(0, at), value = line.slice(at + 1).trimStart();
    if (name === "event") event.kind = value;
    else if (name === "id") event.id = value;
    else if (name === "data") event.data += value;
  }
  return event;
}

// ---- the pipeline as a graph

const ONE_TO_ONE = new Set(["select", "key_by"]);

function flowOf(node, byId) {
  if (node.topic) { const topic = measurements.topics.find((each) => each.name === node.topic); if (topic) return topic.rows_per_second; }
  const rate = measurements.rates[`${node.id}.rows_out`];
  if (rate !== undefined) return Math.max(0, rate);
  if ((ONE_TO_ONE.has(node.kind) || node.kind === "view") && node.inputs.length === 1) return flowOf(byId.get(node.inputs[0]), byId);
  return undefined;
}

function layout(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node])), depth = new Map();
  const deep = (node) => { if (!depth.has(node.id)) { depth.set(node.id, 0); depth.set(node.id, Math.max(0, ...node.inputs.filter((id) => byId.has(id)).map((id) => deep(byId.get(id)) + 1))); } return depth.get(node.id); };
  nodes.forEach(deep);
  // An edge over several columns has a slot in each column between, so it crosses no box; edges from the same box share the slots.
  const columns = [], behind = new Map(), routes = [];
  for (const node of nodes) (columns[depth.get(node.id)] ??= []).push(node.id);
  for (const node of nodes) {
    behind.set(node.id, []);
    for (const from of node.inputs.filter((id) => byId.has(id))) {
      const route = [from];
      for (let column = depth.get(from) + 1; column < depth.get(node.id); column++) {
        const via = `${from} via ${column}`;
        if (!behind.has(via)) { columns[column].push(via); behind.set(via, [route.at(-1)]); }
        route.push(via);
      }
      behind.get(node.id).push(route.at(-1));
      routes.push([...route, node.id]);
    }
  }
  const position = new Map();
  columns.forEach((column) => {
    const wish = (id) => { const positions = behind.get(id).map((from) => position.get(from)).filter((at) => at !== undefined); return positions.length ? positions.reduce((sum, at) => sum + at, 0) / positions.length : 1e6; };
    column.sort((one, other) => wish(one) - wish(other));
    column.forEach((id, at) => position.set(id, column.length > 1 ? at / (column.length - 1) : 0.5));
  });
  return { byId, columns, routes };
}

function healthOf(node) {
  const names = Object.keys(measurements.rates).filter((name) => name.startsWith(`${node.id}.`));
  if (names.some((name) => /\.(diverted|late|errors|given_up)$/.test(name) && measurements.rates[name] > 0)) return "warn";
  if (measurements.dead.some((dead) => dead.of === node.id || dead.of === node.topic)) return "warn";
  return "";
}

function graph() {
  const { byId, columns, routes } = layout(measurements.plan.nodes);
  const wide = 146, gap = 40, tall = 40, space = 14, at = new Map(); // so that seven columns fit a screen of 1366
  const height = (id) => (byId.has(id) ? tall : 4), stack = (column) => column.reduce((sum, id) => sum + height(id) + space, 0);
  const tallest = Math.max(...columns.map(stack)), width = columns.length * (wide + gap) - gap + 8;
  columns.forEach((column, x) => { let y = 12 + (tallest - stack(column)) / 2; for (const id of column) { at.set(id, [x * (wide + gap) + 4, y + height(id) / 2]); y += height(id) + space; } });
  const edges = [], labels = [], labelCounts = new Map();
  for (const route of routes) {
    const flow = flowOf(byId.get(route[0]), byId);
    let [x, y] = at.get(route[0]), path = `M${(x += wide)},${y}`;
    for (const id of route.slice(1)) {
      const [to, level] = at.get(id), middle = (x + to) / 2;
      path += `C${middle},${y} ${middle},${level} ${to},${level}`;
      [x, y] = [to, level];
      if (!byId.has(id)) path += `L${(x += wide)},${y}`;
    }
    edges.push(el("path", { class: `edge ${flow > 0 ? "flows" : ""}`, d: path }));
    const nth = labelCounts.get(route.at(-1)) ?? 0; // where several edges end, above and below them
    if (flow === undefined || flow <= 0 || nth > 1) continue;
    labelCounts.set(route.at(-1), nth + 1);
    labels.push(el("text", { x: x - 3, y: nth ? y + 13 : y - 5, "text-anchor": "end", class: "soft flow" }, `${shortRate(flow)}/s`));
  }
  const boxes = measurements.plan.nodes.map((node) => {
    const [x, middle] = at.get(node.id), y = middle - tall / 2, name = node.label.length > 20 ? node.label.slice(0, 19) + "…" : node.label;
    const pick = () => { shown.node = shown.node === node.id ? null : node.id; draw(); };
    return el("g", { class: `node ${node.kind} ${node.stateful ? "keeps" : ""} ${healthOf(node)}`, transform: `translate(${x},${y})`, tabindex: 0, role: "button", "aria-pressed": String(shown.node === node.id), "aria-label": `${node.kind} ${node.label}`, "data-at": `node ${node.id}`, onclick: pick, onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); } } },
      el("rect", { width: wide, height: tall, rx: 6 }), el("text", { x: 9, y: 17 }, name), el("text", { x: 9, y: 32, class: "soft" }, node.kind === "written" ? "topic, written" : node.kind), el("title", {}, `${node.label}: ${node.about ?? node.kind}`));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The pipeline as a graph", "data-at": "graph" }, el("svg", { class: "graph", width, height: tallest + 24, viewBox: `0 0 ${width} ${tallest + 24}` }, edges, labels, boxes));
}

function detail() {
  const node = measurements.plan.nodes.find((each) => each.id === shown.node);
  if (!node) return el("p", { class: "soft" }, "Choose a box to see its step, its counts, and what it waits for.");
  const rows = Object.entries(measurements.run?.counts ?? {}).filter(([name]) => name.startsWith(`${node.id}.`)).map(([name, count]) => ({ what: name.slice(node.id.length + 1).replaceAll("_", " "), since_start: count, per_second: Math.round(10 * (measurements.rates[name] ?? 0)) / 10 }));
  const due = Object.values(measurements.run?.queries ?? {}).map((query) => query.due_us?.[node.id]).find((time) => time !== undefined);
  return el("div", {}, el("h2", {}, `${node.kind} ${node.label}`), node.about ? el("p", {}, node.about) : null, el("p", { class: "soft" }, [measurements.run?.steps?.[node.id] ? `state ${number(measurements.run.steps[node.id].keys)} keys, ${bytes(measurements.run.steps[node.id].bytes)}` : null, measurements.state[node.id] !== undefined ? `state files ${bytes(measurements.state[node.id])}` : null, due !== undefined ? `waits for event time ${when(due / 1e6)}` : null].filter(Boolean).join("; ")), rows.length ? ownTable(["what", "since_start", "per_second"], rowsOf(rows)) : null);
}

// ---- what each tab shows

const PAGES = {
  pipeline: { title: "Pipeline", draw: () => (measurements.plan ? [el("section", { class: "card", "aria-label": "Graph" }, graph()), el("section", { class: "card", "aria-live": "off" }, detail()), el("section", { class: "card" }, lineChart("Rows behind", measurements.series.at, { rows: measurements.series.behind }))] : [el("section", { class: "card" }, "No pipeline has run with this state directory yet.")]) },
  views: { title: "Views", begin: beginViews, draw: null },
  topics: { title: "Topics", begin: beginTopics, draw: drawTopics },
  time: { title: "Time", draw: drawTime },
  matches: { title: "Matches and alerts", begin: beginMatches, draw: null },
  dead: { title: "Dead letters", begin: beginDead, draw: drawDead },
  sql: { title: "SQL", begin: beginSql, draw: null },
};

function draw() {
  const page = PAGES[tab];
  if (page.draw && measurements) { const sections = page.draw(); if (sections) replaceKeeping($("panel"), ...sections); }
}

// Views: a live table and a chart

async function beginViews(signal) {
  const { views } = measurements?.run ? await request("/views") : { views: [] };
  if (signal.aborted) return;
  if (!views.length) {
    setTimeout(() => { if (!signal.aborted) show("views"); }, EVERY_MS);
    $("panel").replaceChildren(el("section", { class: "card" }, "This pipeline has no views yet."));
    return;
  }
  shown.view = views.some((view) => view.name === shown.view) ? shown.view : views[0].name;
  const live = el("section", { class: "card", id: "live" }, "…");
  const pick = (name) => { shown.view = name; show("views"); };
  $("panel").replaceChildren(el("div", { class: "side" }, el("section", { class: "card" }, el("h2", {}, "Views"), el("ul", { class: "picks" }, views.map((view) => el("li", {}, el("button", { "aria-current": String(view.name === shown.view), onclick: () => pick(view.name) }, view.name))))), live));
  followView(views.find((view) => view.name === shown.view), signal, live);
}

function followView(view, signal, section) {
  let rows = new Map(), tick = view.tick, waiting = false;
  const keyOf = (row) => JSON.stringify(view.key.map((name) => row[name]));
  const redraw = () => { if (!waiting) { waiting = true; setTimeout(() => { waiting = false; if (!signal.aborted) paint(); }, 200); } };
  const paint = () => {
    const list = [...rows.values()], ranking = rankingOf(view), names = list.length ? Object.keys(list[0].cells) : [];
    const some = ranking ? list.sort(inOrder(ranking)).slice(0, MAX_ROWS) : list.slice(-MAX_ROWS).reverse();
    const column = charted(view, ranking, names, list), bars = column ? some.slice(0, 12).map((row) => [labelOf(view, ranking, row.cells), parseFloat(row.cells[column]) || 0]) : [];
    replaceKeeping(section, el("h2", {}, view.name), el("p", { class: "soft", role: "status", id: "seen" }, `tick ${number(tick)}, ${number(list.length)} rows${list.length > MAX_ROWS ? `, of which the ${ranking ? "first" : "newest"} ${MAX_ROWS} are shown` : ""}`), barChart(column ?? "", bars), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Rows of ${view.name}`, "data-at": "rows" }, tableOf(names, some)));
    for (const row of rows.values()) row.how = null;
  };
  let fresh = null;
  subscribe(`/views/${encodeURIComponent(view.name)}/changes`, signal, (kind, data) => {
    if (kind === "snapshot") {
      fresh ??= new Map();
      for (const cells of data.rows) fresh.set(keyOf(cells), { cells, how: null });
      if (data.last) { rows = fresh; fresh = null; tick = data.tick; redraw(); }
    } else if (kind === "changes") {
      tick = data.tick;
      for (const change of data.changes) {
        const { _change_type: how, ...cells } = change, key = keyOf(cells);
        if (how === "delete") rows.delete(key);
        else if (how !== "update_preimage") { rows.delete(key); rows.set(key, { cells, how: how === "insert" ? "fresh" : "corrected" }); }
      }
      while (rows.size > 20000) rows.delete(rows.keys().next().value);
      redraw();
    }
  });
}

// A leaderboard is shown in the order that the plan has: within each of `per`, by `order`

const isNumber = (value) => !isNaN(parseFloat(value)) && isFinite(value);
const isTime = (value) => /^\d{4}-\d\d-\d\dT/.test(value);

function rankingOf(view) {
  const node = (measurements?.plan?.nodes ?? []).find((each) => each.kind === "view" && each.label === view.name);
  return node?.order?.length ? node : null;
}

function inOrder(ranking) {
  const ways = (row) => [...ranking.per.map((name) => [name, isTime(row.cells[name])]), ...ranking.order]; // of times, the newest first
  return (one, other) => {
    for (const [name, largestFirst] of ways(one)) {
      const a = one.cells[name] ?? null, b = other.cells[name] ?? null;
      if (a === b) continue;
      if (a === null || b === null) return a === null ? 1 : -1;
      const way = isNumber(a) && isNumber(b) ? parseFloat(a) - parseFloat(b) : a < b ? -1 : 1;
      if (way) return largestFirst ? -way : way;
    }
    return 0;
  };
}

function charted(view, ranking, names, list) {
  // The ranked column; else the last number outside the key, because aggregates come after their inputs.
  const numbers = names.filter((name) => !view.key.includes(name) && list.some((row) => isNumber(row.cells[name]))), first = ranking?.order[0][0];
  return numbers.includes(first) ? first : numbers.at(-1);
}

function labelOf(view, ranking, cells) {
  const text = ranking && Object.keys(cells).find((name) => typeof cells[name] === "string" && !isTime(cells[name]) && !isNumber(cells[name]));
  const names = text ? new Set([...ranking.per, text]) : view.key;
  return [...names].filter((name) => name !== "window_end").map((name) => brief(cells[name])).join(" ");
}

// Topics, groups

function beginTopics(signal) { shown.tail = null; if (shown.topic) followTopic(shown.topic, signal, MAX_TAIL_ROWS, (rows) => { shown.tail = rows; }); }

function followTopic(topic, signal, maxRows, onRows) {
  let rows = [];
  subscribe(`/topics/${encodeURIComponent(topic)}/tail?last=${maxRows}`, signal, (kind, data) => {
    const fresh = data.rows ?? [];
    rows = [...fresh.map((cells) => ({ cells, how: "fresh" })).reverse(), ...rows.map((row) => ({ cells: row.cells }))].slice(0, maxRows);
    if (fresh.length) onRows(rows);
  });
}

function drawTopics() {
  const rows = measurements.topics.map((topic) => ({ cells: { topic: el("button", { "aria-pressed": String(shown.topic === topic.name), "data-at": `topic ${topic.name}`, onclick: () => { shown.topic = shown.topic === topic.name ? null : topic.name; show("topics"); } }, topic.name), partitions: topic.partitions ?? null, offsets: topic.rows ?? topic.end, size: right(topic.bytes === undefined ? "" : bytes(topic.bytes)), per_second: Math.round(topic.rows_per_second) } }));
  const tail = shown.topic ? el("section", { class: "card" }, el("h2", {}, `The newest rows of ${shown.topic}`), shown.tail ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Newest rows", "data-at": "tail" }, tableOf(Object.keys(shown.tail[0]?.cells ?? {}), shown.tail)) : el("p", { class: "soft" }, "None yet.")) : null;
  const groups = Object.keys(measurements.groups).length ? el("section", { class: "card" }, el("h2", {}, "Groups"), ownTable(["group", "rows_behind"], rowsOf(Object.entries(measurements.groups).map(([group, behind]) => ({ group, rows_behind: behind })))), lineChart("Rows behind", measurements.series.at, measurements.series.lag)) : null;
  return [el("section", { class: "card" }, el("h2", {}, "Topics"), ownTable(["topic", "partitions", "offsets", "size", "per_second"], rows)), tail, groups];
}

// Time

function drawTime() {
  const watermarks = Object.entries(measurements.run?.watermarks ?? {});
  if (!watermarks.length) return [el("section", { class: "card" }, "No input has event time, or none has rows yet.")];
  const held = watermarks.flatMap(([input, watermark]) => (watermark.held_back_by ?? []).map((each) => ({ input, producer: plain(each.producer), newest_event: when(each.newest_us / 1e6), last_report: when(each.heard_us / 1e6) })));
  const rows = watermarks.map(([input, { watermark_us: us, producers }]) => ({ input, watermark: when(us === null ? null : us / 1e6), behind_the_wall_clock: us === null ? null : right(clockSpan(Math.max(0, measurements.at - us / 1e6))), producers }));
  const behind = Object.fromEntries(Object.entries(measurements.series.event_time).map(([name, list]) => [name, list.map((seconds, at) => (seconds === null ? null : Math.max(0, measurements.series.at[at] - seconds)))]));
  const counts = measurements.run?.counts ?? {}, due = Object.assign({}, ...Object.values(measurements.run?.queries ?? {}).map((query) => query.due_us ?? {}));
  const steps = [...new Set([...Object.keys(due), ...Object.keys(counts).filter((name) => name.endsWith(".windows_waiting")).map((name) => name.slice(0, -16))])].sort();
  const countsCorrections = (step) => /^(tumbling|hopping)/.test((measurements.plan?.nodes ?? []).find((node) => node.id === step)?.window);
  const open = steps.map((step) => ({ step, windows_open: counts[`${step}.windows_waiting`] ?? null, retained_for_corrections: counts[`${step}.windows_kept`] ?? null, waits_for: due[step] === undefined ? "nothing" : `event time ${when(due[step] / 1e6)}`, late_rows_used: counts[`${step}.corrected`] ?? (countsCorrections(step) ? 0 : null), rows_too_late: counts[`${step}.late`] ?? 0 }));
  return [
    el("section", { class: "card" }, el("h2", {}, "Watermarks and the wall clock"), ownTable(["input", "watermark", "behind_the_wall_clock", "producers"], rowsOf(rows)), lineChart("Event time behind the wall clock", measurements.series.at, behind, clockSpan)),
    el("section", { class: "card" }, el("h2", {}, "Producers that hold watermarks back"), held.length ? ownTable(["input", "producer", "newest_event", "last_report"], rowsOf(held)) : el("p", { class: "soft" }, "None.")),
    el("section", { class: "card" }, el("h2", {}, "Steps that wait for event time"), ownTable(["step", "windows_open", "retained_for_corrections", "waits_for", "late_rows_used", "rows_too_late"], rowsOf(open))),
  ];
}

// Matches of patterns and searches, and alerts

function matching() {
  const byId = new Map((measurements?.plan?.nodes ?? []).map((node) => [node.id, node])), through = new Set(["select", "where", "key_by", "union"]);
  const origin = (node) => { let at = byId.get(node.inputs[0]); while (at && through.has(at.kind)) at = byId.get(at.inputs[0]); return at?.kind; };
  return [...byId.values()].filter((node) => node.kind === "written" && ["match", "search", "gather", "alert"].includes(origin(node))).map((node) => node.topic).concat((measurements?.topics ?? []).map((topic) => topic.name).filter((name) => name === "alerts")).filter((name, at, all) => all.indexOf(name) === at);
}

function beginMatches(signal) {
  const topics = matching();
  if (!topics.length) return $("panel").replaceChildren(el("section", { class: "card" }, "This pipeline has no patterns and no stored searches."));
  $("panel").replaceChildren(...topics.map((topic) => {
    const section = el("section", { class: "card" }, el("h2", {}, topic), el("p", { class: "soft" }, "None yet."));
    followTopic(topic, signal, 15, (rows) => { if (!signal.aborted) replaceKeeping(section, el("h2", {}, topic), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": topic }, tableOf(Object.keys(rows[0].cells).filter((name) => name !== "_partition" && name !== "_offset"), rows))); });
    return section;
  }));
}

// Dead letters

function beginDead(signal) { shown.deadRows = null; if (shown.dead) followTopic(shown.dead, signal, MAX_TAIL_ROWS, (rows) => { shown.deadRows = rows; }); }

function drawDead() {
  if (!measurements.dead.length) return [el("section", { class: "card" }, "There are no dead letters.")];
  const replay = (dead) => async () => {
    try { const result = await request(`/dead/${encodeURIComponent(dead.of)}/replay`, { method: "POST" }); shown.replayed = `${dead.of}: ${number(result.replayed)} replayed, ${number(result.failed.length)} failed again${result.failed.length ? `: ${result.failed[0].reason}` : ""}.`; } catch (problem) { shown.replayed = problem.message; }
    draw();
  };
  const rows = measurements.dead.map((dead) => ({ cells: { dead_letters_of: dead.of, rows: dead.rows, show: el("button", { "aria-pressed": String(shown.dead === dead.name), "data-at": `dead ${dead.name}`, onclick: () => { shown.dead = dead.name; show("dead"); } }, "Show"), replay: el("button", { "data-at": `replay ${dead.name}`, "aria-label": `Replay the dead letters of ${dead.of}`, onclick: replay(dead) }, "Replay") } }));
  const deadRows = shown.dead && shown.deadRows ? el("section", { class: "card" }, el("h2", {}, shown.dead), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Dead letters", "data-at": "dead letters" }, ownTable(["at", "source", "reason", "row"], shown.deadRows.map((row) => ({ ...row, cells: { at: row.cells.at, source: row.cells.place, reason: row.cells.reason, row: row.cells.row } }))))) : null;
  return [el("section", { class: "card" }, el("h2", {}, "Dead letters: rows that could not be processed"), ownTable(["dead_letters_of", "rows", "show", "replay"], rows), el("p", { role: "status", id: "replayed" }, shown.replayed ?? "")), deadRows];
}

// SQL

async function beginSql(signal) {
  const { views } = measurements?.run ? await request("/views") : { views: [] };
  if (signal.aborted) return;
  if (!views.length) {
    setTimeout(() => { if (!signal.aborted) show("sql"); }, EVERY_MS);
    $("panel").replaceChildren(el("section", { class: "card" }, "There are no views to query yet."));
    return;
  }
  const text = el("textarea", { id: "query", "aria-label": "A query over the views", spellcheck: "false" });
  text.value = shown.query ?? `SELECT * FROM "${views[0].name}" LIMIT 20`;
  const output = el("div", { class: "scroll", id: "answer", tabindex: 0, role: "region", "aria-label": "The result", "aria-live": "polite" });
  const run = async () => {
    shown.query = text.value;
    try {
      const result = await request("/sql", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ query: text.value }) });
      output.replaceChildren(el("p", { class: "soft" }, `tick ${number(Math.max(...Object.values(result.ticks)))}, ${number(result.rows.length)} rows`), tableOf(result.columns, rowsOf(result.rows)));
    } catch (problem) { output.replaceChildren(el("pre", { class: "bad" }, problem.message)); }
  };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
  $("panel").replaceChildren(el("section", { class: "card" }, el("h2", {}, "SQL over the views, all at one tick"), text, el("p", {}, el("button", { id: "run", onclick: run }, "Run (Ctrl+Enter)"), el("span", { class: "soft" }, `  Views: ${views.map((view) => view.name).join(", ")}`)), output));
}

// ---- the frame

function show(name) {
  streams.abort();
  streams = new AbortController();
  tab = name;
  for (const button of document.querySelectorAll("[role=tab]")) { const mine = button.dataset.tab === name; button.setAttribute("aria-selected", String(mine)); button.tabIndex = mine ? 0 : -1; if (mine) $("panel").setAttribute("aria-labelledby", button.id); }
  const begun = PAGES[name].begin?.(streams.signal);
  begun?.catch?.((problem) => $("panel").replaceChildren(el("section", { class: "card" }, el("pre", { class: "bad" }, problem.message))));
  history.replaceState(null, "", `#${name}`);
  draw();
}

/* How long rows take from append to visible, in the view that takes longest. */
function visible(run) {
  const times = Object.values(run.views ?? {}).filter((view) => view.visible_p50_s != null).sort((a, b) => b.visible_p50_s - a.visible_p50_s);
  return times.length ? [["append to visible", `${times[0].visible_p50_s.toFixed(2)} s, p99 ${times[0].visible_p99_s.toFixed(2)} s`]] : [];
}

function head() {
  const run = measurements.run, health = $("health");
  $("name").textContent = run?.pipeline ?? measurements.plan?.pipeline ?? "Headrace";
  document.title = `${$("name").textContent} · Headrace`;
  const failing = run && run.failures > 0 && run.last_error, stopped = run && !run.is_running;
  health.className = `health ${!run ? "" : failing ? "bad" : stopped ? "warn" : "good"}`;
  health.textContent = !run ? (measurements.plan ? "starting" : "has not run yet") : failing ? `failing: ${run.last_error.split("\n")[0].slice(0, 120)}` : stopped ? "not running" : "running";
  const figures = run ? [["tick", number(run.tick)], ["rows per second", number(Math.round(run.rows_per_second))], ["rows behind", number(run.rows_behind)], ["last batch", `${run.batch_seconds.toFixed(2)} s, ${run.batch_width === "one" ? "one task" : "wide"}`], ...visible(run), ["state", bytes(run.state_bytes)], ["shards", run.shards]] : [];
  $("figures").replaceChildren(...figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
  const deadRows = measurements.dead.reduce((sum, each) => sum + each.rows, 0), badge = document.querySelector("[data-tab=dead] .count");
  badge.textContent = deadRows ? number(deadRows) : "";
  badge.hidden = !deadRows;
}

async function poll() {
  if (!document.hidden) {
    try { measurements = await request("/dashboard/facts"); head(); draw(); } catch (problem) { $("health").className = "health bad"; $("health").textContent = "the server does not answer"; }
  }
  setTimeout(poll, EVERY_MS);
}

const names = Object.keys(PAGES);
$("tabs").append(...names.map((name) => el("button", { role: "tab", id: `tab-${name}`, "data-tab": name, "aria-controls": "panel", onclick: () => show(name) }, PAGES[name].title, name === "dead" ? el("span", { class: "count", hidden: true }) : null)));
$("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = names[(names.indexOf(tab) + step + names.length) % names.length];
  show(next);
  $(`tab-${next}`).focus();
});
measurements = await request("/dashboard/facts").catch(() => null);
if (measurements) head();
show(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : "pipeline");
poll();
