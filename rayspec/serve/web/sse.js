// Server-sent events, read from the body of a fetch (EventSource can neither POST nor send an Authorization header).

const LINE_END = /\r\n|\n|\r(?!$)/; // a \r that ends what has come so far may be half of a \r\n

/** The data of each event, as soon as the event is whole. Bytes may be split anywhere, also within a character; an
 * event that never ended is dropped, as the HTML standard asks. */
export async function* eventData(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (pending + decoder.decode(value, { stream: true })).split(LINE_END);
      pending = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        if (line !== "" || data.length === 0) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // of a body that already failed: the failure is under way to the caller
  }
}
