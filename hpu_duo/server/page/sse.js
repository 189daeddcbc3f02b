// Server-sent events of a response's body, as the HTML standard has them: "event" and "id" are not used by the API.

/**
 * Yield the data of each event.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* eventData(body) {
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(line[5] === " " ? 6 : 5));
    } else if (line === "data") {
      data.push("");
    }
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the end may be the first half of a line's end.
      const complete = rest.endsWith("\r") ? rest.slice(0, -1) : rest;
      const found = complete.split(/\r\n|\n|\r/);
      rest = found.pop() + rest.slice(complete.length);
      yield* found;
    }
  } finally {
    // Whoever stops reading hangs up.
    reader.cancel().catch(() => {});
  }
}
