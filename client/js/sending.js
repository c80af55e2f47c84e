// Events to the server, with retries until a deadline, and what can go wrong.

const MOST_EVENTS = 1000; // in one call
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;
const RETRIED = new Set([408, 409, 429]);
const LONGEST_ANSWER = 1 << 20; // characters

/** Base of this package's errors. */
export class FeedbackError extends Error {
  get name() {
    return this.constructor.name;
  }
}

/** The server will never take this event; `field` is the part at fault, or null. */
export class Refused extends FeedbackError {
  constructor(message, field = null) {
    super(message);
    this.field = field;
  }
}

/** The API key is missing or wrong. */
export class NotAllowed extends FeedbackError {}

/** The server did not confirm the events in time, or too many wait; send them again with the same ids. */
export class NotTaken extends FeedbackError {}

/** Knows where, and with which key. */
export class Sender {
  constructor(baseUrl, apiKey) {
    if (!/^(https?:\/\/[^/]|\/(?!\/))/.test(baseUrl)) {
      throw new TypeError(`baseUrl is ${JSON.stringify(baseUrl)}; give something like "http://127.0.0.1:8321", or a path of your own site.`);
    }
    this.url = `${baseUrl.replace(/\/+$/, "").replace(/\/v1$/, "")}/v1/feedback`;
    this.headers = { "content-type": "application/json" };
    if (apiKey != null) this.headers.authorization = `Bearer ${apiKey}`;
  }

  /** What became of each event, in order. `until.at` may be brought forward meanwhile. */
  async send(events, deadlineMs, keepalive = false, until = { at: performance.now() + deadlineMs }) {
    const receipts = [];
    for (let start = 0; start < events.length; start += MOST_EVENTS) {
      receipts.push(...(await this.#send(events.slice(start, start + MOST_EVENTS), deadlineMs, until, keepalive)));
    }
    return receipts;
  }

  async #send(events, deadlineMs, until, keepalive) {
    const body = JSON.stringify(events.length === 1 ? events[0] : events);
    let last = "no attempt was made";
    for (let pause = FIRST_PAUSE_MS; performance.now() < until.at; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      let wait = 0;
      try {
        const reply = await fetch(this.url, {
          method: "POST",
          headers: this.headers,
          body,
          keepalive,
          redirect: "error", // a key is sent to the server that was named and to no other
          signal: AbortSignal.timeout(Math.max(1, Math.ceil(until.at - performance.now()))),
        });
        const text = await reply.text();
        if (reply.ok) return receipts(text, events.length);
        last = `HTTP ${reply.status}: ${refused(reply.status, text)}`;
        wait = 1000 * Math.max(0, Number(reply.headers.get("retry-after")) || 0);
      } catch (error) {
        if (error instanceof FeedbackError) throw error;
        last = error.cause?.message ?? error.message;
      }
      // jittered, so that many clients do not come back together
      const longest = Math.max(wait, pause * (0.5 + 0.5 * Math.random()));
      await new Promise((resume) => setTimeout(resume, Math.max(0, Math.min(longest, until.at - performance.now()))));
    }
    throw new NotTaken(
      `${this.url} did not take ${events.length} event(s) within ${deadlineMs} ms (${last}); send them again with the same ids.`,
    );
  }
}

function receipts(text, count) {
  const found = text.length > LONGEST_ANSWER ? null : JSON.parse(text);
  const rows = count === 1 ? [found] : found;
  if (!Array.isArray(rows) || rows.length !== count || rows.some((row) => typeof row?.status !== "string")) {
    throw new Error("the answer is not a gateway's");
  }
  return rows.map(({ id, status }) => ({ id, status }));
}

/** The server's explanation; throws if another attempt cannot help. */
function refused(status, text) {
  let message = text.slice(0, 200) || "no explanation";
  let field = null;
  try {
    const { error } = JSON.parse(text);
    message = String(error.message);
    field = error.param ?? null;
  } catch {
    // what is no JSON is shown as it is
  }
  if (status >= 500 || RETRIED.has(status)) return message;
  throw status === 401 || status === 403 ? new NotAllowed(message) : new Refused(message, field);
}
