// Which tokens a piece of the answer came from, and what else they might have been.
//
// The server sends tokens as bytes, and the answer as text from which special tokens, markers of a reasoning part and
// spaces at its edges are gone. `Alignment` walks through both; tokens that left nothing in the text get no range.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** One token: {text, bytes, logprob, top: [{text, logprob}]}, of /v1/chat/completions. */
export const chatTokens = (logprobs) => (logprobs?.content ?? []).map((token) => ({
  text: token.token,
  bytes: Uint8Array.from(token.bytes),
  logprob: token.logprob,
  top: token.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
}));

/** The same, of /v1/completions. */
export const completionTokens = (logprobs) => (logprobs?.tokens ?? []).map((text, index) => ({
  text,
  bytes: encoder.encode(text),
  logprob: logprobs.token_logprobs[index],
  top: Object.entries(logprobs.top_logprobs[index] ?? {}).map(([text, logprob]) => ({ text, logprob }))
    .sort((one, other) => other.logprob - one.logprob),
}));

/** How sure: 0 (nearly certain) to 4. */
export function doubt(logprob) {
  return [0.9, 0.6, 0.3, 0.1].filter((bound) => Math.exp(logprob) < bound).length;
}

/** 0.0734 -> "7.3 %" */
export function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share > 0 && share < 0.1) return "< 0.1 %";
  return `${share >= 99.95 ? "100" : share.toFixed(1)} %`;
}

/** A token's text with its white space made visible. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

export class Alignment {
  constructor() {
    this.ranges = [];  // {start, end, tokens: [index]} in order, offsets into the text
    this.text = "";
    this.waiting = [];  // tokens whose bytes do not yet make whole characters, or whose text has not come
    this.count = 0;
  }

  /** Tokens may come before their text, which is held back while it may be part of a stop string. */
  add(tokens) {
    for (const token of tokens) this.waiting.push({ index: this.count++, bytes: token.bytes });
  }

  /** `text` is all that there is so far; at the end, nothing more will come. */
  advance(text, isEnd) {
    this.text = text;
    while (this.waiting.length) {
      const count = this.#countOfWhole();
      if (!count) break;
      const group = this.waiting.slice(0, count);
      const piece = decoder.decode(joined(group));
      if (!isEnd && this.#mayCome(piece)) break;
      this.waiting.splice(0, count);
      this.#place(piece, group.map((token) => token.index));
    }
  }

  get at() {
    return this.ranges.at(-1)?.end ?? 0;
  }

  /** How many of the waiting tokens make whole characters together; 0: more have to come. */
  #countOfWhole() {
    for (let count = 1; count <= Math.min(4, this.waiting.length); count++) {
      if (isWhole(joined(this.waiting.slice(0, count)))) return count;
    }
    return this.waiting.length >= 4 ? 1 : 0;
  }

  /** Whether the text ends where the piece has begun, or has not. */
  #mayCome(piece) {
    const rest = this.text.slice(this.at);
    return rest.length < piece.length && (piece.startsWith(rest) || piece.trimStart().startsWith(rest));
  }

  #place(piece, tokens) {
    for (const [candidate, reach] of [[piece, 0], [piece.trimStart(), 0], [piece.trim(), 8]]) {
      if (!candidate) return;
      const found = this.text.slice(this.at, this.at + reach + candidate.length).indexOf(candidate);
      if (found < 0) continue;
      const start = this.at + found;
      this.ranges.push({ start, end: start + candidate.length, tokens });
      return;
    }
  }

  /** [start, end) cut where tokens begin and end: [{start, end, tokens}], tokens null for text of no token. */
  pieces(start, end) {
    const pieces = [];
    let at = start;
    for (let index = this.#firstEndingBehind(start); at < end && index < this.ranges.length; index++) {
      const range = this.ranges[index];
      if (range.start >= end) break;
      if (range.start > at) pieces.push({ start: at, end: range.start, tokens: null });
      const stop = Math.min(range.end, end);
      pieces.push({ start: Math.max(at, range.start), end: stop, tokens: range.tokens });
      at = stop;
    }
    if (at < end) pieces.push({ start: at, end, tokens: null });
    return pieces;
  }

  #firstEndingBehind(position) {
    let low = 0;
    let high = this.ranges.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ranges[middle].end > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

const joined = (tokens) => Uint8Array.from(tokens.flatMap((token) => [...token.bytes]));

function isWhole(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return true;
  } catch {
    return false;
  }
}
