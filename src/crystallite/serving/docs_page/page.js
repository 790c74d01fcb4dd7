"use strict";
// Everything that comes from the service is put into the page as text, never as markup.
const at = (id) => document.getElementById(id);
const PERIOD = 2000, KEPT = 60;
let rates = [], last = null, model = null, trials = new Set();

function headers() {
  const token = at("token").value;
  return token ? { Authorization: "Bearer " + token } : {};
}

async function fetched(path, options = {}) {
  return fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
}

async function asJson(path) {
  const response = await fetched(path);
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

function cell(text, kind = "") {
  const made = document.createElement("td");
  made.textContent = text;
  made.className = kind;
  return made;
}

function row(...cells) {
  const made = document.createElement("tr");
  made.append(...cells);
  return made;
}

const base = () => "/v2/models/" + encodeURIComponent(model);

async function showModels() {
  at("access").hidden = document.body.dataset.token !== "yes";
  try {
    const { models } = await asJson("/v2/models");
    const ready = models.filter((one) => one.state === "READY").map((one) => one.name);
    trials = new Set(models.filter((one) => one.trial).map((one) => one.name));
    at("model").replaceChildren(...ready.map((name) => new Option(name, name)));
    at("state").textContent = ready.length ? "" : "no model is loaded";
    if (ready.length) await showModel();
  } catch (error) {
    at("state").textContent = error.message;
  }
}

async function showModel() {
  model = at("model").value;
  rates = [];
  last = null;
  const [metadata, example, plan] = await Promise.all([asJson(base()), asJson(base() + "/example"), asJson(base() + "/plan")]);
  at("signature").replaceChildren(
    ...["inputs", "outputs"].flatMap((side) => metadata[side].map((tensor) =>
      row(cell((side === "inputs" ? "takes " : "returns ") + tensor.name), cell(tensor.datatype), cell("[" + tensor.shape.join(", ") + "]")))),
  );
  at("request").value = JSON.stringify(example.request, null, 1);
  at("curl").textContent = example.curl;
  at("answer").value = at("outcome").textContent = "";
  at("plan").replaceChildren(...plan.stages.flatMap((stage) => stage.pieces.length ? stage.pieces.map((piece) => {
    const measured = cell("–", "number");
    measured.dataset.piece = piece.name;
    return row(cell(stage.does), cell(piece.name), cell(piece.macs.toLocaleString("en"), "number"), cell(piece.nbytes.toLocaleString("en"), "number"),
      cell((piece.seconds * 1000).toPrecision(3), "number"), measured, cell(piece.least === piece.most ? piece.least : piece.least + "–" + piece.most, "number"), cell(piece.holds));
  }) : [row(cell(stage.does), cell("(transform tier)"))]));
  await refresh();
}

async function send() {
  at("send").disabled = true;
  const begun = performance.now();
  try {
    const response = await fetched(base() + "/infer", { method: "POST", body: at("request").value, headers: { "Content-Type": "application/json" } });
    const text = await response.text();
    at("outcome").textContent = `${response.status} in ${(performance.now() - begun).toFixed(1)} ms`;
    try { at("answer").value = JSON.stringify(JSON.parse(text), null, 1); } catch { at("answer").value = text; }
  } catch (error) {
    at("outcome").textContent = error.message;
  } finally {
    at("send").disabled = false;
  }
  await refresh();
}

// Prometheus text: name{label="value",…} number
function metrics(text) {
  const found = [];
  for (const [, name, labels, value] of text.matchAll(/^(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const named = Object.fromEntries([...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text]));
    if (named.model === model) found.push({ name, ...named, value: Number(value) });
  }
  return found;
}

function quantile(found, share) {
  const buckets = found.filter((one) => one.name === "crystallite_request_seconds_bucket");
  const total = buckets.at(-1)?.value ?? 0;
  const bucket = buckets.find((one) => one.value >= share * total);
  return total && bucket ? (bucket.le === "+Inf" ? "over 10 s" : "≤ " + Number(bucket.le) * 1000 + " ms") : "–";
}

function numbers(pairs) {
  at("numbers").replaceChildren(...Object.entries(pairs).map(([name, value]) => {
    const made = document.createElement("div"), term = document.createElement("dt"), number = document.createElement("dd");
    term.textContent = name;
    number.textContent = value;
    number.dataset.name = name;
    made.append(term, number);
    return made;
  }));
}

async function refresh() {
  if (!model) return;
  const { model_stats: [stats] } = await asJson(base() + "/stats");
  const found = metrics(await (await fetched("/metrics")).text());
  const now = performance.now(), answered = stats.inference_stats.success.count;
  if (last) rates.push(Math.max(0, 1000 * (answered - last.answered) / (now - last.now)));
  last = { now, answered };
  rates = rates.slice(-KEPT);
  const ms = (duration) => duration.count ? (duration.ns / duration.count / 1e6).toFixed(2) + " ms" : "–";
  const sum = (name) => found.filter((one) => one.name === name).reduce((total, one) => total + one.value, 0);
  numbers({
    "answered": answered, "refused": stats.inference_stats.fail.count, "per second": (rates.at(-1) ?? 0).toFixed(1),
    "waiting now": sum("crystallite_queue_requests"), "mean in the queue": ms(stats.inference_stats.queue),
    "mean computed": ms(stats.inference_stats.compute_infer), "half within": quantile(found, 0.5), "99 % within": quantile(found, 0.99),
    "samples a batch": stats.execution_count ? (stats.inference_count / stats.execution_count).toFixed(1) : "–",
  });
  for (const measured of document.querySelectorAll("[data-piece]")) {
    const of = (name) => found.find((one) => one.name === "crystallite_piece_seconds_" + name && one.piece === measured.dataset.piece)?.value ?? 0;
    measured.textContent = of("count") ? (1000 * of("sum") / of("count")).toPrecision(3) : "–";
  }
  draw();
  await showTrial();
}

async function showTrial() {
  at("trial").hidden = !trials.has(model);
  if (at("trial").hidden) return;
  const trial = await asJson(base() + "/trial");
  const agreed = trial.agreement === null ? "" : `, ${(100 * trial.agreement).toFixed(2)} % of decisions agree`;
  at("trial").textContent = `Trial: ${trial.requests} requests compared${agreed}, answers come from the ${trial.answer_from} model. `
    + (trial.verdict ? `The verdict: ${trial.verdict.passed ? "passed" : "failed"}.` : "");
}

function draw() {
  const most = Math.max(1, ...rates), line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", rates.map((rate, i) => `${600 * (i + KEPT - rates.length) / (KEPT - 1)},${115 - 110 * rate / most}`).join(" "));
  at("chart").replaceChildren(line);
  at("chart").setAttribute("aria-label", `Answers per second, now ${(rates.at(-1) ?? 0).toFixed(1)}, at most ${most.toFixed(1)}`);
}

at("model").addEventListener("change", showModel);
at("access").addEventListener("submit", (event) => { event.preventDefault(); showModels(); });
at("send").addEventListener("click", send);
showModels();
setInterval(() => refresh().catch((error) => { at("state").textContent = error.message; }), PERIOD);
