// Failures of calls, as sentences.

/** A call that failed; the message is a sentence for the user. */
export class CallFailure extends Error {
  /**
   * @param {string} kind "key", "busy", "unready", "refused", "broken" or "lost"
   * @param {string} sentence
   */
  constructor(kind, sentence) {
    super(sentence);
    this.kind = kind;
  }
}

/** The connection could not be made, or has ended too early. */
export function lost(hasBegun) {
  return new CallFailure(
    "lost",
    hasBegun
      ? "The connection to the server was lost in the middle of the answer."
      : "The server cannot be reached. It may have stopped, or the network is down.",
  );
}

/** An event of the stream says that the answer has failed. */
export function broken(error) {
  return new CallFailure("broken", `The answer broke off: ${said(error)}`);
}

/** A response whose status says that there is no answer. */
export async function ofResponse(response) {
  const error = await response.json().then((body) => body?.error, () => null);
  const seconds = Number(response.headers.get("retry-after"));
  const again = seconds > 0 ? ` Try again in ${seconds} ${seconds === 1 ? "second" : "seconds"}.` : " Try again later.";
  switch (response.status) {
    case 401:
      return new CallFailure("key", "The server asks for an API key that it knows. Enter one in the settings.");
    case 429:
      return new CallFailure("busy", `The server is busy, its queue is full.${again}`);
    case 503:
      return new CallFailure("unready", `The server does not take calls now: ${said(error)}${again}`);
    case 413:
      return new CallFailure("refused", "The conversation is longer than the server takes. Start a new chat.");
    default:
      if (error?.code === "context_length_exceeded") {
        return new CallFailure("refused", `The conversation is too long for the model: ${said(error)}`);
      }
      if (response.status < 500) return new CallFailure("refused", `The server refused the call: ${said(error)}`);
      return new CallFailure("broken", `The server failed: ${said(error)}`);
  }
}

function said(error) {
  const text = typeof error?.message === "string" && error.message ? error.message : "it did not say why";
  return /[.!?]$/.test(text) ? text : `${text}.`;
}
