// The endpoint's routes, and what goes wrong there in words.

import { eventData } from "./sse.js";

const DONE = "[DONE]";
const DEFAULT_RETRY_S = { 429: 2, 503: 10 };
const LOST = "The connection was lost before the summary was complete. What has come so far is above.";
const UNREACHABLE = "The endpoint cannot be reached. Is it still running?";

/** `message` is for people. `status` is of HTTP, null without an answer; `retryAfterS` is set where the same request
 * may soon be welcome. */
export class EndpointError extends Error {
  constructor(message, { status = null, retryAfterS = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** `apiKey` lives in memory only. Every method throws EndpointError, or an AbortError once its signal was aborted. */
export class Endpoint {
  apiKey = "";

  /** Ids of the models, in the endpoint's order. */
  async models() {
    const { data } = await (await this.#fetch("v1/models")).json();
    return data.map((model) => model.id);
  }

  /** A state for each model: see `/status`. */
  async status(signal) {
    return (await (await this.#fetch("status", { signal })).json()).models;
  }

  /** A report to try it on. */
  async sample() {
    return (await this.#fetch("sample.txt")).text();
  }

  /** Chunks of the answer as they come: {text, finishReason, numTokens}, each null where there is nothing new. */
  async *complete({ model, prompt, maxTokens, temperature, seed, useDrafts }, signal) {
    const body = {
      model,
      messages: [{ role: "user", content: prompt }],
      max_tokens: maxTokens,
      temperature,
      seed,
      use_drafts: useDrafts,
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await this.#fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    try {
      for await (const data of eventData(response.body)) {
        if (data === DONE) return;
        yield chunkOf(JSON.parse(data));
      }
    } catch (error) {
      throw error instanceof TypeError ? new EndpointError(LOST) : error; // what a broken body throws
    }
    throw new EndpointError(LOST);
  }

  async #fetch(path, { method = "GET", body = null, signal = null } = {}) {
    const headers = {};
    if (body !== null) headers["Content-Type"] = "application/json";
    if (this.apiKey !== "") headers.Authorization = `Bearer ${this.apiKey}`;
    let response;
    try {
      response = await fetch(path, { method, body, signal, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      throw error.name === "AbortError" ? error : new EndpointError(UNREACHABLE);
    }
    if (!response.ok) throw await this.#refusal(response);
    return response;
  }

  async #refusal(response) {
    const { status } = response;
    const said = await messageIn(response);
    const retryAfterS = retryAfter(response, DEFAULT_RETRY_S[status] ?? null);
    if (status === 401) {
      const message = this.apiKey === "" ? "The endpoint asks for an API key." : "The endpoint refused the API key.";
      return new EndpointError(message, { status });
    }
    if (status === 429) {
      return new EndpointError(`The endpoint is full. ${said}`.trim(), { status, retryAfterS });
    }
    if (status === 503) return new EndpointError(said || "The model cannot serve now.", { status, retryAfterS });
    return new EndpointError(said || `The endpoint answered with HTTP status ${status}.`, { status });
  }
}

function chunkOf(chunk) {
  if (chunk.error) throw new EndpointError(`The summary broke off: ${chunk.error.message}`);
  const choice = chunk.choices[0];
  return {
    text: choice?.delta.content || null,
    finishReason: choice?.finish_reason ?? null,
    numTokens: chunk.usage?.completion_tokens ?? null,
  };
}

async function messageIn(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return ""; // an answer of someone in between, which has no such body
  }
}

function retryAfter(response, otherwiseS) {
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return Number.isNaN(seconds) ? otherwiseS : seconds;
}
