// What this browser remembers from visit to visit. A browser that keeps nothing is no error.

const PREFIX = "octavo.";

export function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch { /* full, or forbidden */ }
}
