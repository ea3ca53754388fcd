// One message of the conversation, drawn; and drawn again, from the first block that has changed, as it grows.

import { duration, el, grouped, plural } from "./dom.js";
import { blocksOf, renderBlock } from "./markdown.js";
import { hideTip, place, showTip } from "./tip.js";
import { Alignment, doubt } from "./tokens.js";

const REASONS = {
  stop: "ended by itself", length: "cut at its limit", timeout: "out of time", repetition: "went round in circles",
  tool_calls: "calls a tool", stopped: "stopped by you",
};

export class MessageView {
  /** `message`: {role, content, reasoning, tokens, stats, error}. `actions`: [[label, listener, class]]. */
  constructor(message, actions) {
    this.message = message;
    this.drawn = [];  // {end, kind, node}
    this.alignment = new Alignment();
    this.numAligned = 0;
    this.reasoning = el("div", { class: "reasoning-text" });
    this.summary = el("summary", {}, "Reasoning");
    this.thought = el("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.text = el("div", { class: "text" });
    this.problem = el("p", { class: "problem", role: "alert", hidden: true });
    this.stats = el("p", { class: "stats" });
    this.actions = el("div", { class: "actions" }, ...actions.map(([label, onclick, kind = ""]) =>
      el("button", { type: "button", class: `quiet ${kind}`, onclick }, label)));
    const who = message.role === "user" ? "You" : "Answer";
    this.node = el("li", { class: `message ${message.role}` }, el("p", { class: "who" }, who),
      this.thought, this.text, this.problem, el("div", { class: "foot" }, this.stats, this.actions));
    for (const part of [this.text, this.reasoning]) this.#listen(part);
    this.update(true);
  }

  /** Draw what has come; `isEnd`: nothing more will. */
  update(isEnd) {
    const { role, content, error } = this.message;
    this.node.toggleAttribute("data-busy", !isEnd);
    if (role === "user") this.text.textContent = content;
    else this.#drawAnswer(isEnd);
    this.problem.hidden = !error;
    this.problem.textContent = error ?? "";
    this.stats.replaceChildren(...this.#statistics());
    place();
  }

  #drawAnswer(isEnd) {
    const { content, reasoning = "", tokens = [] } = this.message;
    this.alignment.add(tokens.slice(this.numAligned));
    this.numAligned = tokens.length;
    this.alignment.advance(reasoning + content, isEnd);
    this.#drawReasoning(reasoning, isEnd);
    this.#drawBlocks(content, reasoning.length, isEnd);
  }

  #drawReasoning(reasoning, isEnd) {
    if (!reasoning) return;
    this.thought.hidden = false;
    const isThinking = !isEnd && !this.message.content;
    if (isThinking !== this.wasThinking) this.thought.open = isThinking;
    this.wasThinking = isThinking;
    const length = plural(reasoning.trim().split(/\s+/).length, "word");
    this.summary.textContent = isThinking ? "Reasoning …" : `Reasoning, ${length}`;
    this.reasoning.replaceChildren();
    this.#leaf(this.reasoning, 0, reasoning.length);
  }

  /** Blocks that have not changed keep their elements, and whatever has been selected in them. */
  #drawBlocks(content, offset, isEnd) {
    const blocks = blocksOf(content);
    const changed = blocks.findIndex((block, index) => !this.#isDrawn(block, this.drawn[index], isEnd));
    const same = changed < 0 ? blocks.length : changed;
    for (const { node } of this.drawn.splice(same)) node.remove();
    const leaf = (parent, start, end) => this.#leaf(parent, start + offset, end + offset);
    for (const block of blocks.slice(same)) {
      const node = renderBlock(block, content, leaf);
      if (block.kind === "code") node.append(this.#copier(block, content));
      this.text.append(node);
      this.drawn.push({ end: block.end, kind: block.kind, at: this.alignment.at, node });
    }
    this.#order();
  }

  /** Also while its tokens came late: then they are drawn once more. */
  #isDrawn(block, drawn, isEnd) {
    return block.end === drawn?.end && block.kind === drawn.kind && (drawn.at >= this.#tokensEnd(block) || !isEnd);
  }

  #tokensEnd(block) {
    return this.message.tokens?.length ? block.end + (this.message.reasoning?.length ?? 0) : 0;
  }

  #copier(block, content) {
    const source = block.lines.map(([start, end]) => content.slice(start, end)).join("\n");
    const onclick = (event) => copy(source, event.target);
    return el("button", { type: "button", class: "copy quiet", onclick }, "Copy");
  }

  #leaf(parent, start, end) {
    if (start >= end) return;
    const { tokens = [] } = this.message;
    const text = this.alignment.text;
    for (const piece of this.alignment.pieces(start, end)) {
      const part = text.slice(piece.start, piece.end);
      if (piece.tokens === null) parent.append(part);
      else {
        const level = Math.max(...piece.tokens.map((index) => doubt(tokens[index].logprob)));
        const attributes = { class: `token doubt-${level}`, tabindex: "-1", "data-tokens": piece.tokens.join(" ") };
        parent.append(el("span", attributes, part));
      }
    }
  }

  /** One token can be reached by Tab; the arrow keys go on from there. */
  #order() {
    if (this.text.querySelector('.token[tabindex="0"]')) return;
    this.text.querySelector(".token")?.setAttribute("tabindex", "0");
  }

  #listen(part) {
    const tokenOf = (event) => event.target.closest?.(".token");
    const show = (event) => {
      const token = tokenOf(event);
      if (token) showTip(token, token.dataset.tokens.split(" ").map((index) => this.message.tokens[index]));
    };
    part.addEventListener("pointerover", show);
    part.addEventListener("focusin", show);
    part.addEventListener("click", show);
    part.addEventListener("pointerout", hideTip);
    part.addEventListener("focusout", hideTip);
    part.addEventListener("keydown", (event) => {
      const token = tokenOf(event);
      if (token) this.#move(event, part, token);
    });
  }

  #move(event, part, token) {
    const all = [...part.querySelectorAll(".token")];
    const at = all.indexOf(token);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all[to]) return;
    event.preventDefault();
    token.setAttribute("tabindex", "-1");
    all[to].setAttribute("tabindex", "0");
    all[to].focus();
  }

  #statistics() {
    const stats = this.message.stats;
    if (!stats) return [];
    const parts = [];
    if (stats.ttft !== undefined) parts.push(["first token after ", duration(stats.ttft)]);
    if (stats.rate) parts.push(["", stats.rate.toFixed(1), " tokens/s"]);
    if (stats.output) parts.push(["", grouped(stats.output), stats.output === 1 ? " token" : " tokens"]);
    const cached = stats.cached ? `, ${grouped(stats.cached)} of them cached` : "";
    if (stats.prompt) parts.push(["prompt ", grouped(stats.prompt), cached]);
    if (stats.reason) parts.push(["", REASONS[stats.reason] ?? stats.reason]);
    return parts.map(([before, value, after = ""]) => el("span", {}, before, el("b", {}, value), after));
  }
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
