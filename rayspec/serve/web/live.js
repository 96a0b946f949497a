// The panel that shows how the chosen model is doing.

import { describePlan, drawSkipMap } from "./skip-map.js";

const POLL_MS = 1000;
const RETRY_MS = 5000;
const NOTHING = "–";
const OF_ALL = "over plain decoding, since the start; known after some rounds without drafts, or by a comparison";
const OF_ONE = "over plain decoding, measured with the last comparison";
const ONE_DIGIT = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const TWO_DIGITS = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });
const PERCENT = new Intl.NumberFormat("en", { style: "percent" });

/** Asks for the status now and then, but only while somebody can see the page. */
export class LivePanel {
  #endpoint;
  #model;
  #timer = null;
  #asking = new AbortController();
  #drawn = "";
  state = null; // the newest of the chosen model
  mostRunning = 0; // sequences of the chosen model at once, since the page set it to 0
  #measured = null; // {model, speedUp} of the last comparison

  /** `model` is asked for the id of the model to show. */
  constructor(endpoint, model) {
    this.#endpoint = endpoint;
    this.#model = model;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Asks at once, and from now on until the page is hidden or the key is refused. */
  async refresh() {
    clearTimeout(this.#timer);
    this.#asking.abort(); // its answer may be about another key or model
    if (document.hidden) return;
    const asking = new AbortController();
    this.#asking = asking;
    const pauseMs = await this.#ask(asking.signal);
    if (pauseMs !== null && !asking.signal.aborted) this.#timer = setTimeout(() => this.refresh(), pauseMs);
  }

  /** Milliseconds to wait before the next question, or null for none. */
  async #ask(signal) {
    try {
      const states = await this.#endpoint.status(signal);
      const replicas = states.filter(({ model }) => model === this.#model());
      const numRunning = replicas.reduce((sum, { num_running: count }) => sum + count, 0);
      this.mostRunning = Math.max(this.mostRunning, numRunning);
      if (replicas.length > 0) this.#show(replicas[0]);
      setText("live-note", "");
      return POLL_MS;
    } catch (error) {
      if (error.name === "AbortError") return null;
      setText("live-note", error.message);
      setText("load", "");
      return error.status === 401 ? null : RETRY_MS;
    }
  }

  /** From now on shows the speed-up of a comparison, which is measured, for the endpoint's estimate. */
  showMeasured(model, speedUp) {
    this.#measured = { model, speedUp };
    if (this.state?.model === model) this.#showSpeedUp();
  }

  #showSpeedUp() {
    const measured = this.#measured?.model === this.state.model ? this.#measured.speedUp : null;
    const speedUp = measured ?? this.state.speed_up;
    setText("speed-up", typeof speedUp === "number" ? `${ONE_DIGIT.format(speedUp)}x` : NOTHING);
    setText("speed-up-of", measured === null ? OF_ALL : OF_ONE);
  }

  #show(state) {
    const isOther = state.model !== this.state?.model;
    this.state = state;
    // Rates are of the last seconds: when the model has no work, the last ones stay.
    for (const [id, style, rate] of [
      ["acceptance", PERCENT, state.acceptance_rate],
      ["accepted-length", TWO_DIGITS, state.mean_accepted_length],
      ["tokens-per-s", ONE_DIGIT, state.tokens_per_s || null],
    ]) {
      if (isOther || format(style, rate) !== NOTHING) setText(id, format(style, rate));
    }
    this.#showSpeedUp();
    setText("plan", describePlan(state.plan));
    setText("gate", state.gate_reason ? state.gate_reason[0].toUpperCase() + state.gate_reason.slice(1) : "");
    setText("version", state.version ? `rayspec ${state.version}` : "");
    const used = PERCENT.format(state.kv_total_tokens ? state.kv_used_tokens / state.kv_total_tokens : 0);
    setText("load", `${state.num_running} running, ${state.num_waiting} waiting, KV cache ${used} used`);
    this.#draw(state);
  }

  /** Only when it changed: a map that is made anew every second loses the tooltip under the pointer. */
  #draw({ model, num_sublayers: numSublayers, plan }) {
    const drawing = JSON.stringify([model, numSublayers, plan?.choices]);
    if (drawing === this.#drawn) return;
    this.#drawn = drawing;
    drawSkipMap(document.getElementById("skip-map"), numSublayers, plan);
  }
}

function format(style, number) {
  return number === null || number === undefined ? NOTHING : style.format(number);
}

function setText(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}
