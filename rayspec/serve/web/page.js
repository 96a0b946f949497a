// The page: documents go out one after the other, their summaries stream in.

import { Endpoint, EndpointError } from "./endpoint.js";
import { LivePanel } from "./live.js";
import { markdown } from "./markdown.js";

const INSTRUCTION = "Summarize the following document.";
const TRAINED_TO_SUMMARIZE = ["demo", "demo-plain"]; // the bundled models take the document alone
const MAX_RETRIES = { 429: 5, 503: 30 };
const WHY_RETRY = { 429: "the endpoint is full", 503: "the model is starting" };
const TEXT_FILE = /\.(txt|md|markdown)$/i;
const MAX_FILE_BYTES = 4 << 20;
const STATES_TO_REPEAT = [400, 413, 422]; // the document is at fault: the next may do
const NOTHING_YET = { summary: "", numChunks: 0, outcome: "", error: "", comparison: "" };

const form = byId("form");
const model = byId("model");
const summary = byId("summary");
const endpoint = new Endpoint();
const live = new LivePanel(endpoint, () => model.value);
// Of this session: {name, text, request, state, summary, numChunks, outcome, error, figures, comparison}
const documents = [];
let shown = null; // the document whose summary is shown
let running = null; // the AbortController of the summary or the comparison under way
let comparing = null; // the document whose request runs again without drafts

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) summarizeAll();
});
byId("open").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", ({ target }) => {
  addFiles([...target.files]);
  target.value = ""; // the same file may come again
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  byId("document").addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("document").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") addFiles([...event.dataTransfer.files]);
  });
}
byId("copy").addEventListener("click", copy);
byId("download").addEventListener("click", download);
byId("compare").addEventListener("click", () => (comparing === null ? compare() : running.abort()));
byId("stop").addEventListener("click", () => running?.abort());
byId("sample").addEventListener("click", fillInSample);
byId("document").addEventListener("input", showSize);
byId("document").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("api-key").addEventListener("change", useKey);
byId("api-key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it would send the form
  useKey();
});
model.addEventListener("change", () => {
  suggestInstruction();
  live.refresh();
});
byId("instruction").addEventListener("input", ({ target }) => {
  target.dataset.own = "true";
});
window.addEventListener("pagehide", () => running?.abort());
connect();

/** Learns which models there are, and begins to watch the one that is chosen. */
async function connect() {
  try {
    const chosen = model.value;
    const ids = await endpoint.models();
    model.replaceChildren(...ids.map((id) => new Option(id, id, false, id === chosen)));
    suggestInstruction();
    showError("");
  } catch (error) {
    reportError(error);
  }
  live.refresh();
}

function useKey() {
  const key = byId("api-key").value.trim();
  if (key === endpoint.apiKey) return;
  endpoint.apiKey = key;
  connect();
}

/** Puts text files into the queue; the others are refused by name. */
async function addFiles(files) {
  const refused = [];
  for (const file of files) {
    if (!TEXT_FILE.test(file.name)) refused.push(`${file.name}: only .txt and .md files are read here. Save its text as .txt first.`);
    else if (file.size > MAX_FILE_BYTES) refused.push(`${file.name}: it has more than 4 MB. Use rayspec summarize.`);
    else addDocument(file.name, await file.text());
  }
  showError(refused.join(" "));
}

function addDocument(name, text) {
  documents.push({ name, text, state: "waiting", ...NOTHING_YET, figures: {} });
  showDocuments();
}

/** Summarizes the text of the form, if it is new, and then what waits. Stops at an error of the endpoint. */
async function summarizeAll() {
  const text = byId("document").value;
  const isQueued = documents.some(({ state }) => state === "waiting");
  if (text.trim() !== "" && !(isQueued && documents.some((one) => one.text === text))) {
    addDocument(text.trim().slice(0, 40), text);
  } else if (!isQueued) return byId("document").focus();
  running = new AbortController();
  showRunning(true);
  if (byId("summary").getBoundingClientRect().top > innerHeight / 2) {
    document.querySelector(".answer").scrollIntoView({ block: "start" });
  }
  live.refresh();
  for (let next; (next = documents.find(({ state }) => state === "waiting")); ) {
    if (!(await summarize(next))) break;
  }
  running = null;
  showRunning(false);
  live.refresh();
}

/** Whether the next document may follow. */
async function summarize(one) {
  Object.assign(one, NOTHING_YET, { state: "running", request: requestOf(one.text), outcome: "working …", figures: {} });
  show(one);
  let error = null;
  try {
    await stream(one, running.signal);
  } catch (caught) {
    error = caught;
    if (error.name === "AbortError") one.outcome = "stopped";
    else [one.outcome, one.error] = ["", messageOf(error)];
    if (error.status === 401) byId("api-key").focus();
  }
  one.state = error === null ? "done" : error.name === "AbortError" ? "stopped" : "failed";
  if (shown === one) show(one);
  showDocuments();
  return error === null || STATES_TO_REPEAT.includes(error.status);
}

/** Takes the chunks as they come. When the endpoint is full or starts a model, tries again when it asks to. */
async function stream(one, signal) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await streamOnce(one, signal);
    } catch (error) {
      if (!(error instanceof EndpointError) || error.retryAfterS === null || attempt >= MAX_RETRIES[error.status]) throw error;
      one.outcome = `${WHY_RETRY[error.status]}; trying again in ${error.retryAfterS} s`;
      if (shown === one) showOutcome(one.outcome);
      await sleep(error.retryAfterS * 1000, signal);
      one.outcome = "working …";
      if (shown === one) showOutcome(one.outcome);
    }
  }
}

async function streamOnce(one, signal) {
  const began = performance.now();
  let numTokens = null;
  let wasCut = false;
  const timer = setInterval(() => showWaiting(secondsSince(began)), 200);
  try {
    for await (const chunk of endpoint.complete(one.request, signal)) {
      if (chunk.text !== null) {
        if (one.numChunks === 0) {
          one.figures.firstS = secondsSince(began);
          clearInterval(timer);
          showWaiting(null);
          live.mostRunning = 0;
          live.refresh();
        }
        append(one, chunk.text);
      }
      if (chunk.finishReason !== null) wasCut = chunk.finishReason === "length";
      if (chunk.numTokens !== null) numTokens = chunk.numTokens;
    }
  } finally {
    clearInterval(timer);
    showWaiting(null);
  }
  const seconds = secondsSince(began);
  if (numTokens > 1) one.figures.rate = (numTokens - 1) / (seconds - one.figures.firstS);
  one.figures.wasBusy = live.mostRunning > 1;
  const count = numTokens === null ? "" : `${numTokens} tokens in ${seconds.toFixed(1)} s`;
  one.outcome = wasCut ? `${count}, cut at max tokens` : count;
}

/** Runs the request of the shown summary again without drafts, and says how much slower that was. */
async function compare() {
  const one = shown;
  const plain = { ...NOTHING_YET, request: { ...one.request, useDrafts: false }, figures: {} };
  comparing = one;
  running = new AbortController();
  one.comparison = "Decoding the same request without drafts …";
  showRunning(true);
  const timer = setInterval(() => showProgress(plain.summary.length / one.summary.length), 200);
  try {
    await stream(plain, running.signal);
    if (plain.figures.rate !== undefined) one.figures.speedUp = one.figures.rate / plain.figures.rate;
    one.comparison = comparisonOf(one, plain);
    if (documents.slice(0, documents.indexOf(one)).some(({ request }) => request?.prompt === one.request.prompt)) {
      one.comparison += " Drafts could copy from the earlier summary of this text.";
    }
  } catch (error) {
    one.comparison = error.name === "AbortError" ? "Comparison stopped." : `The comparison failed: ${messageOf(error)}`;
  }
  clearInterval(timer);
  comparing = running = null;
  showRunning(false);
  if (shown === one) showFigures(one);
  live.refresh();
}

function comparisonOf({ summary: text, figures }, { summary: plainText, figures: plainFigures }) {
  if (plainFigures.rate === undefined) return "The texts differ: without drafts, the model wrote at most one token.";
  const times = figures.speedUp;
  const factor = `${times.toFixed(1)}x`;
  const speed = times >= 1.05 ? `${factor} faster than` : times > 0.95 ? "As fast as" : `${factor} as fast as`;
  const rates = `(${figures.rate.toFixed(1)} and ${plainFigures.rate.toFixed(1)} tokens/s)`;
  const isSame = text === plainText;
  const why = isSame ? "" : " In 16 bits, or with rejection sampling, drafts can change a text.";
  const busy = figures.wasBusy || plainFigures.wasBusy ? " Other requests ran at the same time: a busy endpoint has other speeds." : "";
  return `${speed} plain decoding ${rates}, ${isSame ? "same text" : "but the texts differ"}.${why}${busy}`;
}

/** Offers a comparison where the speed of the summary is known, and says how it went. */
function showComparison() {
  const isKnown = shown?.state === "done" && shown.figures.rate !== undefined && shown.numChunks > 1;
  byId("compare").textContent = comparing === null ? "Compare with plain decoding" : "Stop comparing";
  byId("compare").disabled = comparing === null ? running !== null || !isKnown : comparing !== shown;
  byId("comparison").textContent = shown?.comparison ?? "";
  showProgress(0);
}

/** The share of the compared summary that has come without drafts. */
function showProgress(share) {
  byId("compared").hidden = comparing === null || comparing !== shown;
  byId("compared").value = Math.min(share, 1);
}

function requestOf(text) {
  const instruction = byId("instruction").value.trim();
  return {
    model: model.value,
    prompt: instruction === "" ? text : `${instruction}\n\n${text}`,
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
    seed: Math.floor(Math.random() * 2 ** 32), // a comparison has the same
    useDrafts: true,
  };
}

/** Follows the end of the text, unless the reader has scrolled away from it. */
function append(one, text) {
  one.summary += text;
  one.numChunks += 1;
  if (shown !== one) return;
  const follows = summary.scrollHeight - summary.scrollTop - summary.clientHeight < 8;
  summary.append(text); // a text node: nothing in it is ever read as HTML
  summary.dataset.numChunks = one.numChunks;
  if (one.numChunks === 1) showFigures(one);
  if (follows) summary.scrollTop = summary.scrollHeight;
}

/** Shows a document's summary so far: as Markdown when it is done. */
function show(one) {
  shown = one;
  summary.replaceChildren(...(one.state === "done" ? markdown(one.summary) : [one.summary].filter(Boolean)));
  summary.dataset.numChunks = one.numChunks;
  for (const id of ["copy", "download"]) byId(id).disabled = one.summary === "";
  showOutcome(one.outcome);
  showError(one.error);
  if (one.state !== "running") showFigures(one);
  showComparison();
  showDocuments();
}

/** The last figures stay until there are new ones. */
function showFigures({ figures, request }) {
  if (figures.firstS !== undefined) byId("first-token").textContent = `${figures.firstS.toFixed(2)} s`;
  if (figures.rate !== undefined) byId("own-rate").textContent = figures.rate.toFixed(1);
  if (figures.speedUp !== undefined) live.showMeasured(request.model, figures.speedUp);
}

/** How long the running document has waited for its first token, and how many requests wait; null: no longer. */
function showWaiting(seconds) {
  byId("waiting").hidden = seconds === null || shown?.state !== "running";
  if (seconds === null) return;
  const others = live.state?.num_waiting ? `; ${live.state.num_waiting} requests wait at the endpoint` : "";
  byId("waiting").textContent = `Waiting for the first token: ${seconds.toFixed(1)} s${others}`;
}

/** The queue and the history in one list. A single text needs none. */
function showDocuments() {
  const list = byId("documents");
  const focused = [...list.children].findIndex((item) => item.contains(document.activeElement));
  list.hidden = documents.length < 2 && documents[0]?.state !== "waiting";
  list.replaceChildren(
    ...documents.map((one) => {
      const button = document.createElement("button");
      const state = document.createElement("small");
      state.textContent = one.state;
      button.type = "button";
      button.append(`${one.name} `, state);
      button.setAttribute("aria-pressed", String(one === shown));
      button.addEventListener("click", () => show(one));
      const item = document.createElement("li");
      item.append(button);
      return item;
    }),
  );
  list.children[focused]?.firstChild.focus();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(shown.summary);
    showOutcome("copied");
  } catch {
    getSelection().selectAllChildren(summary); // where a page may not write: over http from elsewhere
    showOutcome("selected: copy it with Ctrl + C");
  }
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([shown.summary], { type: "text/markdown" }));
  link.download = `${shown.name.replace(TEXT_FILE, "").replace(/[^\p{L}\p{N}]+/gu, "-")}-summary.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function fillInSample() {
  try {
    byId("document").value = await endpoint.sample();
    showSize();
  } catch (error) {
    reportError(error);
  }
}

function suggestInstruction() {
  const field = byId("instruction");
  const isBundled = TRAINED_TO_SUMMARIZE.includes(model.value);
  if (field.dataset.own !== "true") field.value = isBundled ? "" : INSTRUCTION;
  byId("only-reports").hidden = !isBundled;
}

function showSize() {
  const length = byId("document").value.length;
  byId("size").textContent = length === 0 ? "" : `${length.toLocaleString("en")} characters`;
}

function showRunning(isRunning) {
  const [now, instead] = isRunning ? ["stop", "start"] : ["start", "stop"];
  const hadFocus = document.activeElement === byId(instead);
  byId(now).disabled = false;
  byId(instead).disabled = true;
  if (hadFocus) byId(now).focus(); // a disabled button cannot keep it
  const isWriting = isRunning && comparing === null;
  summary.setAttribute("aria-busy", String(isWriting));
  document.body.classList.toggle("running", isWriting);
  showComparison();
}

function showOutcome(text) {
  byId("outcome").textContent = text;
}

function reportError(error) {
  showOutcome("");
  showError(messageOf(error));
  if (error.status === 401) byId("api-key").focus();
}

function messageOf(error) {
  if (error instanceof EndpointError) return error.message;
  console.error(error);
  return `The page failed: ${error.message}`;
}

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = text === "";
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

function secondsSince(began) {
  return (performance.now() - began) / 1000;
}

function byId(id) {
  return document.getElementById(id);
}
