// Events to the server, with retries until a deadline, and what can go wrong.

const MOST_EVENTS = 1000; // in one call
const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2000;
const LONGEST_TIMER_MS = 2 ** 31 - 1; // a longer one would fire at once
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

/** When sending ends; what is under way then is given up. */
export class Until {
  #at;
  #arm = null; // sets the timer of what is under way

  constructor(ms) {
    this.ms = ms;
    this.#at = performance.now() + ms;
  }

  get leftMs() {
    return this.#at - performance.now();
  }

  /** Bring the end forward, to `ms` from now at the latest. */
  within(ms) {
    if (ms >= this.leftMs) return;
    this.ms = ms;
    this.#at = performance.now() + ms;
    this.#arm?.();
  }

  /** What `work` makes of a signal that aborts it at the end. */
  async run(work) {
    const giveUp = new AbortController();
    let timer;
    this.#arm = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        this.#at = 0; // a timer may be early, and another attempt must not follow
        giveUp.abort(new Error("no answer in time"));
      }, Math.max(1, Math.ceil(this.leftMs)));
    };
    this.#arm();
    try {
      return await work(giveUp.signal);
    } finally {
      clearTimeout(timer);
      this.#arm = null;
    }
  }

  /** Wait, until the end at the longest. */
  pause(ms) {
    let timer;
    const waiting = (signal) =>
      new Promise((resume) => {
        timer = setTimeout(resume, Math.min(ms, LONGEST_TIMER_MS));
        signal.addEventListener("abort", resume);
      });
    return this.run(waiting).finally(() => clearTimeout(timer));
  }
}

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

  /** What became of each event, in order. `until` may be brought forward meanwhile. */
  async send(events, until, keepalive = false) {
    const receipts = [];
    for (let start = 0; start < events.length; start += MOST_EVENTS) {
      receipts.push(...(await this.#send(events.slice(start, start + MOST_EVENTS), until, keepalive)));
    }
    return receipts;
  }

  async #send(events, until, keepalive) {
    const body = JSON.stringify(events.length === 1 ? events[0] : events);
    let last = "no attempt was made";
    for (let pause = FIRST_PAUSE_MS; until.leftMs > 0; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      let wait = 0;
      try {
        const [reply, text] = await until.run(async (signal) => {
          // a key is sent to the server that was named and to no other
          const given = { method: "POST", headers: this.headers, body, keepalive, redirect: "error", signal };
          const reply = await fetch(this.url, given);
          return [reply, await reply.text()];
        });
        if (reply.ok) return receipts(text, events.length);
        last = `HTTP ${reply.status}: ${refused(reply.status, text)}`;
        wait = 1000 * Math.max(0, Number(reply.headers.get("retry-after")) || 0);
      } catch (error) {
        if (error instanceof FeedbackError) throw error;
        last = error.cause?.message ?? error.message;
      }
      // jittered, so that many clients do not come back together
      await until.pause(Math.max(wait, pause * (0.5 + 0.5 * Math.random())));
    }
    throw new NotTaken(
      `${this.url} did not take ${events.length} event(s) within ${until.ms} ms (${last}); send them again with the same ids.`,
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
