// <ostinato-dials src="/ostinato/v1/adaptation">: a person sees and sets how answers lean to them. No dependencies; see README.md.

const STYLE = `
  :host { display: block; font: inherit; color: inherit; max-width: 36rem; --ostinato-dials-accent: #2563eb; }
  h2 { font-size: 1.1em; margin: 0 0 .5em; }
  ul { list-style: none; margin: 0; padding: 0; }
  li { padding: .6em 0; border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
  .line { display: flex; gap: .75em; align-items: baseline; flex-wrap: wrap; }
  label { font-weight: 600; }
  .words { flex: 1; min-width: 10rem; }
  .track { position: relative; padding-top: .45em; }
  .known { position: absolute; top: 0; height: .3em; border-radius: .15em; background: var(--ostinato-dials-accent); opacity: .35; }
  input { width: 100%; margin: 0; accent-color: var(--ostinato-dials-accent); }
  button { font: inherit; color: inherit; background: none; border: 1px solid currentColor; border-radius: .3em; padding: .2em .7em; cursor: pointer; }
  button:disabled { opacity: .5; cursor: default; }
  li button { padding: 0 .5em; font-size: .85em; }
  [role="status"] { min-height: 1.4em; margin: .6em 0; }
  select { font: inherit; max-width: 100%; }
  .style { margin: 0 0 .75em; }
  small { display: block; }
`;
const LONGEST_MS = 30_000; // of one call, for which the next one waits
const TEXTS = {
  heading: "How answers are written for you",
  reset: "Forget all of it",
  confirm: "Forget what was learned from your ratings, and what you set here?",
  clear: "let it learn",
  none: "There is nothing to set yet.",
  learned: (ratings) => `Learned from ${ratings} of your ratings. The bar over a slider is where your wish probably lies.`,
  returned: (at) => `Begun anew on ${at.toLocaleDateString()}.`,
  failed: "This could not be saved; try again.",
  style: "Style",
  noStyle: "as the model writes by itself",
  learns: "let it learn which one suits you",
  chances: (styles) => `Your next conversation: ${styles.map(([name, chance]) => `${name} ${Math.round(100 * chance)}%`).join(", ")}.`,
  unoffered: "not offered at present",
  off: {
    consent: "Your answers do not change, because they may not learn from you.",
    holdout: "Your answers do not change at present; what you set here is kept.",
    tenant: "Your answers do not change here.",
    basis: "Your answers do not change until the new version of the model has been prepared.",
    trial: "Your answers do not change for a while; what you set here is kept.",
    styles: "No style is offered at present.",
  },
};
const sheet = typeof CSSStyleSheet === "function" ? new CSSStyleSheet() : null;
sheet?.replaceSync(STYLE);

/**
 * Shows the dials that `src` of the page's own site answers, and sends what the person sets there. After each answer it dispatches the
 * event `dials` with that answer as its detail. `texts` holds its words, `describe(dial)` those for a dial; replace them for another language.
 */
export class OstinatoDials extends (globalThis.HTMLElement ?? Object) {
  texts = TEXTS;
  describe = (dial) => dial.words;
  #root;
  #told = null;
  #asked = 0;
  #turn = Promise.resolve();
  #waiting = null; // the last call, until it begins

  async connectedCallback() {
    if (!this.#root) {
      this.#root = this.attachShadow({ mode: "open" });
      this.#root.adoptedStyleSheets = [sheet];
    }
    await this.#ask("GET");
  }

  /** Ask again, for instance after the person has rated an answer. */
  refresh() {
    return this.#ask("GET");
  }

  /**
   * One call after the other: of two settings of one dial the server must keep the later. What a key that is held sets while a call is
   * under way goes in one.
   */
  #ask(method, body) {
    const [number, src, last] = [++this.#asked, this.getAttribute("src"), this.#waiting];
    if (last?.method === method && last.src === src) {
      Object.assign(last, { number, body: body && { ...last.body, ...body } });
      return last.done;
    }
    const call = { number, src, method, body };
    this.#waiting = call;
    call.done = this.#turn.then(() => this.#send(call));
    this.#turn = call.done.catch(() => {});
    return call.done;
  }

  async #send(call) {
    if (this.#waiting === call) this.#waiting = null;
    const { number, src, method, body } = call;
    let told = null;
    let failure = "";
    try {
      const headers = body ? { "content-type": "application/json" } : {};
      const signal = AbortSignal.timeout(LONGEST_MS);
      const reply = await fetch(src, { method, headers, signal, body: body && JSON.stringify(body) });
      const answer = await reply.json();
      if (reply.ok) told = answer;
      else failure = answer?.error?.code === "dials_off" ? this.texts.off[this.#told?.off?.reason ?? "consent"] : this.texts.failed;
    } catch {
      failure = this.texts.failed;
    }
    if (number !== this.#asked) return; // a later call is under way, and shows what there is then
    this.#told = told ?? this.#told;
    this.#draw(failure);
    if (told) this.dispatchEvent(new CustomEvent("dials", { detail: told }));
  }

  #draw(failure) {
    const told = this.#told;
    const focus = this.#root.activeElement?.id;
    const parts = [element("h2", { textContent: this.texts.heading })];
    const dials = told?.dials ?? [];
    const styles = told?.style?.styles ?? [];
    if (styles.length > 0) parts.push(...this.#styles(told.style));
    if (dials.length > 0) parts.push(element("ul", {}, dials.map((dial) => this.#dial(dial, told.most))));
    const said = failure || (told && dials.length === 0 ? (styles.length > 0 ? "" : this.texts.none) : told?.off ? (this.texts.off[told.off.reason] ?? told.off.message) : "");
    parts.push(element("p", { role: "status", textContent: said }));
    if (dials.length > 0) {
      const since = told.last_reset === null ? "" : ` ${this.texts.returned(new Date(1000 * told.last_reset))}`;
      parts.push(element("small", { textContent: this.texts.learned(told.ratings) + since }));
    }
    if (dials.length > 0 || styles.length > 0) {
      const forget = () => globalThis.confirm(this.texts.confirm) && this.#ask("DELETE");
      parts.push(element("p", {}, [element("button", { id: "reset", type: "button", textContent: this.texts.reset, onclick: forget })]));
    }
    this.#root.replaceChildren(...parts);
    if (focus) this.#root.getElementById(focus)?.focus();
  }

  #styles(told) {
    const texts = { ...TEXTS, ...this.texts }; // a page may have replaced those of an older version
    const named = (style) => (style.name === "none" ? texts.noStyle : style.name.replaceAll("_", " "));
    const offered = (style) => style.name === "none" || style.chance !== null;
    const options = told.styles.map((style) => {
      const textContent = offered(style) ? named(style) : `${named(style)} (${texts.unoffered})`;
      return element("option", { value: style.name, textContent, selected: style.name === told.set });
    });
    const first = element("option", { value: "", textContent: texts.learns, selected: told.set === null });
    const select = element("select", { id: "style" }, [first, ...options]);
    select.onchange = () => this.#ask("PUT", { style: select.value || null });
    const likely = told.styles.filter((style) => style.chance > 0).map((style) => [named(style), style.chance]);
    const off = told.off && (texts.off[told.off.reason] ?? told.off.message);
    const words = off || (likely.length > 0 ? texts.chances(likely) : "");
    const line = [element("label", { htmlFor: "style", textContent: texts.style }), select];
    return [element("div", { className: "style" }, [element("div", { className: "line" }, line), element("small", { textContent: words })])];
  }

  #dial(dial, most) {
    const id = `dial-${dial.name}`;
    const percent = (value) => (50 * (Math.min(most, Math.max(-most, value)) + most)) / most;
    const words = element("span", { className: "words", id: `${id}-words`, textContent: this.describe(dial) });
    const input = element("input", { id, type: "range", min: -most, max: most, step: 0.1, value: dial.value });
    input.setAttribute("aria-describedby", words.id);
    input.setAttribute("aria-valuetext", this.describe(dial));
    input.onchange = () => this.#ask("PUT", { [dial.name]: Number(input.value) });
    const line = [element("label", { htmlFor: id, textContent: dial.name.replaceAll("_", " ") }), words];
    if (dial.set !== null) {
      const clear = () => this.#ask("PUT", { [dial.name]: null });
      line.push(element("button", { id: `${id}-clear`, type: "button", textContent: this.texts.clear, onclick: clear }));
    }
    const known = element("div", { className: "known" });
    known.style.left = `${percent(dial.low)}%`;
    known.style.width = `${Math.max(1, percent(dial.high) - percent(dial.low))}%`;
    return element("li", {}, [element("div", { className: "line" }, line), element("div", { className: "track" }, [known, input])]);
  }
}

function element(name, properties, children = []) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "role") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

globalThis.customElements?.define("ostinato-dials", OstinatoDials);
