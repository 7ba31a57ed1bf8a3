// The server, asked: vLLM's own routes for texts, /v1/steercap for what is seen of them.
const KEY = "steercap.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Something that went wrong, in words for whoever asked. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function refused(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? body.error ?? body.detail ?? "";
    if (typeof said !== "string") said = JSON.stringify(said);
  } catch {
    // not JSON: the status says what there is to say
  }
  const known = {
    401: "The server asks for an API key, and has not got the right one.",
    404: said || "The server knows no such thing.",
    413: "That is longer than the server takes.",
    429: `The server is full: ${said}`,
  };
  return new Failure(known[response.status] ?? (said || `The server answered with status ${response.status}.`), response.status);
}

export async function asked(path, { method = "GET", body, signal, keepalive } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const raw = body instanceof Blob;
  if (body !== undefined && !raw) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, keepalive, body: body === undefined || raw ? body : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refused(response);
  return response;
}

export const json = async (path, options) => (await asked(path, options)).json();

/** The events of a stream, each decoded. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The connection to the server broke off.");
    }
    held += part.value ?? "";
    const lines = held.split("\n\n");
    held = part.done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      yield JSON.parse(line.slice(6));
    }
    if (part.done) return;
  }
}

/** Ask for an answer; `grown(text)` hears it as it comes. Gives the text and what steercap says of it. */
export async function answered(question, { steering, signal, grown }) {
  const body = {
    model: question.model,
    max_tokens: question.length,
    temperature: 0,
    stream: true,
    steercap: { capture: { sites: "resid_post", codec: "raw" }, ...(steering ? { steering } : {}) },
  };
  if (question.messages) {
    body.messages = question.messages;
    if (question.messages.at(-1).role === "assistant") Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  } else body.prompt = question.text;
  const path = question.messages ? "v1/chat/completions" : "v1/completions";
  const response = await asked(path, { method: "POST", body, signal });
  let text = "";
  let result = null;
  for await (const event of events(response)) {
    if (event.error) throw new Failure(event.error.message ?? String(event.error), event.error.code);
    const [choice] = event.choices ?? [];
    const more = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning ?? "";
    if (more) grown((text += more));
    result = event.steercap?.results?.[0] ?? result;
  }
  if (!result?.capture) throw new Failure("The server sent a text, but not what was read of it.");
  return { text, capture: result.capture.id, steering: result.steering };
}
