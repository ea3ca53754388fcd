// The form of the parameters, and what of it goes into a request. What is left empty is the server's to decide.

import { byId, el } from "./dom.js";
import { keep, recall } from "./memory.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05 },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
const NAME = "parameters";
const inputs = {};
const others = {
  system: byId("system"), stop: byId("stop-strings"), mode: byId("mode"), probabilities: byId("probabilities"),
};

/** `onchange` is called when `probabilities` or anything else has changed. */
export function setUp(onchange) {
  const kept = recall(NAME, {});
  for (const { name, label, ...range } of FIELDS) {
    inputs[name] = el("input", { type: "number", name, placeholder: "default", ...range, inputmode: "decimal" });
    inputs[name].value = kept[name] ?? "";
    byId("fields").append(el("label", { class: "field" }, label, inputs[name]));
  }
  others.system.value = kept.system ?? "";
  others.stop.value = kept.stop ?? "";
  others.probabilities.checked = kept.probabilities ?? false;
  for (const input of [...Object.values(inputs), ...Object.values(others)]) {
    input.addEventListener("input", () => { changed(); onchange(); });
  }
  byId("defaults").addEventListener("click", () => {
    for (const input of [...Object.values(inputs), others.system, others.stop]) input.value = "";
    changed();
    onchange();
  });
  summarise();
}

function changed() {
  for (const input of Object.values(inputs)) input.removeAttribute("aria-invalid");
  const kept = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  const { system, stop, probabilities } = others;
  keep(NAME, { ...kept, system: system.value, stop: stop.value, probabilities: probabilities.checked });
  summarise();
}

function summarise() {
  const given = FIELDS.filter(({ name }) => inputs[name].value);
  const parts = given.map(({ name, label }) => `${label.toLowerCase()} ${inputs[name].value}`);
  if (others.system.value.trim()) parts.unshift("system prompt");
  if (others.stop.value) parts.push("stop strings");
  byId("parameters-summary").textContent = parts.join(" · ");
}

/** The model has no chat template: there is nothing but completion. */
export function onlyCompletion() {
  others.mode.value = "completion";
  others.mode.disabled = true;
}

export const isCompletion = () => others.mode.value === "completion";
export const systemPrompt = () => others.system.value.trim();
export const wantsProbabilities = () => others.probabilities.checked;

/** Fields of a request. Throws the input that holds no number. */
export function requestFields() {
  const fields = {};
  for (const [name, input] of Object.entries(inputs)) {
    if (input.validity.badInput) throw input;
    if (input.value) fields[name] = Number(input.value);
  }
  const stop = others.stop.value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  return fields;
}

/** Point at the field that the server refuses; false if it is none of these. */
export function pointAt(name) {
  const input = inputs[name] ?? { stop: others.stop, messages: null }[name];
  if (!input) return false;
  byId("parameters").open = true;
  input.setAttribute("aria-invalid", "true");
  input.focus();
  return true;
}
