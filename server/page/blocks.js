// The KV cache, drawn: one square per block.
//
// The lower canvas holds the blocks, and repaints those that look different; the upper one what passes: flashes,
// the path of the request that is followed, the cursor.

import { prefersStillness } from "./dom.js";
import { CACHED } from "./requests.js";

const HEIGHT = 340;  // that the map aims at; CSS pixels, as all lengths here
const SMALLEST = 4;
const LARGEST = 30;
const COLOURS = {
  plate: "#1b1815", empty: "#2b2722", cached: "#655c4f", reserved: "#14110f", unknown: "#8a8072", ink: "#fffaf0",
};
const FLASH = { taken: 500, freed: 500, preempted: 1600 };  // milliseconds

const solid = (hue) => `oklch(72% 0.13 ${hue})`;  // equally light, whatever the hue
const pale = (hue) => `oklch(38% 0.06 ${hue})`;

export class BlockMap {
  /** `describe(index)` is called with the block that is pointed at, or null; `choose(index)` with the one clicked. */
  constructor(canvas, overlay, { describe, choose }) {
    this.canvas = canvas;
    this.overlay = overlay;
    this.describe = describe;
    this.choose = choose;
    this.count = 0;
    this.cursor = null;
    this.followed = null;
    this.looks = [];
    this.flashes = new Map();
    this.#listen();
    new ResizeObserver(() => this.#layOut()).observe(canvas.parentElement);
  }

  /** `scene`: {states, holders: [[{request, position, level}]] by block, hues}. */
  update(scene) {
    const isNew = scene.states.length !== this.count;
    this.scene = scene;
    this.count = scene.states.length;
    if (isNew) this.#layOut();
    else this.#paint();
    this.#animate();
  }

  follow(id) {
    this.followed = id;
    this.#paint();
    this.#animate();
  }

  flash(blocks, kind) {
    if (prefersStillness()) return;
    const since = performance.now();
    for (const block of blocks) this.flashes.set(block, { kind, since });
    this.#animate();
  }

  #layOut() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width || !this.count) return;
    this.size = sizeFor(width, this.count);
    this.columns = Math.floor(width / this.size);
    this.gap = this.size > 12 ? 3 : this.size > 6 ? 2 : 1;
    const height = Math.ceil(this.count / this.columns) * this.size;
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = Math.round(width * devicePixelRatio);
      canvas.height = Math.round(height * devicePixelRatio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").scale(devicePixelRatio, devicePixelRatio);
    }
    this.looks = [];
    this.#paint();
    this.#animate();
  }

  #place(block) {
    return [block % this.columns * this.size, Math.floor(block / this.columns) * this.size];
  }

  #paint() {
    if (!this.columns || !this.scene) return;
    const context = this.canvas.getContext("2d");
    for (let block = 0; block < this.count; block++) {
      const look = this.#lookOf(block);
      if (look === this.looks[block]) continue;
      this.looks[block] = look;
      this.#paintBlock(context, block);
    }
  }

  /** All that a block's square depends on. */
  #lookOf(block) {
    const holders = this.scene.holders[block];
    if (!holders) return `${this.scene.states[block]} ${this.followed !== null}`;
    const hues = holders.slice(0, 2).map(({ request }) => this.scene.hues.of(request.id)).join();
    const level = Math.round(holders[0].level * this.size);
    const mine = this.#positionOfFollowed(block);
    return `${this.scene.states[block]} ${hues} ${level} ${this.followed !== null} ${mine}`;
  }

  #positionOfFollowed(block) {
    return this.scene.holders[block]?.find(({ request }) => request.id === this.followed)?.position;
  }

  #paintBlock(context, block) {
    const [x, y] = this.#place(block);
    const side = this.size - this.gap;
    const isAside = this.followed !== null && this.#positionOfFollowed(block) === undefined;
    context.globalAlpha = 1;
    context.fillStyle = COLOURS.plate;
    context.fillRect(x, y, this.size, this.size);
    context.globalAlpha = isAside ? 0.3 : 1;
    const holders = this.scene.holders[block];
    if (holders) this.#paintHeld(context, x, y, side, block, holders);
    else this.#paintFree(context, x, y, side, block);
    context.globalAlpha = 1;
  }

  #paintFree(context, x, y, side, block) {
    const state = this.scene.states[block];
    const isCached = state === CACHED;
    const kind = block === 0 ? "reserved" : isCached ? "cached" : state ? "unknown" : "empty";
    context.fillStyle = COLOURS[kind];
    context.fillRect(x, y, side, side);
    if (block === 0 || !isCached || side < 8) return;
    context.fillStyle = COLOURS.plate;  // a page whose corner is turned down
    triangle(context, [x + side, y], [x + side * 0.55, y], [x + side, y + side * 0.45]);
  }

  #paintHeld(context, x, y, side, block, holders) {
    const hues = holders.map(({ request }) => this.scene.hues.of(request.id));
    const { level } = holders[0];
    context.fillStyle = pale(hues[0]);
    context.fillRect(x, y, side, side);
    const filled = Math.round(side * level);
    context.fillStyle = solid(hues[0]);
    context.fillRect(x, y + side - filled, side, filled);
    const count = this.scene.states[block];
    if (holders.length > 1) paintShared(context, x, y, side, hues.slice(0, 2).map(solid));
    const position = this.#positionOfFollowed(block);
    const label = position !== undefined ? position + 1 : count > 1 ? count : "";
    if (label === "" || side < 12) return;
    context.fillStyle = holders.length > 1 || filled > side / 2 ? COLOURS.plate : COLOURS.ink;
    if (holders.length > 1) {
      context.beginPath();
      context.arc(x + side / 2, y + side / 2, side * 0.36, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = COLOURS.ink;
    }
    context.font = `600 ${Math.min(12, Math.round(side * (label > 99 ? 0.42 : 0.52)))}px ui-monospace, monospace`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(label, x + side / 2, y + side / 2 + 0.5);
  }

  #animate() {
    if (this.isAnimating || !this.columns) return;
    this.isAnimating = true;
    requestAnimationFrame((now) => {
      this.isAnimating = false;
      this.#paintOverlay(now);
      if (this.flashes.size) this.#animate();
    });
  }

  #paintOverlay(now) {
    const context = this.overlay.getContext("2d");
    context.clearRect(0, 0, this.overlay.width, this.overlay.height);
    if (this.size < 16) this.#paintPath(context);
    for (const [block, { kind, since }] of this.flashes) {
      const rest = 1 - (now - since) / FLASH[kind];
      if (rest <= 0 || block >= this.count) this.flashes.delete(block);
      else this.#paintFlash(context, block, kind, rest);
    }
    if (this.cursor !== null && this.cursor < this.count) this.#frame(context, this.cursor, COLOURS.ink, 2);
  }

  #paintFlash(context, block, kind, rest) {
    const [x, y] = this.#place(block);
    const side = this.size - this.gap;
    context.globalAlpha = Math.max(0, Math.min(1, rest));
    if (kind === "preempted") {
      const reach = (1 - rest) * 5;
      context.strokeStyle = "#ff5a3c";
      context.lineWidth = side > 8 ? 2.5 : 1.5;
      context.strokeRect(x - reach / 2, y - reach / 2, side + reach, side + reach);
    } else {
      context.globalAlpha *= 0.8;
      context.fillStyle = kind === "taken" ? COLOURS.ink : COLOURS.plate;
      context.fillRect(x, y, side, side);
    }
    context.globalAlpha = 1;
  }

  /** From block to block in order of position. */
  #paintPath(context) {
    const request = this.scene?.requests?.find(({ id }) => id === this.followed);
    if (!request) return;
    const side = this.size - this.gap;
    context.strokeStyle = COLOURS.ink;
    context.lineWidth = 0.75;
    context.globalAlpha = 0.35;
    context.beginPath();
    for (const id of request.ids) {
      const [x, y] = this.#place(id);
      if (id) context.lineTo(x + side / 2, y + side / 2);
    }
    context.stroke();
    context.globalAlpha = 1;
  }

  #frame(context, block, colour, width) {
    const [x, y] = this.#place(block);
    const side = this.size - this.gap;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x - 1, y - 1, side + 2, side + 2);
  }

  #listen() {
    const blockAt = (event) => {
      const column = Math.floor(event.offsetX / this.size);
      const block = Math.floor(event.offsetY / this.size) * this.columns + column;
      return column < this.columns && block >= 0 && block < this.count ? block : null;
    };
    this.canvas.addEventListener("pointermove", (event) => this.#point(blockAt(event)));
    this.canvas.addEventListener("pointerleave", () => {
      if (document.activeElement !== this.canvas) this.#point(null);
    });
    this.canvas.addEventListener("click", (event) => {
      this.#point(blockAt(event));
      if (this.cursor !== null) this.choose(this.cursor);
    });
    this.canvas.addEventListener("focus", () => this.#point(this.cursor ?? 0));
    this.canvas.addEventListener("blur", () => this.#point(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    const at = this.cursor ?? 0;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + this.columns, ArrowUp: at - this.columns,
      Home: 0, End: this.count - 1 }[event.key];
    if (event.key === "Enter" && this.cursor !== null) this.choose(this.cursor);
    if (to === undefined || to < 0 || to >= this.count) return;
    event.preventDefault();
    this.#point(to);
  }

  #point(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.describe(block);
    this.#animate();
  }
}

/** Of squares that fill the height aimed at; a little less if that leaves less of the width over. */
function sizeFor(width, count) {
  const wanted = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt(width * HEIGHT / count))));
  const candidates = wanted < 9 ? [wanted] : [0, 1, 2, 3].map((less) => wanted - less);
  return candidates.reduce((best, size) => width % size < width % best ? size : best);
}

function triangle(context, ...corners) {
  context.beginPath();
  for (const corner of corners) context.lineTo(...corner);
  context.fill();
}

/** In stripes of two colours; a small square is halved. */
function paintShared(context, x, y, side, colours) {
  if (side < 8) {
    context.fillStyle = colours[1];
    triangle(context, [x + side, y], [x + side, y + side], [x, y + side]);
    return;
  }
  context.save();
  context.beginPath();
  context.rect(x, y, side, side);
  context.clip();
  context.fillStyle = COLOURS.plate;
  context.fillRect(x, y, side, side);
  context.lineWidth = side / 6;
  for (let stripe = 0, offset = -side; offset <= side; stripe++, offset += side / 4) {
    context.strokeStyle = colours[stripe % 2];
    context.beginPath();
    context.moveTo(x + offset - side, y + 2 * side);
    context.lineTo(x + offset + 2 * side, y - side);
    context.stroke();
  }
  context.restore();
}
