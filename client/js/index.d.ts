export type Source = "human" | "implicit" | "code" | "llm";

/** What became of an event, which the server has on disk: "accepted", "early", "repeated", "changed", "late" or "retracted". */
export interface Receipt {
  id: string;
  status: string;
}

export interface EventOptions {
  /** Who observed it; "human" if left out. */
  source?: Source;
  correction?: string;
  comment?: string;
  /** Unix seconds, ISO 8601 or a Date; the moment of arrival if left out. */
  occurredAt?: number | string | Date;
  /** The id of an earlier event that is taken back. */
  retracts?: string;
  /** Counted once, however often it is sent; made if left out. */
  id?: string;
}

export interface Event extends EventOptions {
  /** A response's id (its first choice), a turn "response:choice", or a tool call's id. */
  target: string;
  /** accepted, rejected, undone, ... */
  name: string;
  /** May be left out of an event that retracts another. */
  value?: boolean | number;
}

export interface Options {
  /** As given to the OpenAI client. Never put it into a page. */
  apiKey?: string;
  /** Longest time for one call, retries included, in milliseconds; 5,000 if left out. */
  deadlineMs?: number;
  /** Told what could not be sent of what was enqueued; logs it if left out. */
  onError?: (error: Error) => void;
}

/** Sends feedback: `feedback` waits until it is durable, `enqueue` does not wait. */
export class Ostinato {
  /** `baseUrl`: the server, with or without "/v1", or a path of the page's own site. Throws TypeError. */
  constructor(baseUrl: string, options?: Options);
  /** Durable when it resolves. Rejects with Refused, NotAllowed, NotTaken. */
  feedback(target: string, name: string, value?: boolean | number, options?: EventOptions): Promise<Receipt>;
  /** Many, a thousand in a call; what became of each, in order. Rejects as `feedback` does. */
  feedbackMany(events: Event[]): Promise<Receipt[]>;
  /** Sent in batches beside the program; its id, at once. Throws NotTaken if 10,000 wait. A page that goes sends what is left. */
  enqueue(target: string, name: string, value?: boolean | number, options?: EventOptions): string;
  /** Wait until everything enqueued was sent; false if it was not. */
  flush(timeoutMs?: number): Promise<boolean>;
  /** Take nothing more and send what waits; false if that took longer than the deadline. */
  close(): Promise<boolean>;
}

/** The value of the header `X-Ostinato-User-Signature`; on the product's server, which alone knows the secret. */
export function signUser(secret: string, user: string, options?: { lifetimeS?: number; now?: number }): Promise<string>;

/** Base of this package's errors. */
export class FeedbackError extends Error {}
/** The server will never take this event. */
export class Refused extends FeedbackError {
  field: string | null;
}
/** The API key is missing or wrong. */
export class NotAllowed extends FeedbackError {}
/** The server did not confirm the events in time, or too many wait; send them again with the same ids. */
export class NotTaken extends FeedbackError {}
