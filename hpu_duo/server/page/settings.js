// Settings of calls. They and the key live in the session storage of this tab, and nowhere else.

import { byId } from "./dom.js";

const STORED_AS = "hpu-duo-settings";
const DEFAULTS = { key: "", system: "", temperature: "", maxTokens: "" };
const FIELDS = { key: "api-key", system: "system", temperature: "temperature", maxTokens: "max-tokens" };

/** The dialog and what was chosen there. */
export class Settings {
  #values = { ...DEFAULTS, ...stored() };
  #dialog = byId("settings");

  /** @param {() => void} onSaved */
  constructor(onSaved) {
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#save();
      onSaved();
    });
    byId("cancel-settings").addEventListener("click", () => this.#dialog.close());
  }

  get key() {
    return this.#values.key;
  }

  get system() {
    return this.#values.system;
  }

  /** Fields of a request; what is left empty is left to the server. */
  get fields() {
    const { temperature, maxTokens } = this.#values;
    return {
      ...(temperature === "" ? {} : { temperature: Number(temperature) }),
      ...(maxTokens === "" ? {} : { max_tokens: Number(maxTokens) }),
    };
  }

  /**
   * Show the fields that the server has a use for.
   * @param {boolean} asksForKey
   * @param {boolean} isChat whether it takes a system prompt
   */
  adapt(asksForKey, isChat) {
    byId("key-field").hidden = !asksForKey;
    byId("system-field").hidden = !isChat;
  }

  /** Open the dialog. */
  open(name = null) {
    for (const [value, id] of Object.entries(FIELDS)) byId(id).value = this.#values[value];
    if (name === "key") byId("key-field").hidden = false;
    if (!this.#dialog.open) this.#dialog.showModal();
    if (name !== null) byId(FIELDS[name]).focus();
  }

  #save() {
    for (const [value, id] of Object.entries(FIELDS)) this.#values[value] = byId(id).value;
    this.#values.key = this.#values.key.trim();
    try {
      sessionStorage.setItem(STORED_AS, JSON.stringify(this.#values));
    } catch {
      // A browser without storage keeps them as long as the page.
    }
    this.#dialog.close();
  }
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORED_AS)) ?? {};
  } catch {
    return {};
  }
}
