// The page: asks for the newest state again and again, and shows it.

import { Chart, spark } from "./chart.js";
import { byId, make, meter, pairs, setText, Table } from "./dom.js";
import { bytes, count, duration, moment, percent, plural, rate } from "./format.js";

const CAUSES = ["store", "peer", "decompression", "prefetch", "mount", "metadata"];
const CAUSE_TEXT = {
  store: "the object store", peer: "nodes of the task", decompression: "decompression", prefetch: "the prefetch worker",
  mount: "the mount itself", metadata: "metadata", reader: "readers at work", idle: "nothing seen",
};
const HINTS = {
  store: "Let the mount read ahead (dlcmd run, or a list of files), load the data before (dlcmd warmup), or cache it (--cache-dir, --task).",
  peer: "Another node delivers slowly, or is busy: see the members of the task below.",
  decompression: "Readers wait for lz4 and checksums: the processors of this machine are busy.",
  prefetch: "Files are pushed just when they are read: readers are as fast as the mount.",
  mount: "Many small requests reach the mount: it pays to load contents ahead, and to read files without an ioctl.",
  metadata: "Readers wait for names and attributes: the native session (root) answers these in the kernel.",
};
const TASK_TIERS = ["mapped", "local", "peer", "store"];
const STATE_TEXT = { new: "no answer yet", live: "live", late: "late", lost: "lost", gone: "unmounted" };
const WAITS = 0.05; // a mount counts as waiting if its readers wait for this share of the time
const SHORTEST_S = 60; // the shortest time that the charts show
const FRESH_S = 20; // the greatest age of a chart's newest point, which is at its right end
const SPARK_POINTS = 60, ROWS = 25, RETRY_MS = 1000, ANSWER_MS = 12000;

let state = null, receivedMs = 0, tick = 0, chosen = null;
let datasets = { change: -1, datasets: [] };
const recent = new Map(); // by mount: bytes read a second, for the small lines

// ---- facts made from the state ------------------------------------------------------------------

const figures = (mount) => (mount.state === "live" && mount.figures?.interval_s ? mount.figures : null);
const waitedShare = (mount) => (figures(mount) ? mount.figures.waited_s / mount.figures.interval_s : null);
const largest = (causes) => CAUSES.reduce((best, name) => (causes[name] > causes[best] ? name : best), "store");
const sum = (values) => values.reduce((total, each) => total + each, 0);

function hitShare(mount) {
  const reads = figures(mount)?.reads_per_s;
  const all = reads ? reads.memory + reads.fetched : 0;
  return all ? reads.memory / all : null;
}

function planShare(mount) {
  const plans = (mount.plans ?? []).filter((each) => each.epoch !== null && each.length);
  return plans.length ? Math.min(...plans.map((each) => each.position / each.length)) : null;
}

function ago(item) {
  return item.age_s === null ? "never answered" : `last seen ${duration(item.age_s)} ago`;
}

function badge(cell, item) {
  let mark = cell.querySelector(".badge");
  if (!mark) {
    mark = make("span");
    cell.replaceChildren(mark, make("span", { class: "sub" }));
  }
  mark.className = `badge ${item.state}`;
  setText(mark, STATE_TEXT[item.state] ?? item.state);
  const detail = { lost: `${item.problem}; ${ago(item)}`, late: ago(item), gone: ago(item) }[item.state];
  setText(mark.nextSibling, detail ?? (item.warning || ""));
}

// ---- the first lines ------------------------------------------------------------------------------

function showNow() {
  const live = state.mounts.filter(figures);
  const waiting = live.filter((each) => waitedShare(each) >= WAITS).sort((one, other) => waitedShare(other) - waitedShare(one));
  const reading = live.filter((each) => each.figures.reader_s > 0 || each.figures.waited_s > 0);
  let verdict, hint = "";
  if (!state.mounts.some((each) => each.state !== "gone")) {
    verdict = "There is no mount of yours on this machine.";
    hint = "One that `dlcmd mount DATASET DIR` makes appears here by itself.";
  } else if (waiting.length) {
    const [worst] = waiting;
    const cause = largest(worst.figures.causes_s);
    verdict = `${worst.path} waits ${percent(waitedShare(worst))} of the time, mostly for ${CAUSE_TEXT[cause]}.`;
    if (waiting.length > 1) verdict += ` So do ${waiting.length - 1} more.`;
    hint = HINTS[cause];
  } else if (reading.length) {
    verdict = reading.length === 1 ? `${reading[0].path} is read, and its readers do not wait.`
      : `${reading.length} mounts are read, and no reader waits.`;
  } else {
    verdict = "Nobody reads at the moment.";
  }
  setText(byId("verdict"), verdict);
  setText(byId("hint"), hint);
  const lost = [...state.servers.map((each) => [`Server ${each.place}`, each]), ...state.mounts.map((each) => [each.path, each])]
    .filter(([, each]) => each.state === "lost" || each.state === "late")
    .map(([name, each]) => `${name}: ${each.problem || "it does not answer"}; ${ago(each)}.`);
  const list = byId("problems");
  while (list.children.length > lost.length) list.lastChild.remove();
  lost.forEach((text, at) => setText(list.children[at] ?? list.appendChild(make("li")), text));

  const add = (name) => sum(live.map((each) => each.figures[name] ?? 0));
  const reads = sum(live.map((each) => each.figures.reads_per_s.memory + each.figures.reads_per_s.fetched));
  const hits = sum(live.map((each) => each.figures.reads_per_s.memory));
  const seconds = sum(live.map((each) => each.figures.interval_s));
  const plans = sum(state.mounts.flatMap((each) => (each.plans ?? []).map((plan) => plan.files_per_s)));
  const up = state.servers.filter((each) => each.state === "live").length;
  tiles([
    ["Readers waited", seconds ? percent(add("waited_s") / seconds) : "–", live.length === 1 ? "of the last second" : "on average over mounts"],
    ["Read through mounts", `${bytes(add("read_bytes_per_s"))}/s`, `${rate(add("requests_per_s"))} requests/s`],
    ["From mounts' memory", reads ? percent(hits / reads) : "–", `of ${rate(reads)} reads/s`],
    ["Pushed ahead", `${bytes(add("pushed_bytes_per_s"))}/s`, `${bytes(add("resident_bytes"))} in the page cache`],
    ["Along plans", `${rate(plans)} files/s`, plural(sum(state.mounts.map((each) => (each.plans ?? []).length)), "reader") + " with a plan"],
    ["Servers", state.servers.length ? `${up} of ${state.servers.length}` : "none", state.servers.length ? "answer" : "name them by --server-metrics"],
  ]);
}

function tiles(entries) {
  const list = byId("tiles");
  entries.forEach(([name, value, below], at) => {
    let tile = list.children[at];
    if (!tile) {
      tile = make("div", {}, make("dt"), make("dd", {}, make("span"), make("small")));
      list.append(tile);
    }
    setText(tile.firstChild, name);
    setText(tile.lastChild.firstChild, value);
    setText(tile.lastChild.lastChild, below);
  });
}

// ---- tables ---------------------------------------------------------------------------------------

function pathCell(cell, mount, row) {
  if (!cell.firstChild) {
    const button = make("button", { type: "button", class: "name" });
    button.addEventListener("click", () => choose(row.dataset.id === chosen ? null : row.dataset.id, true));
    cell.append(button, make("span", { class: "sub" }));
  }
  row.dataset.id = mount.id;
  row.classList.toggle("chosen", mount.id === chosen);
  row.classList.toggle("gone", mount.state === "gone");
  row.classList.toggle("lost", mount.state === "lost");
  setText(cell.firstChild, mount.path);
  cell.firstChild.setAttribute("aria-expanded", String(mount.id === chosen));
  setText(cell.lastChild, `${mount.dataset}${mount.version ? `@${mount.version}` : ""}${mount.task ? ` · task ${mount.task}` : ""}`);
}

const text = (value) => (cell, item) => setText(cell, value(item));
const only = (value, show) => (cell, item) => setText(cell, value(item) === null || value(item) === undefined ? "–" : show(value(item)));

const mountTable = new Table(byId("mount-table"), "Mounts of this user on this machine", [
  { label: "Mount", sort: (each) => each.path, fill: pathCell },
  { label: "State", sort: (each) => each.state, fill: badge },
  {
    label: "Waited", down: true, sort: waitedShare, fill: (cell, each) => {
      const found = figures(each);
      const parts = found ? CAUSES.map((name) => [name, found.causes_s[name] / found.interval_s]) : [];
      const share = waitedShare(each);
      meter(cell, parts, share === null ? "–" : share < 0.005 ? "0 %" : `${percent(share)} ${CAUSE_TEXT[largest(found.causes_s)]}`);
    },
  },
  { label: "Read", number: true, sort: (each) => figures(each)?.read_bytes_per_s, fill: only((each) => figures(each)?.read_bytes_per_s, (value) => `${bytes(value)}/s`) },
  { label: "Requests/s", number: true, sort: (each) => figures(each)?.requests_per_s, fill: only((each) => figures(each)?.requests_per_s, rate) },
  { label: "From memory", number: true, sort: hitShare, fill: only(hitShare, percent) },
  { label: "Plan", number: true, sort: planShare, fill: only(planShare, percent) },
  { label: "Last minute", fill: (cell, each) => spark(cell, recent.get(each.id) ?? []) },
], { empty: "No mount of yours is on this machine.", sort: 2 });

const readerTable = new Table(byId("reader-table"), "Readers of the mount", [
  { label: "Reader", fill: text((each) => (each.rank !== null ? `rank ${each.rank} (${each.command})` : each.pid ? `process ${each.pid} (${each.command})` : "not to be seen")) },
  { label: "Waited", number: true, sort: (each) => each.waited_s, fill: text((each) => percent(each.waited_s / each.interval_s)) },
  { label: "Mostly for", fill: text((each) => (each.waited_s > 0 ? CAUSE_TEXT[largest(each.causes_s)] : "–")) },
  { label: "Requests/s", number: true, sort: (each) => each.requests_per_s, fill: text((each) => rate(each.requests_per_s)) },
], { empty: "No request came in the last second.", sort: 1 });

const planTable = new Table(byId("plan-table"), "Plans, and where each reader is in its plan", [
  { label: "Reader", fill: text((each) => each.name) },
  { label: "Epoch", number: true, fill: text((each) => (each.epoch === null ? "all read" : each.epoch)) },
  {
    label: "Position", fill: (cell, each) => meter(cell, each.length ? [["read", each.position / each.length]] : [],
      each.epoch === null ? "–" : `${count(each.position)} of ${count(each.length)}${each.tentative ? ", not followed yet" : ""}`),
  },
  { label: "Files/s", number: true, fill: text((each) => rate(each.files_per_s)) },
], { empty: "Nobody has announced an order. `dlcmd run` does, and so does reading .diesel/filelist." });

const serverTable = new Table(byId("server-table"), "Servers", [
  { label: "Server", sort: (each) => each.place, fill: serverCell },
  { label: "State", sort: (each) => each.state, fill: badge },
  { label: "Requests/s", number: true, sort: (each) => each.rates?.requests, fill: only((each) => each.rates?.requests, rate) },
  { label: "Sent", number: true, sort: (each) => each.rates?.sent, fill: only((each) => each.rates?.sent, (value) => `${bytes(value)}/s`) },
  { label: "Received", number: true, sort: (each) => each.rates?.received, fill: only((each) => each.rates?.received, (value) => `${bytes(value)}/s`) },
  { label: "Chunks put", number: true, sort: (each) => each.totals?.chunks, fill: only((each) => each.totals?.chunks, count) },
  { label: "Connections", number: true, sort: (each) => each.gauges?.connections, fill: only((each) => each.gauges?.connections, count) },
  { label: "Refused", number: true, sort: (each) => each.totals?.refused, fill: only((each) => each.totals?.refused, count) },
  {
    label: "Reads from", fill: (cell, each) => {
      const hits = ["memory", "disk", "store"].map((tier) => [tier, each.totals?.[`${tier}_hits`] ?? 0]);
      const all = sum(hits.map(([, value]) => value));
      meter(cell, all ? hits.map(([tier, value]) => [tier, value / all]) : [], all ? hits.filter(([, value]) => value).map(([tier, value]) => `${tier} ${percent(value / all)}`).join(", ") : "–");
    },
  },
], { empty: "No server is named. Give --server-metrics HOST:PORT for each that you want to see." });

function serverCell(cell, server, row) {
  if (!cell.firstChild) cell.append(make("span"), make("span", { class: "sub" }));
  row.classList.toggle("lost", server.state === "lost");
  setText(cell.firstChild, server.place);
  setText(cell.lastChild, server.gauges ? `${plural(server.gauges.workers, "worker")}, ${plural(server.gauges.under_way, "request")} under way` : "");
}

const datasetTable = new Table(byId("dataset-table"), "Datasets of the repository", [
  {
    label: "Dataset", sort: (each) => each.name, fill: (cell, each) => {
      if (!cell.firstChild) cell.append(make("span"), make("span", { class: "sub" }));
      setText(cell.firstChild, each.name);
      setText(cell.lastChild, each.problem || (each.created ? `since ${moment(each.created)}` : ""));
    },
  },
  {
    label: "Version", down: true, sort: (each) => each.version, fill: (cell, each) => {
      if (!cell.firstChild) cell.append(make("span"), make("span", { class: "sub" }));
      setText(cell.firstChild, each.version === null ? "?" : each.version === "0" ? "empty" : each.version);
      setText(cell.lastChild, Number(each.version) ? moment(Number(each.version) / 1e6) : "");
    },
  },
  {
    label: "Versions kept", number: true, sort: (each) => each.kept, fill: (cell, each) => {
      setText(cell, each.kept === null ? "–" : count(each.kept));
      cell.title = each.versions.map((one) => `${one.version}: ${moment(one.time)}, ${count(one.files)} files, ${bytes(one.bytes)}`).join("\n");
    },
  },
  { label: "Files", number: true, sort: (each) => each.files, fill: text((each) => count(each.files)) },
  { label: "Size", number: true, sort: (each) => each.bytes, fill: text((each) => bytes(each.bytes)) },
  { label: "Holes", number: true, sort: (each) => each.holes_bytes, fill: text((each) => bytes(each.holes_bytes)) },
  { label: "Mounts", number: true, sort: (each) => each.mounts, fill: text((each) => (each.mounts ? count(each.mounts) : "–")) },
], { empty: "No dataset is shown.", sort: 0, descending: false });
datasetTable.limit = ROWS;

const memberTables = new Map();

function showTasks() {
  const place = byId("task-list"), keys = new Set();
  for (const task of state.tasks) {
    const key = `${task.name} ${task.dataset}`;
    keys.add(key);
    let kept = memberTables.get(key);
    if (!kept) {
      const card = make("div", { class: "card" }, make("h3"), make("p", { class: "soft" }));
      kept = { card, table: new Table(card, `Members of the task ${task.name}`, memberColumns()) };
      memberTables.set(key, kept);
      place.append(card);
    }
    setText(kept.card.firstChild, `${task.name}: ${task.dataset}@${task.version}`);
    const tiers = taskTiers(task);
    setText(kept.card.children[1], `${task.member_count} of ${task.world} nodes are members. ${tiers}`);
    const all = sum(task.members.map((each) => each.share_chunks));
    kept.table.update(task.members.map((each) => ({ ...each, id: each.rank, all })));
  }
  for (const [key, kept] of memberTables) {
    if (!keys.has(key)) {
      kept.card.remove();
      memberTables.delete(key);
    }
  }
  let note = place.querySelector(":scope > .empty");
  if (!note) place.append(note = make("p", { class: "empty" }, "No mount here reads through a task's cache (--task)."));
  note.hidden = state.tasks.length > 0;
}

function taskTiers(task) {
  const mounts = state.mounts.filter((each) => task.mounts.includes(each.id) && figures(each)?.task_reads_per_s);
  const rates = TASK_TIERS.map((tier) => [tier, sum(mounts.map((each) => each.figures.task_reads_per_s[tier]))]);
  if (!sum(rates.map(([, value]) => value))) return "Nothing is read through it at the moment.";
  return `Reads a second here: ${rates.map(([tier, value]) => `${tier} ${rate(value)}`).join(", ")}.`;
}

const memberColumns = () => [
  { label: "Rank", fill: text((each) => `rank ${each.rank}`) },
  { label: "Node", fill: text((each) => (each.is_here ? "this machine" : each.address)) },
  {
    label: "State", fill: (cell, each) => {
      if (!cell.firstChild) cell.append(make("span"));
      cell.firstChild.className = `badge ${{ fails: "lost", tried: "tried", "does not answer": "lost" }[each.state] ?? "live"}`;
      setText(cell.firstChild, each.state);
    },
  },
  { label: "Share", fill: (cell, each) => meter(cell, [["peer", each.all ? each.share_chunks / each.all : 0]], `${count(each.share_chunks)} chunks, ${percent(each.all ? each.share_chunks / each.all : 0)}`) },
  { label: "Held of it", number: true, fill: only((each) => each.held_chunks, (value) => `${count(value)} chunks`) },
  { label: "Memory", number: true, fill: only((each) => each.memory_bytes, bytes) },
  { label: "Disk", number: true, fill: only((each) => each.disk_bytes, bytes) },
];

function showDetail() {
  const mount = state.mounts.find((each) => each.id === chosen);
  byId("detail").hidden = !mount;
  if (!mount) return;
  setText(byId("detail-title"), mount.path);
  const found = figures(mount);
  readerTable.update((found?.readers ?? []).map((each) => ({ ...each, id: `${each.rank} ${each.pid}`, interval_s: found.interval_s })));
  planTable.update((mount.plans ?? []).map((each) => ({ ...each, id: each.name })));
  const totals = mount.totals ?? {};
  pairs(byId("counters"), mount.totals ? [
    ["up", duration(mount.uptime_s)], ["session", mount.session], ["files and folders", count(mount.files)],
    ["requests", count(totals.requests)], ["reads from memory", count(totals.reads)], ["reads fetched", count(totals.fetched_reads)],
    ["reads failed", count(totals.failed_reads)], ["bytes read", count(totals.read_bytes)], ["bytes fetched", count(totals.fetched_bytes)],
    ["files pushed", count(totals.pushed_files)], ["files dropped", count(totals.dropped_files)],
    ["in the page cache", `${bytes(totals.resident_bytes)} of ${bytes(totals.budget_bytes)}`], ["readers waited", duration(totals.waited_s)],
  ] : []);
}

function choose(id, move) {
  chosen = id;
  byId("scope").value = id && [...byId("scope").options].some((each) => each.value === id) ? id : "all";
  show();
  loadHistory();
  if (id && move) byId("detail-title").focus();
  if (!id && move) [...mountTable.rows.values()][0]?.querySelector("button")?.focus();
}

function showCounts() {
  const setCount = (id, value) => setText(byId(id).querySelector(".count"), value);
  const living = state.mounts.filter((each) => each.state !== "gone").length;
  setCount("mounts-title", state.mounts_left_out ? `${living}, and ${state.mounts_left_out} that are not shown` : living || "");
  setCount("tasks-title", state.tasks.length || "");
  setCount("servers-title", state.servers.length || "");
}

function showDatasets() {
  const repository = state.datasets;
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const uses = new Map();
  for (const each of state.mounts) if (each.state !== "gone") uses.set(each.dataset, (uses.get(each.dataset) ?? 0) + 1);
  const found = datasets.datasets.filter((each) => words.every((word) => each.name.toLowerCase().includes(word)))
    .map((each) => ({ ...each, id: each.name, mounts: uses.get(each.name) ?? 0 }));
  datasetTable.update(found);
  setText(byId("datasets-title").querySelector(".count"), words.length ? `${found.length} of ${datasets.datasets.length}` : repository.count || "");
  const detail = { lost: `cannot be read: ${repository.problem} (${ago(repository)})`, late: `has not answered yet; ${ago(repository)}`, new: "is being read" }[repository.state];
  setText(byId("repository"), `${repository.repository}${detail ? ` ${detail}` : ""}`);
  const left = found.length - datasetTable.limit;
  byId("more-line").hidden = left <= 0;
  setText(byId("more"), `Show ${Math.min(left, ROWS)} more of ${count(left)}`);
}

function showScope() {
  const select = byId("scope");
  const wanted = [["all", "all mounts"], ...state.mounts.map((each) => [each.id, each.path]), ...state.servers.map((each) => [each.id, `server ${each.place}`])];
  wanted.forEach(([value, label], at) => {
    const option = select.options[at] ?? select.appendChild(make("option"));
    if (option.value !== value) option.value = value;
    setText(option, label);
  });
  while (select.options.length > wanted.length) select.lastChild.remove();
}

function show() {
  if (!state) return;
  setText(byId("host"), state.host);
  setText(byId("program"), `diesel-fs ${state.version}`);
  showNow();
  showScope();
  showCounts();
  mountTable.update(state.mounts);
  showDetail();
  showTasks();
  serverTable.update(state.servers);
  showDatasets();
}

// ---- over time ------------------------------------------------------------------------------------

const one = (name) => (points, at) => points[name]?.[at] ?? 0;
const perMount = (name) => (points, at) => (points[name]?.[at] ?? 0) / (points.count?.[at] ?? 1);
const speed = (value) => `${bytes(value)}/s`;
const charts = byId("charts");
const mountCharts = [
  new Chart(charts, "What readers wait for", [...CAUSES, "reader", "idle"].map((name) => ({ name, label: CAUSE_TEXT[name], value: perMount(`${name}_s`) })), { stacked: true, text: percent, top: 1 }),
  new Chart(charts, "Reads a second, by where the bytes were", [
    { name: "memory", label: "the mount's memory", value: one("memory") }, { name: "mapped", label: "the task: mapped", value: one("mapped") },
    { name: "local", label: "the task: this node", value: one("local") }, { name: "peer", label: "the task: other nodes", value: one("peer") },
    { name: "store", label: "the object store", value: one("store") },
  ], { stacked: true, text: rate }),
  new Chart(charts, "Throughput", [
    { name: "read", label: "read", value: one("read") }, { name: "pushed", label: "pushed into the page cache", value: one("pushed") },
    { name: "fetched", label: "fetched", value: one("fetched") },
  ], { text: speed }),
];
const serverCharts = [
  new Chart(charts, "Requests a second", [{ name: "read", label: "requests", value: one("requests") }, { name: "store", label: "refused", value: one("refused") }], { text: rate }),
  new Chart(charts, "Reads a second, by what answered", ["memory", "disk", "store"].map((name) => ({ name, label: name, value: one(name) })), { stacked: true, text: rate }),
  new Chart(charts, "Throughput", [
    { name: "sent", label: "sent", value: one("sent") }, { name: "fetched", label: "received", value: one("received") },
    { name: "uploaded", label: "chunks put", value: one("uploaded") },
  ], { text: speed }),
];

let history = { of: null, points: { time: [] } };

async function loadHistory() {
  const of = byId("scope").value;
  const isSetBack = state && state.time < (history.points.time.at(-1) ?? 0) - 1; // the machine's clock
  if (history.of !== of || isSetBack) history = { of, points: { time: [] } };
  const times = history.points.time;
  const answer = await fetch(`history?of=${encodeURIComponent(of)}&since=${times.length ? times[times.length - 1] : 0}`);
  if (!answer.ok) {
    if (answer.status === 404 && of !== "all") byId("scope").value = "all";
    return;
  }
  const newer = await answer.json();
  if (history.of !== of) return;
  const known = history.points;
  const from = newer.time.findIndex((time) => !known.time.length || time > known.time[known.time.length - 1] + 1);
  if (from >= 0) {
    const before = known.time.length;
    for (const [name, values] of Object.entries(newer)) known[name] = [...(known[name] ?? new Array(before).fill(0)), ...values.slice(from)];
    const extra = known.time.length - 800;
    if (extra > 0) for (const name of Object.keys(known)) known[name] = known[name].slice(extra);
  }
  drawHistory();
}

function drawHistory() {
  const isServer = history.of?.startsWith("server");
  for (const each of mountCharts) each.plot.parentElement.hidden = isServer;
  for (const each of serverCharts) each.plot.parentElement.hidden = !isServer;
  const now = state ? state.time : Date.now() / 1000;
  const last = history.points.time.at(-1) ?? 0;
  const to = now - last < FRESH_S ? last : now;
  const first = history.points.time[0] ?? to;
  const from = Math.max(to - Number(byId("range").value), Math.min(first, to - SHORTEST_S));
  for (const each of isServer ? serverCharts : mountCharts) each.draw(history.points, from, to);
}

// ---- requests ---------------------------------------------------------------------------------------

const sleep = (milliseconds) => new Promise((wake) => setTimeout(wake, milliseconds));

function showLink(kind, message) {
  byId("link").className = `badge ${kind}`;
  setText(byId("link"), message);
  document.body.classList.toggle("lost", kind === "lost");
}

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MS) });
  if (answer.status === 401) throw new Error("this browser does not have the token any more");
  if (!answer.ok) throw new Error(`the dashboard answers ${answer.status}`);
  return answer.json();
}

async function receive() {
  const newer = await ask(`state?after=${tick}`);
  const isNewer = newer.tick !== tick;
  state = newer;
  tick = newer.tick ?? 0;
  receivedMs = performance.now();
  if (!isNewer) return;
  for (const each of state.mounts) {
    const values = recent.get(each.id) ?? [];
    values.push(figures(each)?.read_bytes_per_s ?? 0);
    recent.set(each.id, values.slice(-SPARK_POINTS));
  }
  if (state.datasets.change !== datasets.change) datasets = await ask("datasets");
  show();
  if (tick % 5 === 1 || !history.points.time.length) await loadHistory();
}

async function work() {
  for (;;) {
    if (document.hidden) {
      await new Promise((wake) => document.addEventListener("visibilitychange", wake, { once: true }));
      continue;
    }
    try {
      await receive();
      showLink("live", "live");
    } catch (error) {
      tick = 0;
      const since = receivedMs ? `; the figures are ${duration((performance.now() - receivedMs) / 1000)} old` : "";
      const reason = error.name === "TypeError" || error.name === "TimeoutError" ? "the dashboard does not answer" : error.message;
      showLink("lost", `${reason}${since}. Trying again.`);
      await sleep(RETRY_MS);
    }
  }
}

setInterval(() => receivedMs && setText(byId("age"), `Updated ${duration((performance.now() - receivedMs) / 1000)} ago.`), 1000);

// ---- clicks and keys ---------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  setText(byId("theme"), `Theme: ${name}`);
  try {
    localStorage.setItem("theme", name);
  } catch { /* a browser may forbid it */ }
}

let theme = "auto";
try {
  theme = THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
} catch { /* likewise */ }
setTheme(theme);
byId("theme").addEventListener("click", () => setTheme(theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]));
byId("scope").addEventListener("change", () => {
  const value = byId("scope").value;
  chosen = state?.mounts.some((each) => each.id === value) ? value : null;
  show();
  loadHistory();
});
byId("range").addEventListener("change", drawHistory);
byId("close").addEventListener("click", () => choose(null, true));
byId("filter").addEventListener("input", () => {
  datasetTable.limit = ROWS;
  if (state) showDatasets();
});
byId("more").addEventListener("click", () => {
  datasetTable.limit += ROWS;
  showDatasets();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chosen) choose(null, true);
});

drawHistory();
work();
