// The requests that run and wait, each a button that follows its blocks.

import { duration, el, grouped, plural } from "./dom.js";
import { shortId } from "./requests.js";

export class RequestList {
  /** `choose(id)` is called with the one that is pressed. */
  constructor(node, hues, choose) {
    this.node = node;
    this.hues = hues;
    this.choose = choose;
    this.rows = new Map();
    this.mine = new Set();
    this.followed = null;
  }

  /** The conversation's own request has this id. */
  mark(id) {
    this.mine.add(id);
  }

  update(requests) {
    const longest = Math.max(1, ...requests.map(({ tokens }) => tokens));
    const present = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (present.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    requests.forEach((request, index) => {
      const row = this.rows.get(request.id) ?? this.#add(request.id);
      if (this.node.children[index] !== row.node) this.node.insertBefore(row.node, this.node.children[index] ?? null);
      fill(row, request, longest);
    });
  }

  follow(id) {
    this.followed = id;
    for (const [one, { button }] of this.rows) button.setAttribute("aria-pressed", one === id);
  }

  shake(id) {
    const { node } = this.rows.get(id) ?? {};
    node?.classList.add("shaken");
    setTimeout(() => node?.classList.remove("shaken"), 1600);
  }

  #add(id) {
    const isMine = this.mine.has(id.replace(/-\d+$/, ""));
    const [state, facts, known, computed, prompt] =
      ["state", "request-facts", "known", "computed", "prompt-end"].map((kind) => el("span", { class: kind }));
    const onclick = () => this.choose(id);
    const button = el("button", { type: "button", class: "request", title: id, "aria-pressed": "false", onclick },
      el("span", { class: "dot" }), el("b", {}, shortId(id)), isMine ? el("span", { class: "badge" }, "this chat") : "",
      state, facts, el("span", { class: "progress", "aria-hidden": "true" }, known, computed, prompt));
    const node = el("li", {}, button);
    node.style.setProperty("--hue", this.hues.of(id));
    const row = { node, button, state, facts, known, computed, prompt };
    this.rows.set(id, row);
    return row;
  }
}

function fill(row, request, longest) {
  const { tokens, prompt_tokens: prompt, computed_tokens: computed } = request;
  row.node.classList.toggle("waiting", !request.is_running);
  row.state.textContent = stateOf(request);
  const numBlocks = request.ids.filter(Boolean).length;
  const lengths = `${grouped(prompt)} + ${grouped(tokens - prompt)} tokens`;
  const facts = [lengths, plural(numBlocks, "block"), duration(request.age)];
  if (request.ttft !== null) facts.push(`first after ${duration(request.ttft)}`);
  if (request.preemptions) facts.push(`preempted ${request.preemptions}×`);
  row.facts.textContent = facts.join(" · ");
  const share = (count) => `${100 * count / longest}%`;
  row.known.style.width = share(tokens);
  row.computed.style.width = share(Math.min(computed, tokens));
  row.prompt.style.left = share(prompt);
}

function stateOf({ is_running: isRunning, preemptions, computed_tokens: computed, prompt_tokens: prompt }) {
  if (!isRunning) return preemptions ? "preempted" : "waits";
  return computed < prompt ? "reads its prompt" : "writes";
}
