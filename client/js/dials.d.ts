/** One dial, as `GET /v1/adaptation` tells it. */
export interface Dial {
  name: string;
  value: number;
  /** The ends of the 95% interval. */
  low: number;
  high: number;
  /** What it was set to by hand, or null. */
  set: number | null;
  words: string;
}

/** The element `<ostinato-dials src="...">`, which importing this module defines. It dispatches the event `dials` after each answer. */
export class OstinatoDials extends HTMLElement {
  /** Its words; replace them, all of them, for another language. */
  texts: {
    heading: string;
    reset: string;
    confirm: string;
    clear: string;
    none: string;
    learned: (ratings: number) => string;
    returned: (at: Date) => string;
    failed: string;
    style: string;
    /** What the style `none` is called. */
    noStyle: string;
    learns: string;
    chances: (styles: [name: string, chance: number][]) => string;
    unoffered: string;
    off: Record<"consent" | "holdout" | "tenant" | "basis" | "trial" | "styles", string>;
  };
  /** The words for a dial. */
  describe: (dial: Dial) => string;
  /** Ask again, for instance after the person has rated an answer. */
  refresh(): Promise<void>;
}
