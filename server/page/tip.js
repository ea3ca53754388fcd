// The likeliest tokens, beside the token that is pointed at or has the focus.

import { byId, el } from "./dom.js";
import { percent, visible } from "./tokens.js";

const tip = byId("tip");
const MARGIN = 8;
let target = null;

/** Show what `tokens` might have been, near `token`. */
export function showTip(token, tokens) {
  target = token;
  tip.replaceChildren(...tokens.flatMap((one) => [headOf(one), listOf(one)]));
  tip.hidden = false;
  token.setAttribute("aria-describedby", tip.id);
  place();
}

/** Where the token is by now; a token that has been drawn anew is another one. */
export function place() {
  if (tip.hidden) return;
  if (!target.isConnected) hideTip();
  const at = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.max(MARGIN, Math.min(at.left, innerWidth - size.width - MARGIN));
  const below = at.bottom + MARGIN + size.height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(MARGIN, below ? at.bottom + MARGIN : at.top - size.height - MARGIN)}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export const isTipShown = () => !tip.hidden;

function headOf(token) {
  const name = el("span", { class: "tip-token" }, visible(token.text));
  return el("p", { class: "tip-head" }, name, percent(token.logprob));
}

function listOf(token) {
  const rows = token.top.map(({ text, logprob }) => {
    const bar = el("span", { class: "tip-bar" });
    bar.style.width = `${100 * Math.exp(logprob)}%`;
    const isChosen = text === token.text;
    return el("tr", { class: isChosen ? "chosen" : null },
      el("th", { scope: "row" }, visible(text)), el("td", {}, percent(logprob)), el("td", { class: "tip-track" }, bar));
  });
  return el("table", { class: "tip-table" }, el("tbody", {}, ...rows));
}
