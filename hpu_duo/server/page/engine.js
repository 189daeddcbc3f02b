// The live view of the engine.

import { byId, make, setText } from "./dom.js";
import * as format from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const SECONDS = 60;

/** Draws statistics as they come. */
export class EngineView {
  #last = null;
  #lastAt = 0;
  #rates = [];
  #bars = makeBars();
  #meters = {};
  #figures = {};

  /**
   * Show statistics.
   * @param {object} stats see docs/server.md
   */
  show(stats) {
    const now = performance.now();
    const seconds = this.#last === null ? 0 : (now - this.#lastAt) / 1000;
    const rates = {};
    for (const [phase, steps] of Object.entries(stats.steps)) {
      rates[phase] = seconds > 0 ? Math.max(0, steps - (this.#last.steps[phase] ?? 0)) / seconds : 0;
    }
    this.#last = stats;
    this.#lastAt = now;
    this.#showState(stats);
    this.#showActivity(Object.values(rates).reduce((sum, one) => sum + one, 0));
    this.#showPhases(stats.steps, rates);
    this.#showMeters(stats);
    this.#showFigures(stats);
  }

  /** Say that nothing comes. */
  lose() {
    setText(byId("engine-state"), "The server does not answer; these are the last figures.");
    this.#last = null;
  }

  #showState(stats) {
    const { device, dtype, attention, graphs } = stats.resolved;
    const warmUp = stats.warm_up;
    const progress = stats.stage === "warming up" && warmUp ? `, ${warmUp.captured} of ${warmUp.total} shapes captured` : "";
    setText(byId("engine-state"), `${capital(stats.stage)}${progress}. ${device}, ${dtype}, attention ${attention}, graphs ${graphs}.`);
  }

  #showActivity(rate) {
    this.#rates = [...this.#rates, rate].slice(-SECONDS);
    const most = Math.max(1, ...this.#rates);
    const offset = SECONDS - this.#rates.length;
    this.#bars.forEach((bar, place) => {
      const height = place < offset ? 0 : (30 * this.#rates[place - offset]) / most;
      bar.setAttribute("y", String(30 - height));
      bar.setAttribute("height", String(height));
    });
    const label = `Steps a second over the last minute: now ${format.rate(rate)}, at most ${format.rate(Math.max(0, ...this.#rates))}`;
    byId("activity").setAttribute("aria-label", label);
  }

  #showPhases(steps, rates) {
    const rows = Object.keys(steps).sort().map((phase) => make(
      "tr", {},
      make("th", { scope: "row" }, phase),
      make("td", {}, format.count(steps[phase])),
      make("td", {}, format.rate(rates[phase])),
    ));
    if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: "3", class: "note" }, "No step yet.")));
    byId("phases").replaceChildren(...rows);
  }

  #showMeters(stats) {
    const waiting = Math.max(0, stats.num_open - stats.num_running);
    this.#meter("Rows", stats.used_rows, stats.total_rows);
    if (stats.total_blocks) this.#meter("Blocks", stats.used_blocks, stats.total_blocks);
    this.#meter("Queue", waiting, Math.max(0, stats.max_open - stats.total_rows));
    const { held_bytes: held, full_attention_bytes: full } = stats;
    this.#meter("KV held", held, full, `${format.bytes(held)}, full attention ${format.bytes(full)}`);
  }

  #meter(name, value, most, text = `${format.count(value)} of ${format.count(most)}`) {
    const share = most > 0 ? Math.min(1, value / most) : 0;
    const meter = (this.#meters[name] ??= makeMeter(name));
    setText(meter.text, text);
    meter.fill.style.width = `${100 * share}%`;
    meter.bar.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    meter.bar.setAttribute("aria-valuetext", text);
  }

  #showFigures(stats) {
    const { num_padded_tokens: padded, num_query_tokens: queries } = stats;
    this.#figure("Padding", format.finePercent(queries ? padded / queries : 0));
    this.#figure("Prompt tokens", format.count(stats.num_prompt_tokens));
    this.#figure("Output tokens", format.count(stats.num_output_tokens));
    this.#figure("Bucket misses", format.count(stats.num_graph_misses));
    this.#figure("Recompilations", format.count(stats.num_recompilations));
    this.#figure("Preemptions", format.count(stats.num_preemptions));
    this.#figure("KV stores", format.bytes(stats.kv_bytes));
    this.#figure("Buckets", format.count(stats.resolved.num_buckets));
    if (stats.speculation) this.#showDrafts(stats.speculation);
    this.#figure("Longest context", format.plural(stats.resolved.max_model_len, "token"));
  }

  #showDrafts({ num_drafts: verified, num_draft_tokens: drafted, num_accepted_tokens: accepted }) {
    this.#figure("Drafts accepted", `${format.count(accepted)} of ${format.count(drafted)}`);
    this.#figure("Tokens a verified row", verified ? format.rate(1 + accepted / verified) : "–");
  }

  #figure(name, text) {
    if (!(name in this.#figures)) {
      this.#figures[name] = make("dd");
      byId("figures").append(make("div", {}, make("dt", {}, name), this.#figures[name]));
    }
    setText(this.#figures[name], text);
  }
}

function makeBars() {
  const drawing = document.createElementNS(SVG, "svg");
  drawing.setAttribute("viewBox", `0 0 ${SECONDS * 4} 30`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("aria-hidden", "true");
  const bars = Array.from({ length: SECONDS }, (_, place) => {
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("x", String(place * 4));
    bar.setAttribute("width", "3");
    bar.setAttribute("height", "0");
    return bar;
  });
  drawing.append(...bars);
  byId("activity").append(drawing);
  return bars;
}

function makeMeter(name) {
  const fill = make("span");
  const text = make("span");
  const bar = make("div", { class: "meter", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" }, fill);
  byId("meters").append(make("div", {}, make("div", { class: "label" }, make("span", {}, name), text), bar));
  return { fill, text, bar };
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
