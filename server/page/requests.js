// The engine's requests from frame to frame: colours that stay, and what has happened to each in between.

export const CACHED = 255;

/** [length, value, length, value, …] as an array of `count`. */
export function states(runs, count) {
  const result = new Uint8Array(count);
  for (let index = 0, at = 0; index < runs.length; at += runs[index], index += 2) {
    result.fill(runs[index + 1], at, at + runs[index]);
  }
  return result;
}

/** [first, length, …] as block numbers in order of position; 0 where a window has moved on. */
export function blockIds(runs) {
  const ids = [];
  for (let index = 0; index < runs.length; index += 2) {
    for (let step = 0; step < runs[index + 1]; step++) ids.push(runs[index] && runs[index] + step);
  }
  return ids;
}

const DISTANCES = [30, 15];  // degrees between the hues of two requests, as long as there is room
const GOLDEN_ANGLE = 137.508;

/** A hue for each id, as long as it is there; the same id begins with the same one. */
export class Hues {
  #hues = new Map();

  of(id) {
    return this.#hues.get(id) ?? 0;
  }

  /** Give hues to new ids, and those of the ones that are gone away. */
  update(ids) {
    const present = new Set(ids);
    for (const id of this.#hues.keys()) if (!present.has(id)) this.#hues.delete(id);
    for (const id of present) if (!this.#hues.has(id)) this.#hues.set(id, this.#free(hash(id) % 360));
  }

  #free(hue) {
    const taken = [...this.#hues.values()];
    for (const distance of DISTANCES) {
      for (let tries = 0; tries < 100; tries++) {
        const at = Math.round(hue + tries * GOLDEN_ANGLE) % 360;
        if (taken.every((other) => Math.abs((at - other + 540) % 360 - 180) >= distance)) return at;
      }
    }
    return hue;
  }
}

function hash(text) {
  let value = 2166136261;
  for (const letter of text) value = Math.imul(value ^ letter.codePointAt(0), 16777619);
  return (value ^ value >>> 15) >>> 0;
}

/** The end of an id tells it apart: "chatcmpl-4f1c…-0" -> "chat 4f1c" */
export function shortId(id) {
  const found = /^([a-z]+)\w*-([0-9a-f]{5})[0-9a-f]{27}(?:-(\d+))?/.exec(id);
  if (!found) return id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-9)}` : id;
  const kind = { chatcmpl: "chat", cmpl: "text" }[found[1]] ?? found[1];
  return `${kind} ${found[2]}${found[3] > 0 ? `·${found[3]}` : ""}`;
}

/** What happened between two frames: [{kind, id, count?}], and which blocks each request has taken or lost. */
export function changes(before, after) {
  const happened = [];
  const old = new Map(before.requests.map((request) => [request.id, request]));
  for (const request of after.requests) {
    const was = old.get(request.id);
    old.delete(request.id);
    const numPreempted = request.preemptions - (was?.preemptions ?? 0);
    if (numPreempted > 0) happened.push({ kind: "preempted", id: request.id, count: was?.ids.length ?? 0 });
    const hasBegun = request.is_running && request.ids.length > 0 && (!was || !was.ids.length || numPreempted > 0);
    if (hasBegun) happened.push({ kind: "begun", id: request.id, ...origin(request, before, after) });
    else if (!was && !request.is_running) happened.push({ kind: "queued", id: request.id });
  }
  for (const id of old.keys()) happened.push({ kind: "ended", id, count: old.get(id).ids.length });
  return happened;
}

/** Of its blocks: how many it found in the cache, and how many it shares with others that run. */
function origin(request, before, after) {
  let found = 0;
  let shared = 0;
  for (const id of request.ids) {
    if (before.states[id] === CACHED) found++;
    if (after.states[id] > 1 && after.states[id] < CACHED) shared++;
  }
  return { found, shared };
}
