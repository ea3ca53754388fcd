// Elements without markup: whatever is text stays text.

/** An element; `attributes` whose names begin with "on" are listeners, true and false set and leave out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export const prefersStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const SCALES = [[1e9, "B"], [1e6, "M"], [1e3, "k"]];

/** 134515008 -> "134.5 M" */
export function short(number) {
  const [scale, unit] = SCALES.find(([scale]) => number >= scale) ?? [1, ""];
  return unit ? `${(number / scale).toFixed(1).replace(/\.0$/, "")} ${unit}` : grouped(number);
}

/** 8192 -> "8,192" */
export const grouped = (number) => Math.round(number).toLocaleString("en");

/** Seconds: "84 ms", "1.25 s", "3 min". */
export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.round(seconds / 60)} min`;
}

export const plural = (count, word) => `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
