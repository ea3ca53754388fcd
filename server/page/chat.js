// The conversation: sends, streams, stops, and remembers.

import { ApiError, events } from "./api.js";
import { byId, el } from "./dom.js";
import { keep, recall } from "./memory.js";
import { MessageView, copy } from "./message.js";
import * as parameters from "./parameters.js";
import { chatTokens, completionTokens } from "./tokens.js";

const SUGGESTIONS = ["Explain what a KV cache is, in three sentences.", "Write a poem of four lines about books.",
  "List five inventions, each with its century.", "Write a Python function that reverses a string."];
const NAME = "conversation";

const scroller = byId("scroller");
const prompt = byId("prompt");
let views = [];
let stopping = null;  // the AbortController of the answer that is being written
let isEditing = false;
let model = null;

export const isBusy = () => stopping !== null;

export function setUp() {
  parameters.setUp(() => document.body.toggleAttribute("data-probabilities", parameters.wantsProbabilities()));
  document.body.toggleAttribute("data-probabilities", parameters.wantsProbabilities());
  for (const message of recall(NAME, [])) append(message);
  for (const text of SUGGESTIONS) {
    byId("suggestions").append(el("li", {}, el("button", { type: "button", onclick: () => send(text) }, text)));
  }
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(prompt.value); });
  byId("halt").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(prompt.value);
  });
  refresh();
}

export function setModel(name, { hasTemplate }) {
  model = name;
  if (hasTemplate) return;
  parameters.onlyCompletion();
  prompt.placeholder = "Write a beginning";
  byId("welcome-note").textContent = "This model has no chat template: it goes on with the text that you give it.";
}

/** Esc: end the answer, or else the editing. */
export function escape() {
  if (stopping) stop();
  else if (isEditing) edit(false);
  else return false;
  return true;
}

function stop() {
  stopping?.abort();
}

function clear() {
  stop();
  for (const view of views) view.node.remove();
  views = [];
  edit(false);
  save();
  refresh();
  prompt.focus();
}

async function send(text) {
  if (!text.trim() || stopping) return;
  if (isEditing) drop(lastIndex("user"));
  edit(false);
  prompt.value = "";
  fit();
  append({ role: "user", content: text });
  await answer();
}

async function regenerate() {
  if (stopping) return;
  drop(lastIndex("user") + 1);
  await answer();
}

function edit(on) {
  isEditing = on && lastIndex("user") >= 0;
  if (isEditing) prompt.value = views[lastIndex("user")].message.content;
  byId("editing").hidden = !isEditing;
  if (isEditing) prompt.focus();
  fit();
}

async function answer() {
  let fields;
  try {
    fields = parameters.requestFields();
  } catch (input) {
    parameters.pointAt(input.name);
    return;
  }
  const history = views.map((view) => view.message);
  const view = append({ role: "assistant", content: "", reasoning: "", tokens: [], stats: {} });
  const announce = announcer();
  stopping = new AbortController();
  refresh();
  try {
    await write(view, requestOf(history, fields), announce);
  } catch (error) {
    fail(view.message, error);
  } finally {
    stopping = null;
    draw(view, true);
    announce(view.message.content, true);
    save();
    refresh();
  }
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.stats.reason = "stopped";
    return;
  }
  if (!(error instanceof ApiError)) console.error(error);
  message.error = error instanceof ApiError ? error.message : "The page has failed; see the browser's console.";
  if (error.param) parameters.pointAt(error.param);
}

/** Path and body. */
function requestOf(history, fields) {
  const count = parameters.wantsProbabilities() ? 5 : 0;
  const usage = { include_usage: true, continuous_usage_stats: true };
  const body = { ...fields, model, stream: true, stream_options: usage };
  if (parameters.isCompletion()) {
    if (count) body.logprobs = count;
    return ["/v1/completions", { ...body, prompt: parameters.systemPrompt() + history.at(-1).content }];
  }
  if (count) Object.assign(body, { logprobs: true, top_logprobs: count });
  const messages = history.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
  const system = parameters.systemPrompt();
  if (system) messages.unshift({ role: "system", content: system });
  return ["/v1/chat/completions", { ...body, messages }];
}

async function write(view, [path, body], announce) {
  const { message } = view;
  const begun = performance.now();
  let first = 0;
  for await (const chunk of events(path, { body, signal: stopping.signal })) {
    const now = performance.now();
    if (!view.id) document.dispatchEvent(new CustomEvent("octavo:request", { detail: (view.id = chunk.id) }));
    take(message, chunk);
    if (!message.stats.output) continue;
    first ||= now;
    message.stats.ttft = (first - begun) / 1000;
    if (message.stats.output > 1) message.stats.rate = (message.stats.output - 1) / ((now - first) / 1000);
    schedule(view, announce);
  }
}

function take(message, chunk) {
  for (const { delta, text, logprobs, finish_reason: reason } of chunk.choices) {
    message.content += text ?? delta.content ?? "";
    message.reasoning += delta?.reasoning_content ?? "";
    if (logprobs) message.tokens.push(...(delta ? chatTokens(logprobs) : completionTokens(logprobs)));
    if (reason) message.stats.reason = reason;
  }
  if (!chunk.usage) return;
  message.stats.output = chunk.usage.completion_tokens;
  message.stats.prompt = chunk.usage.prompt_tokens;
  message.stats.cached = chunk.usage.prompt_tokens_details.cached_tokens;
}

/** Draw once a frame, however many tokens came. */
function schedule(view, announce) {
  if (view.isScheduled) return;
  view.isScheduled = true;
  requestAnimationFrame(() => {
    view.isScheduled = false;
    if (!view.isEnded) draw(view, false);
    announce(view.message.content, false);
  });
}

function draw(view, isEnd) {
  const isAtBottom = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
  view.isEnded = isEnd;
  view.update(isEnd);
  if (isAtBottom) scroller.scrollTop = scroller.scrollHeight;
}

/** Tells screen readers the answer, sentence by sentence. */
function announcer() {
  const log = byId("announcer");
  log.replaceChildren();
  let told = 0;
  return (content, isEnd) => {
    const fresh = content.slice(told);
    const ends = [". ", "! ", "? ", ": ", "\n"].map((mark) => fresh.lastIndexOf(mark));
    const whole = isEnd ? fresh.length : 1 + Math.max(...ends);
    if (whole) log.append(el("p", {}, fresh.slice(0, whole)));
    told += whole;
  };
}

function append(message) {
  const actions = message.role === "user"
    ? [["Edit", () => { if (!stopping) edit(true); }, "again"]]
    : [["Copy", (event) => copy(message.content, event.target)], ["Again", regenerate, "again"]];
  const view = new MessageView(message, actions);
  views.push(view);
  byId("messages").append(view.node);
  scroller.scrollTop = scroller.scrollHeight;
  return view;
}

/** Forget the messages from `index` on. */
function drop(index) {
  for (const view of views.splice(index)) view.node.remove();
}

const lastIndex = (role) => views.findLastIndex((view) => view.message.role === role);

function save() {
  keep(NAME, views.map(({ message: { tokens, ...message } }) => message));
}

function refresh() {
  byId("welcome").hidden = views.length > 0;
  byId("send").hidden = stopping !== null;
  byId("halt").hidden = stopping === null;
  byId("composer").toggleAttribute("data-busy", stopping !== null);
  const latest = { user: lastIndex("user"), assistant: lastIndex("assistant") };
  views.forEach((view, index) => {
    view.node.toggleAttribute("data-latest", index === latest[view.message.role]);
  });
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight * 0.35)}px`;
}
