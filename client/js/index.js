// Feedback to an Ostinato server: `feedback` waits until it is durable, `enqueue` does not wait.

import { FeedbackError, NotAllowed, NotTaken, Refused, Sender, Until } from "./sending.js";

export { FeedbackError, NotAllowed, NotTaken, Refused };

const MOST_WAITING = 10_000;
const BATCH = 500;
const GATHER_MS = 100;
const ROUND_MS = 60_000;
const KEEPALIVE_BYTES = 60_000; // browsers let a page that goes send 64 KiB

/** Sends feedback. See index.d.ts. */
export class Ostinato {
  #sender;
  #deadlineMs;
  #waiting = [];
  #sending = [];
  #running = null;
  #until = new Until(0); // when the round ends that is under way, or after a close all sending
  #closed = false;
  #onError;
  #onPageHide = () => this.#leave();

  constructor(baseUrl, { apiKey, deadlineMs = 5000, onError = (error) => console.error(error.message) } = {}) {
    this.#sender = new Sender(baseUrl, apiKey);
    this.#deadlineMs = deadlineMs;
    this.#onError = (error) => {
      try {
        onError(error);
      } catch (thrown) {
        console.error(thrown); // what fails there must not end the sending
      }
    };
    // elsewhere than in a page it never comes, and would keep this client
    if (globalThis.document) globalThis.addEventListener?.("pagehide", this.#onPageHide);
  }

  async feedback(target, name, value, options = {}) {
    const [receipt] = await this.#sender.send([event(target, name, value, options)], new Until(this.#deadlineMs));
    return receipt;
  }

  async feedbackMany(events) {
    const all = events.map(({ target, name, value, ...options }) => event(target, name, value, options));
    return this.#sender.send(all, new Until(this.#deadlineMs));
  }

  enqueue(target, name, value, options = {}) {
    if (this.#closed) throw new NotTaken("this client is closed");
    if (this.#waiting.length + this.#sending.length >= MOST_WAITING) {
      throw new NotTaken(`${MOST_WAITING} events wait for ${this.#sender.url}; it takes none or too few`);
    }
    const one = event(target, name, value, options);
    this.#waiting.push(one);
    this.#running ??= this.#run();
    return one.id;
  }

  async flush(timeoutMs = 5000) {
    let timer;
    const late = new Promise((resolve) => (timer = setTimeout(resolve, timeoutMs, false)));
    const done = await Promise.race([Promise.resolve(this.#running).then(() => true), late]);
    clearTimeout(timer);
    return done && this.#waiting.length === 0;
  }

  async close() {
    this.#closed = true;
    if (this.#sending.length > 0) this.#until.within(this.#deadlineMs);
    else this.#until = new Until(this.#deadlineMs);
    const done = await this.flush(this.#deadlineMs);
    if (done) globalThis.removeEventListener?.("pagehide", this.#onPageHide); // which would keep this client as long as the page
    else this.#onError(new NotTaken(`${this.#waiting.length + this.#sending.length} feedback events were not sent`));
    return done;
  }

  async #run() {
    if (!this.#closed) await new Promise((resume) => setTimeout(resume, GATHER_MS));
    while (this.#waiting.length > 0) {
      this.#sending = this.#waiting.splice(0, BATCH);
      if (!this.#closed) this.#until = new Until(ROUND_MS);
      const left = await this.#deliver(this.#sending);
      this.#sending = [];
      this.#waiting.unshift(...left);
      if (left.length > 0 && this.#closed) break;
    }
    this.#running = null;
  }

  /** What has to be sent again. */
  async #deliver(batch) {
    try {
      await this.#sender.send(batch, this.#until);
      return [];
    } catch (error) {
      this.#onError(error);
      if (error instanceof NotTaken) return batch;
      if (error instanceof NotAllowed || batch.length === 1) return []; // others: refused, or no JSON
    }
    const left = []; // one bad event must not take its neighbours with it
    for (const one of batch) left.push(...(await this.#deliver([one])));
    return left;
  }

  /** The page goes: what waits or is under way is sent once more, and counts once by its ids. */
  #leave() {
    const all = [...this.#sending, ...this.#waiting].filter(isJson); // one that is none must not keep the others here
    for (let part = []; all.length > 0; part = []) {
      for (let size = 2; all.length > 0 && part.length < BATCH; ) {
        size += new TextEncoder().encode(JSON.stringify(all[0])).length + 1;
        if (size > KEEPALIVE_BYTES && part.length > 0) break;
        part.push(all.shift());
      }
      this.#sender.send(part, new Until(this.#deadlineMs), true).catch(this.#onError);
    }
  }
}

/** The value of the header `X-Ostinato-User-Signature`; on the product's server, which alone knows the secret. */
export async function signUser(secret, user, { lifetimeS = 3600, now = Date.now() / 1000 } = {}) {
  const expires = Math.floor(now + lifetimeS);
  const bytes = new TextEncoder();
  const key = await crypto.subtle.importKey("raw", bytes.encode(secret), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const digest = new Uint8Array(await crypto.subtle.sign("HMAC", key, bytes.encode(`${expires}.${user}`)));
  return `${expires}.${Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function event(target, name, value, { id, source = "human", correction, comment, occurredAt, retracts }) {
  const at = occurredAt instanceof Date ? occurredAt.toISOString() : occurredAt;
  const given = { id: id ?? newId(), target, name, value, source, correction, comment, occurred_at: at, retracts };
  return Object.fromEntries(Object.entries(given).filter(([, part]) => part != null));
}

function isJson(event) {
  try {
    return JSON.stringify(event).length > 0;
  } catch {
    return false;
  }
}

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16)); // randomUUID is missing on pages without https
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
