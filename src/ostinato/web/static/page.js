// What the page does by itself: says when the gateway is gone, keys, tokens, local time. Everything else works without it.
"use strict";

const SILENT_MS = 9000; // beats come every two seconds
const RETRY_MS = 3000;
const PAGES = { n: "/", r: "/releases", t: "/turns", l: "/learning", m: "/monitors", w: "/weights", o: "/worlds", p: "/playground" };

// ---------------------------------------------------------------- is the gateway there?

const events = document.getElementById("events");
const lost = document.getElementById("lost");
let heard = Date.now();
let since = null;

function found() {
  heard = Date.now();
  if (since !== null) {
    since = null;
    delete document.body.dataset.link;
    lost.textContent = "";
  }
}

function look() {
  if (!events || document.hidden || Date.now() - heard < SILENT_MS) return;
  if (since === null) {
    since = new Date(heard);
    document.body.dataset.link = "lost";
    lost.textContent = "The gateway does not answer. What you see is from " + since.toLocaleTimeString() + "; trying again.";
  }
}

function connect() {
  // a first connection that fails is not tried again by the extension
  if (!events || document.hidden || Date.now() - heard < SILENT_MS) return;
  if (!(events._htmx && events._htmx.sse)) events.dispatchEvent(new CustomEvent("again"));
}

if (events) {
  events.addEventListener("beat", found);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) heard = Date.now(); });
  setInterval(look, 1000);
  setInterval(connect, RETRY_MS);
}

// ---------------------------------------------------------------- keys

const keys = document.getElementById("keys");
const off = document.getElementById("keys-off");
let leading = 0;

function stored(value) {
  try {
    if (value !== undefined) localStorage.setItem("ostinato-keys", value);
    return localStorage.getItem("ostinato-keys");
  } catch {
    return null;
  }
}

off.checked = stored() === "off";
off.addEventListener("change", () => stored(off.checked ? "off" : "on"));

function step(by) {
  const rows = [...document.querySelectorAll("a.row")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? 0 : at + by))].focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys.open) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "?") { keys.showModal(); return; }
  if (off.checked) return;
  if (leading && Date.now() - leading < 1500 && PAGES[event.key]) { location.href = PAGES[event.key]; return; }
  leading = event.key === "g" ? Date.now() : 0;
  if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (event.key === "/") {
    const field = document.querySelector(".filter input:not([disabled])");
    if (field) { event.preventDefault(); field.focus(); }
  }
});

// ---------------------------------------------------------------- tokens

const tokens = document.getElementById("tokens");
const told = document.getElementById("token");

function tell(token) {
  tokens.querySelector(".at")?.classList.remove("at");
  token.classList.add("at");
  told.textContent = token.dataset.token;
}

if (tokens) {
  tokens.addEventListener("pointerover", (event) => { if (event.target.dataset.token) tell(event.target); });
  tokens.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const all = [...tokens.querySelectorAll("[data-token]")];
    const at = all.findIndex((each) => each.classList.contains("at"));
    const next = all[Math.min(all.length - 1, Math.max(0, at + by))];
    if (next) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  });
}

// ---------------------------------------------------------------- local time

document.addEventListener("pointerover", (event) => {
  const time = event.target.closest && event.target.closest("time");
  if (time && !time.title) time.title = new Date(time.dateTime).toLocaleString();
});
