// The conversation so far, as it is sent to the model.

/** Questions and their answers; a question without any answer is left out. */
export class Conversation {
  #turns = [];

  /** Begin anew. */
  clear() {
    this.#turns = [];
  }

  /** Keep what was answered, whole or cut. */
  add(asked, answered) {
    if (answered) this.#turns.push({ asked, answered });
  }

  /** Messages for a chat template. */
  messages(system, asked) {
    const found = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.#turns) {
      found.push({ role: "user", content: turn.asked }, { role: "assistant", content: turn.answered });
    }
    return [...found, { role: "user", content: asked }];
  }

  /** One text to be continued, for a model without a chat template. */
  text(asked) {
    return [...this.#turns.map((turn) => `${turn.asked}${turn.answered}\n`), asked].join("");
  }
}
