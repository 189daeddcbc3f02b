// Calls of the server. Paths are relative, so that the page also works below a prefix of a proxy.

import { CallFailure, broken, lost, ofResponse } from "./failures.js";
import { eventData } from "./sse.js";

/**
 * Stream an answer.
 * @param {"v1/chat/completions"|"v1/completions"} path
 * @param {object} fields of the request
 * @param {string} key empty for none
 * @param {AbortSignal} signal ends the call
 * @returns {AsyncGenerator<{text: string, usage: ?object, reason: ?string}>}
 * @throws {CallFailure}
 */
export async function* generate(path, fields, key, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const response = await post(path, { ...fields, stream: true, stream_options: options }, key, signal);
  let hasBegun = false;
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw broken(event.error);
      hasBegun = true;
      const choice = event.choices?.[0];
      yield {
        text: choice?.delta?.content ?? choice?.text ?? "",
        usage: event.usage ?? null,
        reason: choice?.finish_reason ?? null,
      };
    }
  } catch (error) {
    if (error instanceof CallFailure || signal.aborted) throw error;
    throw lost(hasBegun);
  }
  throw lost(hasBegun);
}

/** The statistics of the engine; null when there are none to be had. */
export async function fetchStats(key) {
  try {
    const response = await fetch("stats", { headers: authorization(key), cache: "no-store", credentials: "omit" });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

async function post(path, fields, key, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization(key) },
      body: JSON.stringify(fields),
      credentials: "omit",
      signal,
    });
  } catch (error) {
    throw signal.aborted ? error : lost(false);
  }
  if (!response.ok) throw await ofResponse(response);
  return response;
}

const authorization = (key) => (key ? { Authorization: `Bearer ${key}` } : {});
