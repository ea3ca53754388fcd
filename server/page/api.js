// Requests to the server that this page came from, with the key if it asks for one.

const KEY = "octavo.key";

/** What the server, or the way to it, says when it does not answer as it should. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let askForKey = async () => null;
let asking = null;

/** `ask(isRefused)` resolves to a key; it is called once, however many requests wait for one. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The response to a request, whose status is good. Throws `ApiError`, or what `signal` aborts with. */
export async function request(path, { body, signal, accept = "application/json" } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await send(path, { body, signal, accept, key });
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    if (sessionStorage.getItem(KEY) !== key) continue;  // another request has got one meanwhile
    asking ??= askForKey(key !== null).finally(() => { asking = null; });
    sessionStorage.setItem(KEY, await asking);
  }
}

async function send(path, { body, signal, accept, key }) {
  const headers = { accept };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  try {
    return await fetch(path, { method, headers, signal, body: JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch { /* not ours: a proxy's, say */ }
  let message = error.message ?? `The server answers with status ${response.status}.`;
  const wait = response.headers.get("retry-after");
  if (wait !== null) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status: response.status, param: error.param ?? null });
}

export const json = async (path, options) => (await request(path, options)).json();

/** The objects of a stream of events. Throws `ApiError` when one of them is an error, or the stream breaks off. */
export async function* events(path, options) {
  const response = await request(path, { ...options, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const data = dataOf(piece);
        if (data === "[DONE]") return;
        if (data) yield checked(JSON.parse(data));
      }
    }
  } catch (error) {
    if (options?.signal?.aborted || error instanceof ApiError) throw error;
    throw new ApiError("The connection to the server broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(piece) {
  const lines = piece.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

function checked(object) {
  if (object.error) throw new ApiError(object.error.message ?? "The answer broke off.", object.error);
  return object;
}
