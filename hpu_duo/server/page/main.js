// The page: a chat with the model, and a view of the engine that runs it.

import { fetchStats, generate } from "./api.js";
import { Conversation } from "./conversation.js";
import { Meter, clearMeter, showMeter, showSparsity } from "./counters.js";
import { byId, setText } from "./dom.js";
import { EngineView } from "./engine.js";
import { CallFailure } from "./failures.js";
import { plural } from "./format.js";
import { Settings } from "./settings.js";
import { Answer, clearTranscript, showQuestion } from "./transcript.js";

const POLL_MS = 1000;
const REASONS = { length: "cut at the token limit", stop: "" };

const prompt = byId("prompt");
const conversation = new Conversation();
const settings = new Settings(() => showNotes());
const view = new EngineView();

let stats = null;
let call = null;

// Chat

/** Ask something; one answer comes at a time. */
async function ask(asked) {
  const own = (call = new AbortController());
  setBusy(true);
  const answer = new Answer();
  const meter = new Meter();
  let reason = null;
  try {
    for await (const part of generate(...request(asked), settings.key, own.signal)) {
      answer.append(part.text);
      meter.saw(part.text, part.usage);
      reason = part.reason ?? reason;
      showMeter(meter, stats?.kv ?? null);
    }
    if (own !== call) return answer.remove();
    answer.end(meter.facts(REASONS[reason] ?? reason));
    announce(`Answer complete, ${plural(meter.completionTokens ?? 0, "token")}.`);
    conversation.add(asked, answer.text);
  } catch (error) {
    if (own !== call) return answer.remove();
    if (own.signal.aborted) {
      answer.end(meter.facts("stopped"));
      announce("Stopped.");
      conversation.add(asked, answer.text);
    } else {
      fail(answer, asked, error);
    }
  } finally {
    if (own === call) setBusy(false);
  }
}

function fail(answer, asked, error) {
  const isKnown = error instanceof CallFailure;
  if (!isKnown) console.error(error);
  const sentence = isKnown ? error.message : "Something failed on this page; the browser's console says more.";
  // The log of the conversation says it.
  announce("");
  answer.fail(sentence, () => {
    answer.remove();
    ask(asked);
  });
  if (error.kind === "key") settings.open("key");
}

/** Path and fields of a call. */
function request(asked) {
  const fields = { ...(stats === null ? {} : { model: stats.model }), ...settings.fields };
  return stats?.has_chat_template === false
    ? ["v1/completions", { ...fields, prompt: conversation.text(asked) }]
    : ["v1/chat/completions", { ...fields, messages: conversation.messages(settings.system, asked) }];
}

function send() {
  const asked = prompt.value;
  if (call !== null || !asked.trim()) return;
  prompt.value = "";
  fit();
  showQuestion(asked);
  ask(asked);
}

function stop() {
  call?.abort();
}

function startAnew() {
  const own = call;
  setBusy(false);
  own?.abort();
  conversation.clear();
  clearTranscript();
  clearMeter();
  prompt.focus();
}

function setBusy(isBusy) {
  if (!isBusy) call = null;
  const hadFocus = document.activeElement === byId(isBusy ? "send" : "stop");
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (isBusy) announce("The model answers.");
  if (hadFocus) prompt.focus();
}

/** Let a screen reader say something. */
function announce(text) {
  setText(byId("status"), text);
}

/** Let the field be as high as its text. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

// Engine

async function poll() {
  if (document.visibilityState === "visible") showStats(await fetchStats(settings.key));
  setTimeout(poll, POLL_MS);
}

function showStats(found) {
  byId("stage").classList.toggle("bad", found?.stage !== "ready");
  setText(byId("stage"), found?.stage ?? "no connection");
  if (found === null) return view.lose();
  stats = found;
  setText(byId("model"), stats.model);
  showNotes();
  showSparsity(stats.resolved);
  view.show(stats);
}

function showNotes() {
  if (stats === null) return;
  settings.adapt(stats.asks_for_key, stats.has_chat_template);
  byId("needs-key").hidden = !stats.asks_for_key || settings.key !== "";
  byId("no-template").hidden = stats.has_chat_template;
}

function showEngine(isShown) {
  byId("engine").hidden = !isShown;
  byId("toggle-engine").setAttribute("aria-expanded", String(isShown));
}

// What a user does

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  // Enter also ends the composition of a character.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("settings").open) stop();
});
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", startAnew);
byId("open-settings").addEventListener("click", () => settings.open());
byId("enter-key").addEventListener("click", () => settings.open("key"));
byId("example").addEventListener("click", (event) => {
  prompt.value = event.currentTarget.textContent;
  fit();
  prompt.focus();
});
byId("toggle-engine").addEventListener("click", () => showEngine(byId("engine").hidden));

const wide = matchMedia("(min-width: 64rem)");
wide.addEventListener("change", () => showEngine(wide.matches));
showEngine(wide.matches);
prompt.focus();
poll();
