// Requests that do nothing but show how the engine deals with many.

import { ApiError, events } from "./api.js";
import { byId } from "./dom.js";

const PREFIX = "In a town by the sea there stood a library of eight floors. On each floor there were eight rooms, "
  + "in each room eight shelves, and on each shelf eight books, which were bound in octavo. "
  + "The librarian knew them all, and told a story: ";
const SUBJECTS = ["a fox", "a lighthouse", "two brothers", "winter", "a clock", "a printer", "a map", "a thief"];

let running = null;

export function setUp(model) {
  byId("traffic").addEventListener("submit", (event) => { event.preventDefault(); start(model); });
  byId("traffic-stop").addEventListener("click", () => running?.abort());
}

async function start(model) {
  if (running) return;
  running = new AbortController();
  const count = byId("traffic-count").valueAsNumber;
  let done = 0;
  const told = (text) => { byId("traffic-state").textContent = text; };
  show(true);
  told(`0 of ${count} answered`);
  try {
    for await (const chunk of events("/v1/completions", { body: bodyOf(model(), count), signal: running.signal })) {
      done += chunk.choices.filter((choice) => choice.finish_reason).length;
      told(`${done} of ${count} answered`);
    }
  } catch (error) {
    told(running.signal.aborted ? "stopped" : error instanceof ApiError ? error.message : String(error));
    running.abort();
  }
  running = null;
  show(false);
}

function show(isRunning) {
  byId("traffic-start").hidden = isRunning;
  byId("traffic-stop").hidden = !isRunning;
}

/** One request with many prompts: browsers open only a few connections. */
function bodyOf(model, count) {
  const isShared = byId("traffic-shared").checked;
  const prompt = Array.from({ length: count }, (_, index) => {
    const subject = `Chapter ${index + 1}, of ${SUBJECTS[index % SUBJECTS.length]}. `;
    return isShared ? PREFIX + subject : subject + PREFIX;
  });
  const tokens = byId("traffic-tokens").valueAsNumber;
  return { model, prompt, max_tokens: tokens, ignore_eos: true, temperature: 0.8, stream: true, stream_interval: 1000 };
}
