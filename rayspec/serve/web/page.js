// The page: a document goes out, its summary streams in.

import { Endpoint, EndpointError } from "./endpoint.js";
import { LivePanel } from "./live.js";

const INSTRUCTION = "Summarize the following document.";
const TRAINED_TO_SUMMARIZE = ["demo", "demo-plain"]; // the bundled models take the document alone
const MAX_RETRIES = 5;

const form = byId("form");
const model = byId("model");
const summary = byId("summary");
const endpoint = new Endpoint();
const live = new LivePanel(endpoint, () => model.value);
let running = null; // the AbortController of the summary under way

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) summarize();
});
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

async function summarize() {
  running = new AbortController();
  showRunning(true);
  showError("");
  summary.replaceChildren();
  byId("first-token").textContent = "–";
  live.refresh();
  try {
    await stream(running.signal);
  } catch (error) {
    if (error.name === "AbortError") showOutcome("stopped");
    else reportError(error);
  }
  running = null;
  showRunning(false);
  live.refresh();
}

/** Shows the pieces as they come. When the endpoint is full, tries again as soon as it asks to. */
async function stream(signal) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      return await streamOnce(signal);
    } catch (error) {
      if (!(error instanceof EndpointError) || error.retryAfterS === null || attempt === MAX_RETRIES) throw error;
      showOutcome(`the endpoint is full; trying again in ${error.retryAfterS} s`);
      await sleep(error.retryAfterS * 1000, signal);
      showOutcome("working …");
    }
  }
}

async function streamOnce(signal) {
  const began = performance.now();
  let numTokens = null;
  let wasCut = false;
  for await (const piece of endpoint.complete(requestOfForm(), signal)) {
    if (piece.text !== null) append(piece.text, began);
    if (piece.finishReason !== null) wasCut = piece.finishReason === "length";
    if (piece.numTokens !== null) numTokens = piece.numTokens;
  }
  const seconds = secondsSince(began);
  const count = numTokens === null ? "" : `${numTokens} tokens in ${seconds.toFixed(1)} s`;
  showOutcome(wasCut ? `${count}, cut at max tokens` : count);
}

function requestOfForm() {
  const instruction = byId("instruction").value.trim();
  const text = byId("document").value;
  return {
    model: model.value,
    prompt: instruction === "" ? text : `${instruction}\n\n${text}`,
    maxTokens: byId("max-tokens").valueAsNumber,
    temperature: byId("temperature").valueAsNumber,
  };
}

/** Follows the end of the text, unless the reader has scrolled away from it. */
function append(text, began) {
  if (summary.childNodes.length === 0) byId("first-token").textContent = `${secondsSince(began).toFixed(2)} s`;
  const follows = summary.scrollHeight - summary.scrollTop - summary.clientHeight < 8;
  summary.append(text); // a text node: nothing in it is ever read as HTML
  if (follows) summary.scrollTop = summary.scrollHeight;
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
  if (field.dataset.own !== "true") field.value = TRAINED_TO_SUMMARIZE.includes(model.value) ? "" : INSTRUCTION;
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
  summary.setAttribute("aria-busy", String(isRunning));
  document.body.classList.toggle("running", isRunning);
  if (isRunning) showOutcome("working …");
}

function showOutcome(text) {
  byId("outcome").textContent = text;
}

function reportError(error) {
  showOutcome("");
  showError(error instanceof EndpointError ? error.message : `The page failed: ${error.message}`);
  if (error.status === 401) byId("api-key").focus();
  if (!(error instanceof EndpointError)) console.error(error);
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
