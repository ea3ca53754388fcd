// Brings the page to life: views, key, what is served.

import { ApiError, json, onKeyNeeded } from "./api.js";
import * as chat from "./chat.js";
import { byId, grouped, short } from "./dom.js";
import * as engine from "./engine.js";
import { hideTip, isTipShown, place } from "./tip.js";
import * as traffic from "./traffic.js";

const WIDE = matchMedia("(min-width: 1100px)");
const VIEWS = ["chat", "engine", "both"];
let model = null;

function showView() {
  const asked = location.hash.slice(1);
  let view = VIEWS.includes(asked) ? asked : WIDE.matches ? "both" : "chat";
  if (view === "both" && !WIDE.matches) view = "engine";
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll("[data-show]")) {
    if (button.dataset.show === view) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  engine.show(view !== "chat" && document.visibilityState === "visible");
}

function setUpViews() {
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => { location.hash = button.dataset.show; });
  }
  byId("skip-engine").addEventListener("click", (event) => {
    event.preventDefault();
    if (document.body.dataset.view === "chat") location.hash = WIDE.matches ? "both" : "engine";
    requestAnimationFrame(() => byId("engine-title").focus());
  });
  addEventListener("hashchange", showView);
  document.addEventListener("scroll", place, { capture: true, passive: true });
  document.addEventListener("visibilitychange", showView);
  WIDE.addEventListener("change", showView);
}

function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || byId("key-dialog").open) return;
    const isTaken = isTipShown() ? (hideTip(), true) : chat.escape() || engine.escape();
    if (isTaken) event.preventDefault();
  });
}

/** Ask for a key until there is one. */
function askForKey(isRefused) {
  const dialog = byId("key-dialog");
  const input = byId("key");
  byId("key-problem").hidden = !isRefused;
  byId("key-problem").textContent = isRefused ? "The server does not know this key." : "";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault(), { signal: onceClosed(dialog) });
    dialog.addEventListener("close", () => resolve(input.value.trim()), { once: true });
  });
}

function onceClosed(dialog) {
  const closed = new AbortController();
  dialog.addEventListener("close", () => closed.abort(), { once: true });
  return closed.signal;
}

function showStatus(status, text) {
  byId("status").dataset.status = status;
  byId("status").title = text;
  byId("status-text").textContent = status === "ok" ? "ready" : text;
}

async function showModel() {
  const [info, tokenizer] = await Promise.all([json("/server_info"), json("/tokenizer_info")]);
  model = info.model;
  byId("model-name").textContent = info.model;
  const weights = info.quantization === "none" ? info.dtype : `${info.dtype}, ${info.quantization}`;
  byId("model-facts").textContent = [`${short(info.num_parameters)} parameters`, weights, info.device,
    `context ${grouped(info.max_model_len)}`].join(" · ");
  document.title = `${info.model} · Octavo`;
  chat.setModel(info.model, { hasTemplate: tokenizer.chat_template !== null });
  showStatus("ok", "ready");
}

async function start() {
  onKeyNeeded(askForKey);
  chat.setUp();
  engine.setUp({ onStatus: showStatus });
  traffic.setUp(() => model);
  setUpViews();
  setUpKeys();
  try {
    await showModel();
  } catch (error) {
    showStatus("unreachable", error instanceof ApiError ? error.message : String(error));
  }
  showView();
  if (!("ontouchstart" in window)) byId("prompt").focus();
}

start();
