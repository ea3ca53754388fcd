// The live view: what the engine does, some times a second, while this view is looked at.

import { ApiError, events } from "./api.js";
import { BlockMap } from "./blocks.js";
import { byId, duration, el, grouped, plural } from "./dom.js";
import { RequestList } from "./requestlist.js";
import { CACHED, Hues, blockIds, changes, shortId, states } from "./requests.js";
import { Sparkline } from "./sparkline.js";

const WINDOW = 2;  // seconds over which rates are taken, and
const LONG_WINDOW = 60;  // over which first tokens are
const RETRY = 1000;  // milliseconds
const CAUSES = { blocks: "for free blocks", seats: "for a seat in the step", tokens: "for room in the step" };
const LOG_LENGTH = 80;
const HINT = matchMedia("(pointer: coarse)").matches ? "Tap a block to see whose it is."
  : "Point at a block, or move to it with the arrow keys.";

const hues = new Hues();
let past = [];  // the last minute of frames, without their engines' details
const tiles = {};
let map, list;
let scene = null;
let followed = null;
let watching;  // the AbortController of the stream, if there is one
let onStatus = () => {};

export function setUp(options) {
  onStatus = options.onStatus;
  map = new BlockMap(byId("blocks"), byId("overlay"), { describe, choose: (block) => followHolder(block) });
  list = new RequestList(byId("requests"), hues, follow);
  for (const [name, label, top] of TILES) tiles[name] = tile(label, top);
  describe(null);
  document.addEventListener("octavo:request", ({ detail }) => list.mark(detail));
}

const TILES = [["speed", "output tokens/s", 1], ["running", "running"], ["used", "cache in use", 1],
  ["waiting", "waiting"], ["ttft", "first token"], ["hits", "prefix found"], ["preemptions", "preemptions"]];

function tile(label, top) {
  const value = el("b", {}, "–");
  const note = el("span", { class: "tile-note" });
  const spark = top === undefined ? null : new Sparkline(top);
  byId("tiles").append(el("div", { class: spark ? "tile with-spark" : "tile" },
    el("dt", {}, label), el("dd", {}, value, " ", note), ...(spark ? [spark.node] : [])));
  return (text, more = "", figure = null) => {
    value.textContent = text;
    note.textContent = more;
    if (spark && figure !== null) spark.push(figure);
  };
}

/** Look while `isShown`. */
export function show(isShown) {
  if (isShown) watching ??= watch(new AbortController());
  else watching = watching?.abort();
}

/** Until `controller` aborts; returns it at once. */
function watch(controller) {
  stream(controller.signal);
  return controller;
}

async function stream(signal) {
  while (!signal.aborted) {
    try {
      for await (const frame of events("/v1/engine/live", { signal })) take(frame);
    } catch (error) {
      if (signal.aborted) break;
      notice(error instanceof ApiError ? error.message : "The live view has failed; see the browser's console.");
      if (!(error instanceof ApiError)) console.error(error);
      onStatus("unreachable", "not reachable");
    }
    await new Promise((resolve) => { setTimeout(resolve, RETRY); });
  }
}

function notice(text) {
  byId("engine-notice").hidden = !text;
  byId("engine-notice").textContent = text;
}

function take(frame) {
  onStatus(frame.status, frame.reason || frame.status);
  notice(frame.reason);
  if (!frame.engine) return;
  const before = scene;
  scene = sceneOf(frame.engine);
  hues.update(scene.requests.map(({ id }) => id));
  if (followed !== null && !scene.requests.some(({ id }) => id === followed)) follow(null);
  map.update(scene);
  list.update(scene.requests);
  if (before?.states.length === scene.states.length) tell(changes(before, scene), before);
  figures(frame);
  if (map.cursor !== null) describe(map.cursor);
}

function sceneOf(engine) {
  const held = states(engine.blocks, engine.num_blocks);
  const holders = [];
  const requests = engine.requests.map((request) => ({ ...request, ids: blockIds(request.blocks) }));
  for (const request of requests) {
    request.ids.forEach((id, position) => {
      const tokens = Math.max(0, Math.min(engine.block_size, request.computed_tokens - position * engine.block_size));
      if (id) (holders[id] ??= []).push({ request, position, tokens, level: tokens / engine.block_size });
    });
  }
  return { states: held, holders, requests, hues, engine };
}

function figures({ engine, ...frame }) {
  past = past.filter(({ time }) => frame.time - time <= LONG_WINDOW);
  past.push({ ...frame, computed: engine.computed_tokens });
  const output = rate("output_tokens");
  const computed = rate("computed");
  const usable = engine.num_blocks - 1;
  tiles.speed(grouped(output), `of ${grouped(computed)} computed`, output);
  tiles.running(grouped(engine.running));
  tiles.used(`${(100 * engine.used_blocks / usable).toFixed(engine.used_blocks * 10 < usable ? 1 : 0)} %`,
    `${grouped(engine.used_blocks)} of ${grouped(usable)} blocks`, engine.used_blocks / usable);
  tiles.waiting(grouped(engine.waiting), engine.waiting ? CAUSES[engine.wait_cause] ?? "" : "");
  firstToken(frame);
  tiles.hits(engine.prefix_queries ? `${Math.round(100 * engine.prefix_hits / engine.prefix_queries)} %` : "–",
    engine.prefix_hits ? `${grouped(engine.prefix_hits)} tokens` : "");
  tiles.preemptions(grouped(engine.preemptions),
    engine.recomputed_tokens ? `${grouped(engine.recomputed_tokens)} tokens again` : "");
  byId("cache-facts").textContent = `${plural(usable, "block")} of ${engine.block_size} tokens`;
  byId("request-facts").textContent = engine.requests.length ? "" : "none at the moment";
  counts();
}

/** Per second, of a count; one that falls is another engine's. */
function rate(name) {
  const last = past.at(-1);
  const first = past.find(({ time }) => last.time - time <= WINDOW);
  return last.time > first.time ? Math.max(0, last[name] - first[name]) / (last.time - first.time) : 0;
}

function firstToken(frame) {
  const { first_tokens: all, first_token_seconds: seconds } = frame;
  const latest = all - past[0].first_tokens;
  const newest = (seconds - past[0].first_token_seconds) / latest;
  if (latest) tiles.ttft(duration(newest), `mean of the last ${grouped(latest)}`);
  else if (all) tiles.ttft(duration(seconds / all), `mean of all ${grouped(all)}`);
  else tiles.ttft("–");
}

function counts() {
  const count = { one: 0, shared: 0, cached: 0, empty: 0 };
  for (let block = 1; block < scene.states.length; block++) {
    const state = scene.states[block];
    count[state === CACHED ? "cached" : state === 0 ? "empty" : state === 1 ? "one" : "shared"]++;
  }
  byId("counts").replaceChildren(...Object.values(count).map((number) => el("td", {}, grouped(number))));
  byId("blocks").setAttribute("aria-label", `Blocks of the KV cache: ${count.one} held by one request, `
    + `${count.shared} shared, ${count.cached} free with content, ${count.empty} empty`);
}

function tell(happened, before) {
  for (const { kind, id, count, found, shared } of happened) {
    const old = before.requests.find((request) => request.id === id)?.ids.filter(Boolean) ?? [];
    const now = scene.requests.find((request) => request.id === id)?.ids.filter(Boolean) ?? [];
    if (kind === "preempted") {
      map.flash(old, "preempted");
      list.shake(id);
      log(kind, id, count ? `is preempted and gives up ${plural(count, "block")}` : "has been preempted");
    }
    if (kind === "begun") {
      map.flash(now, "taken");
      const parts = [`runs, with ${plural(now.length, "block")}`];
      if (shared) parts.push(`${grouped(shared)} shared with others`);
      if (found) parts.push(`${grouped(found)} found in the cache`);
      log(found || shared ? "reused" : kind, id, parts.join(", "));
    }
    if (kind === "queued") log(kind, id, "waits");
    if (kind === "ended") {
      map.flash(old, "freed");
      log(kind, id, count ? `has ended; ${plural(count, "block")} let go` : "has ended");
    }
  }
  for (const request of scene.requests) {
    const was = before.requests.find(({ id }) => id === request.id);
    if (was?.ids.length && request.ids.length > was.ids.length) map.flash(request.ids.slice(was.ids.length), "taken");
  }
}

function log(kind, id, text) {
  const time = new Date().toLocaleTimeString("en-GB");
  const swatch = el("span", { class: "dot" });
  swatch.style.setProperty("--hue", hues.of(id));
  const name = el("b", { title: id }, shortId(id));
  byId("log").prepend(el("li", { class: kind }, el("time", {}, time), swatch, name, ` ${text}`));
  while (byId("log").children.length > LOG_LENGTH) byId("log").lastChild.remove();
}

function follow(id) {
  followed = id === followed ? null : id;
  map.follow(followed);
  list.follow(followed);
}

/** The next one of those that hold the block. */
function followHolder(block) {
  const ids = (scene?.holders[block] ?? []).map(({ request }) => request.id);
  const next = ids[ids.indexOf(followed) + 1];
  if (next !== undefined || followed !== null) follow(next ?? null);
}

/** Esc: let go of the request that is followed. */
export function escape() {
  if (followed === null) return false;
  follow(null);
  return true;
}

function describe(block) {
  if (block === null || !scene) {
    byId("inspect").textContent = HINT;
    return;
  }
  const text = `Block ${grouped(block)}: ${block === 0 ? "reserved, never handed out" : contentOf(block)}.`;
  if (byId("inspect").textContent !== text) byId("inspect").textContent = text;
}

function contentOf(block) {
  const state = scene.states[block];
  const holders = scene.holders[block] ?? [];
  if (state === CACHED) return "free; its content can be found again";
  if (state === 0) return "free and empty";
  if (!holders.length) return "in use";
  const size = scene.engine.block_size;
  const places = holders.slice(0, 4).map(({ request, position, tokens }) =>
    `${shortId(request.id)} (place ${position + 1} of ${request.ids.length}, ${tokens} of ${size} tokens)`);
  const rest = holders.length > 4 ? ` and ${holders.length - 4} more` : "";
  return `${holders.length > 1 ? `shared by ${holders.length}: ` : ""}${places.join(", ")}${rest}`;
}
