// Tokens, speed and memory of the last answer.

import { byId, setText } from "./dom.js";
import * as format from "./format.js";

/** Shortest time, in milliseconds, that says something of a speed. */
const LEAST_MS = 100;
/** Most of full attention that is shown as a share of it. */
const MOST_SHARE = 1.1;

/** Time and tokens of one answer. */
export class Meter {
  #sent = performance.now();
  #first = null;
  #last = null;
  #usage = null;

  /** Note that something has come. */
  saw(text, usage) {
    if (text) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    this.#usage = usage ?? this.#usage;
  }

  get promptTokens() {
    return this.#usage?.prompt_tokens ?? null;
  }

  /** Prompt tokens that were found in the prefix cache; null where the server does not say. */
  get cachedTokens() {
    return this.#usage?.prompt_tokens_details?.cached_tokens ?? null;
  }

  get completionTokens() {
    return this.#usage?.completion_tokens ?? null;
  }

  /** Milliseconds to the first text. */
  get firstMs() {
    return this.#first === null ? null : this.#first - this.#sent;
  }

  /** Tokens a second, behind the first one; null where they came too soon after one another to say. */
  get rate() {
    const tokens = (this.completionTokens ?? 0) - 1;
    const ms = this.#last - this.#first;
    return tokens > 0 && ms >= LEAST_MS ? (1000 * tokens) / ms : null;
  }

  /** A line of facts. */
  facts(reason) {
    const found = [];
    if (this.completionTokens !== null) found.push(format.plural(this.completionTokens, "token"));
    if (this.rate !== null) found.push(`${format.rate(this.rate)} tokens/s`);
    if (this.firstMs !== null) found.push(`first after ${format.duration(this.firstMs)}`);
    if (reason) found.push(reason);
    return found.join(" · ");
  }
}

/**
 * Show what the last answer took.
 * @param {Meter} meter
 * @param {?{block_size: number, block_bytes: number, row_bytes: number, full_attention_token_bytes: number}} kv
 */
export function showMeter(meter, kv) {
  show("prompt-tokens", meter.promptTokens, format.count);
  show("cached-tokens", meter.cachedTokens, format.count);
  byId("cached").hidden = !meter.cachedTokens;
  show("completion-tokens", meter.completionTokens, format.count);
  show("rate", meter.rate, format.rate);
  const held = kv === null || meter.promptTokens === null ? null : kvOf(kv, meter.promptTokens + meter.completionTokens);
  show("kv-held", held, heldText);
  show("kv-full", held, (both) => format.bytes(both.full));
}

/** Bytes held, and their share of full attention unless whole blocks and rings of a short text are mostly empty. */
function heldText({ held, full }) {
  return held > MOST_SHARE * full ? format.bytes(held) : `${format.bytes(held)} (${format.percent(held / full)})`;
}

/** Show no answer. */
export function clearMeter() {
  showMeter(new Meter(), null);
}

/** Show how many of the heads stream. */
export function showSparsity({ num_retrieval_heads: retrieval, num_streaming_heads: streaming }) {
  const all = retrieval + streaming;
  setText(byId("sparsity"), `${streaming} of ${all} (${format.percent(streaming / all)})`);
}

/** What a request with so many tokens takes up: whole blocks and its row; and what they take in full attention. */
function kvOf(kv, tokens) {
  return {
    held: Math.ceil(tokens / kv.block_size) * kv.block_bytes + kv.row_bytes,
    full: tokens * kv.full_attention_token_bytes,
  };
}

function show(id, value, write) {
  setText(byId(id), value === null ? "–" : write(value));
}
