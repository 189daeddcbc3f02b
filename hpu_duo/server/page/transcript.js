// Messages on the page.

import { byId, make, makeButton, setText } from "./dom.js";

const LONG_CHARACTERS = 900;
const LONG_LINES = 10;
const NEAR_THE_END_PX = 60;

const transcript = byId("transcript");
const welcome = byId("welcome");

/** Show a question. */
export function showQuestion(text) {
  welcome.hidden = true;
  const bubble = make("div", { class: "bubble" }, make("div", { class: "text" }, text));
  const message = make("article", { class: "message asked", "aria-label": "You" }, bubble);
  if (text.length > LONG_CHARACTERS || text.split("\n").length > LONG_LINES) {
    message.classList.add("long");
    const toggle = makeButton("Show all", () => {
      const isWhole = message.classList.toggle("whole");
      setText(toggle, isWhole ? "Show less" : "Show all");
      toggle.setAttribute("aria-expanded", String(isWhole));
    }, { class: "link", "aria-expanded": "false" });
    bubble.append(toggle);
  }
  transcript.append(message);
  scrollToEnd();
}

/** Take everything away. */
export function clearTranscript() {
  transcript.replaceChildren(welcome);
  welcome.hidden = false;
}

/** An answer that grows; the page is changed once a frame at most, however fast text comes. */
export class Answer {
  #text = document.createTextNode("");
  #facts = make("p", { class: "facts" });
  #message = make(
    "article",
    { class: "message answered", "aria-label": "Answer", "aria-busy": "true" },
    make("div", { class: "text" }, this.#text),
    this.#facts,
  );
  #whole = "";
  #unseen = "";
  #frame = 0;

  constructor() {
    transcript.append(this.#message);
    scrollToEnd();
  }

  /** All that was appended; what is seen leaves white space at its beginning out. */
  get text() {
    return this.#whole;
  }

  /** Append text. */
  append(text) {
    this.#whole += text;
    this.#unseen += text;
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  /** Say how it has gone; nothing is appended any more. */
  end(facts) {
    this.#finish();
    setText(this.#facts, facts);
  }

  /** Say why it has not gone well. */
  fail(sentence, onRetry) {
    this.#finish();
    const retry = makeButton("Try again", () => {
      box.remove();
      onRetry();
    }, { class: "link" });
    const box = make("div", { class: "error" }, sentence, " ", retry);
    this.#message.append(box);
    scrollToEnd();
  }

  /** Take it away. */
  remove() {
    this.#message.remove();
  }

  #finish() {
    this.#flush();
    this.#message.setAttribute("aria-busy", "false");
  }

  #flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const wasAtEnd = isAtEnd();
    this.#text.appendData(this.#text.length ? this.#unseen : this.#unseen.trimStart());
    this.#unseen = "";
    if (wasAtEnd) scrollToEnd();
  }
}

/** Whether the reader follows the end, rather than reading further up. */
const isAtEnd = () => transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_THE_END_PX;

function scrollToEnd() {
  transcript.scrollTop = transcript.scrollHeight;
}
