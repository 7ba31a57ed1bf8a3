// The page: what is asked, which direction, how much of it; answers as they come, and the view of them.
import { Failure, answered, asked, json, key } from "./api.js";
import { element } from "./colours.js";
import { fragmentOf, saveFile, savePicture, stateOf } from "./save.js";
import { MEASURES, View, firstLayer } from "./view.js";

const byId = (id) => document.getElementById(id);
const EXAMPLE = { text: "The film was wonderful, but the dinner after it was", chat: "user: How was your day at work?" };
const HINTS = {
  text: "The model goes on from where it ends.",
  chat: "A line that begins with system:, user: or assistant: begins a message. A JSON list of messages works too.",
};
const MORE = ["The film was wonderful.", "I found the food excellent.", "Their new song is beautiful.", "My day has been lovely."];
const LESS = ["The film was terrible.", "I found the food awful.", "Their new song is boring.", "My day has been dreadful."];

const state = { mode: "text", text: EXAMPLE.text, length: 24, model: "", direction: "", compare: "", measure: "", run: "plain", layer: null, token: null, dose: 0, at: null };
/** Directions by name with their layers and norms; what is running, by run; captures that wait, by run. */
let known = new Map();
const running = {};
const waiting = {};
/** Title and text of each answer that is shown, by run; and what was asked when the plain one came. */
const answers = {};
let shown = null;
let size = "";
/** Whether the steered answer is looked at when it comes: since the dose was moved, or the answer chosen. */
let following = false;
let layers = [];

const view = new View(byId("view"), {
  lens: async (look, wanted) => {
    const positions = look.tokens.map((token) => token.position);
    const most = Math.max(1, Math.floor(4096 / Math.max(1, positions.length)));
    const some = wanted.slice(0, most);
    const found = await rows(look.capture, "lens", { layers: some, top: 8 });
    return Object.fromEntries(found.layers.map((layer, at) => [layer, found.top[at]]));
  },
  saes: new Map(),
  features: async (look, layer) => {
    const sae = view.source.saes.get(layer);
    const found = await rows(look.capture, "features", { sae, top: 8 });
    return { sae, tokens: found.features, active: found.active };
  },
  changed: (settings, changed) => {
    if ("run" in changed) following = changed.run === "steered";
    for (const name of ["measure", "run", "layer", "token"]) if (name in changed || name === "layer") state[name] = settings[name];
    remember();
  },
  failed: tell,
});

// What is said to whoever looks

function tell(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  byId("notice").textContent = error.message;
  byId("notice").hidden = false;
  if (!(error instanceof Failure)) console.error(error);
}

const settled = () => ((byId("notice").hidden = true), (byId("notice").textContent = ""));
const say = (text) => (byId("status").textContent = text);

let remembering = 0;
function remember() {
  clearTimeout(remembering);
  remembering = setTimeout(link, 150);
}

/** The address says what is shown, which may not be what stands in the fields. */
const link = () => history.replaceState(null, "", `#${fragmentOf({ ...state, ...shown })}`);

// What is asked

/** The messages of a chat as it was typed or pasted. */
export function messagesOf(text) {
  const trimmed = text.trim();
  if (/^[[{]/.test(trimmed)) {
    try {
      const given = JSON.parse(trimmed);
      const list = Array.isArray(given) ? given : given.messages;
      if (Array.isArray(list) && list.length && list.every((one) => one?.role)) return list;
    } catch {
      // not JSON: it is text
    }
  }
  const messages = [];
  for (const line of trimmed.split("\n")) {
    const begins = /^(system|user|assistant):\s?(.*)$/i.exec(line);
    if (begins) messages.push({ role: begins[1].toLowerCase(), content: begins[2] });
    else if (messages.length) messages.at(-1).content += `\n${line}`;
    else messages.push({ role: "user", content: line });
  }
  return messages.map((one) => ({ ...one, content: one.content.trim() }));
}

const question = ({ mode, text, model, length }) => ({ model, length, ...(mode === "chat" ? { messages: messagesOf(text) } : { text }) });

const named = (name) => (byId("model").textContent = `${name} · ${size}`);

/** Ask one run, and show its text as it comes. */
async function run(name, steering, wanted) {
  running[name]?.abort();
  const control = (running[name] = new AbortController());
  const place = byId(name);
  const title = name === "plain" ? "Plain" : byId("steered-title").textContent;
  let capture = null;
  place.setAttribute("aria-busy", "true");
  try {
    const found = await answered(question(wanted), {
      steering,
      signal: control.signal,
      grown: (text) => (place.textContent = text.trimStart()),
    });
    if (!found.text) place.replaceChildren(element("span", { className: "hint" }, "It ended at once."));
    const look = await looked((capture = found.capture), control.signal);
    forget(name);
    waiting[name] = capture;
    answers[name] = { title, text: found.text };
    if (name === "plain") named((shown = wanted).model);
    view.put(name, look);
    if (name === "plain") {
      layers = look.layers;
      offerLayers();
    }
    return true;
  } catch (error) {
    if (capture && waiting[name] !== capture) freed(capture);
    if (error.name !== "AbortError" && running[name] === control) {
      if (name === "steered") unsteered();
      // what is seen, kept and steered is still of the question before
      if (answers[name]) place.textContent = answers[name].text.trimStart();
      else place.replaceChildren(element("span", { className: "hint" }, "No answer: see above."));
    }
    tell(error);
    return false;
  } finally {
    if (running[name] === control) {
      delete running[name];
      place.setAttribute("aria-busy", "false");
    }
  }
}

const chosen = () => [state.direction, state.compare].filter((name, at, all) => name && all.indexOf(name) === at);

/** Something asked of rows that wait on the server, which lets go of them in a while. */
async function rows(capture, what, body, signal) {
  try {
    return await json(`v1/steercap/captures/${capture}/${what}`, { method: "POST", body, signal });
  } catch (error) {
    throw error.status === 404 ? new Failure("The server has let go of these rows, as it does after a while. Run again to look on.", 404) : error;
  }
}

/** What is to be seen of rows that wait, along the directions that are chosen when it comes. */
async function looked(capture, signal) {
  for (;;) {
    const directions = chosen();
    const found = await rows(capture, "scores", { directions }, signal);
    if (chosen().join() === directions.join()) return { ...found, capture, lens: {}, features: {} };
  }
}

const freed = (capture) => asked(`v1/steercap/captures/${capture}`, { method: "DELETE", keepalive: true }).catch(() => {});

function forget(name) {
  if (waiting[name]) freed(waiting[name]);
  delete waiting[name];
}

/** Nothing is left of the steered answer. */
function unsteered() {
  running.steered?.abort();
  forget("steered");
  delete answers.steered;
  view.drop("steered");
  byId("steered").replaceChildren(element("span", { className: "hint" }, "Move the dose: the steered answer comes here."));
}

async function ask() {
  settled();
  clearTimeout(dosing);
  if (!state.text.trim()) return tell(new Failure("There is nothing to ask: type a text."));
  byId("run").disabled = true;
  say("The model is answering.");
  try {
    unsteered();
    const { mode, text, length, model } = state;
    const done = await run("plain", null, { mode, text, length, model });
    if (done) {
      say("The answer is here.");
      await steer();
    }
  } finally {
    byId("run").disabled = false;
  }
}

// Directions

/** Offer the directions that the server has; gives what to say where one that is asked for is not among them. */
async function offer() {
  const { data } = await json("v1/steercap/vectors");
  known = new Map();
  for (const one of data) {
    if (one.site && one.site !== "resid_post") continue;
    if (one.kind === "vectors") known.set(one.name, one);
    for (const direction of one.directions ?? []) known.set(`${one.name}/${direction}`, one);
  }
  for (const [id, none] of [["direction", known.size ? "none" : "none yet"], ["compare", "nothing"]]) {
    byId(id).replaceChildren(element("option", { value: "" }, none), ...[...known.keys()].map((name) => element("option", { value: name }, name)));
  }
  let missing = "";
  for (const name of ["direction", "compare"]) {
    if (state[name] && !known.has(state[name])) {
      missing ||= `This view is of the direction “${state[name]}”, which this server does not have for you; it is shown without.`;
      state[name] = "";
    }
    byId(name).value = state[name];
  }
  byId("compare").disabled = known.size < 2 || !state.direction;
  if (!known.size) byId("make").open = true;
  return missing;
}

/** Take a direction: what is shown is scored along it. */
async function direct(changed) {
  Object.assign(state, changed);
  if (!state.direction) state.compare = "";
  for (const name of ["direction", "compare"]) byId(name).value = state[name];
  byId("compare").disabled = known.size < 2 || !state.direction;
  const measure = state.direction && !["cosine", "projection"].includes(view.settings.measure) ? "cosine" : view.settings.measure;
  Object.assign(view.settings, { direction: state.direction, compare: state.compare, measure });
  try {
    for (const [name, capture] of Object.entries(waiting)) {
      const look = await looked(capture);
      if (waiting[name] !== capture) continue; // another answer has come, or none is left
      const before = view.looks[name];
      view.looks[name] = { ...look, lens: before?.lens ?? {}, features: before?.features ?? {} };
    }
  } catch (error) {
    if (error.status === 404) return ask(); // the rows have gone: the model reads the text again
    tell(error);
  }
  view.change({ measure: view.settings.measure });
  offerLayers();
}

async function make(event) {
  event.preventDefault();
  settled();
  const lines = (id) => byId(id).value.split("\n").map((line) => line.trim()).filter(Boolean);
  const name = byId("name").value;
  byId("make-button").disabled = true;
  say("The model is reading the texts.");
  try {
    await json(`v1/steercap/vectors/${encodeURIComponent(name)}`, { method: "POST", body: { more: lines("more"), less: lines("less") } });
    await offer();
    say(`The direction ${name} is made.`);
    await direct({ direction: name });
    await steer();
  } catch (error) {
    tell(error);
  } finally {
    byId("make-button").disabled = false;
  }
}

async function upload() {
  const [file] = byId("upload").files;
  if (!file) return;
  settled();
  const name = file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 64) || "vectors";
  try {
    const found = await json(`v1/steercap/vectors/${name}`, { method: "PUT", body: file });
    await offer();
    const first = found.directions ? `${name}/${found.directions[0]}` : name;
    if (known.has(first)) {
      await direct({ direction: first });
      await steer();
    } else tell(new Failure(`“${name}” is kept, but it is of ${found.site ?? found.kind}: only vectors of the residual stream colour tokens here.`));
  } catch (error) {
    tell(error);
  } finally {
    byId("upload").value = "";
  }
}

// The dose

/** The layers that the direction can be added at, and how far the slider goes there. */
function offerLayers() {
  const along = view.looks.plain?.directions[state.direction];
  const usable = along?.layers ?? [];
  byId("dose").disabled = byId("at").disabled = !usable.length;
  if (!usable.includes(state.at)) state.at = usable.includes(firstLayer(layers)) ? firstLayer(layers) : (usable[Math.floor(usable.length / 2)] ?? null);
  if (byId("at").dataset.usable !== usable.join()) {
    byId("at").dataset.usable = usable.join();
    byId("at").replaceChildren(...usable.map((layer) => element("option", { value: layer }, layer)));
  }
  if (state.at !== null) byId("at").value = state.at;
  const most = reach();
  Object.assign(byId("dose"), { min: -most, max: most, step: most / 40 });
  byId("dose").value = state.dose;
  sayDose();
}

const median = (values) => [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];

/** Length of a row of the chosen layer, and of the vector there. */
function lengths() {
  const look = view.looks.plain;
  const along = look?.directions[state.direction];
  if (!along || state.at === null) return null;
  return { row: median(look.norms[look.layers.indexOf(state.at)]), vector: along.norms[along.layers.indexOf(state.at)] };
}

/** How far the slider goes: to about the length of a row, a round number. */
function reach() {
  const found = lengths();
  if (!found?.vector) return 4;
  const most = found.row / found.vector;
  const ten = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 4, 5, 10].map((step) => step * ten).find((step) => step >= most * 0.8) ?? 4;
}

const doseSaid = () => String(Number(state.dose.toPrecision(3))).replace(/^-/, "−").replace(/^(?=[1-9]|0\.)/, "+");

function sayDose() {
  const found = lengths();
  const share = found ? ` · ${Math.round((100 * Math.abs(state.dose) * found.vector) / found.row)} % of a row` : "";
  byId("dose-said").textContent = state.direction ? `${doseSaid()}×${share}` : "";
  byId("dose-hint").textContent = state.direction ? `“${state.direction}” is added to every row of the layer.` : "Choose or make a direction to steer with.";
  byId("steered-title").textContent = state.direction && state.dose ? `Steered: ${doseSaid()} × ${state.direction} at layer ${state.at}` : "Steered";
}

let dosing = 0;
function dosed() {
  state.dose = Number(byId("dose").value);
  following = true;
  sayDose();
  remember();
  clearTimeout(dosing);
  dosing = setTimeout(steer, 250);
}

/** Ask for the steered answer, if there is a dose. */
async function steer() {
  clearTimeout(dosing);
  remember();
  sayDose();
  if (!state.direction || !state.dose || state.at === null) return unsteered();
  settled();
  const edit = { op: "add", vector: state.direction, layers: [state.at], scale: state.dose };
  if (!(await run("steered", edit, shown))) return;
  say("The steered answer is here.");
  if (following) view.change({ run: "steered" });
}

// To keep

async function keptView() {
  for (const look of Object.values(view.looks)) {
    while (look.asking) await new Promise((done) => setTimeout(done, 50));
    look.asking = true; // nobody else asks meanwhile
    try {
      for (let missing; (missing = look.layers.filter((layer) => !look.lens[layer])).length; ) {
        Object.assign(look.lens, await view.source.lens(look, missing.slice(0, 8)));
      }
      for (const layer of look.layers.filter((one) => view.source.saes.has(one) && !look.features[one])) {
        look.features[layer] = await view.source.features(look, layer);
      }
    } finally {
      look.asking = false;
    }
  }
  const looks = Object.fromEntries(Object.entries(view.looks).map(([run, { capture: _, asking: __, ...look }]) => [run, look]));
  return { model: byId("model").textContent, answers: [answers.plain, answers.steered].filter(Boolean), looks, settings: view.settings };
}

async function keeping(button, work, done) {
  if (!view.look) return tell(new Failure("There is nothing to keep yet: run something first."));
  settled();
  button.disabled = true;
  try {
    await work();
    say(done);
    const said = button.textContent;
    button.textContent = "Done";
    setTimeout(() => (button.textContent = said), 1200);
  } catch (error) {
    tell(error);
  } finally {
    button.disabled = false;
  }
}

// The beginning

function show() {
  byId("text").value = state.text;
  byId("length").value = state.length;
  document.querySelector(`input[name="mode"][value="${state.mode}"]`).checked = true;
  byId("text-hint").textContent = HINTS[state.mode];
}

function take(fragment) {
  const found = stateOf(fragment);
  if (!["text", "chat"].includes(found.mode)) delete found.mode;
  if (!Object.hasOwn(MEASURES, found.measure ?? "")) delete found.measure;
  if (found.length !== undefined) found.length = Math.min(512, Math.max(1, Math.round(found.length)));
  Object.assign(state, { direction: "", compare: "", dose: 0, run: "plain" }, found);
  following = state.run === "steered";
  view.settings = { ...view.settings, direction: state.direction, compare: state.compare, measure: state.measure || (state.direction ? "cosine" : "norm"), layer: state.layer, token: state.token, run: "plain" };
  show();
}

async function begin() {
  settled();
  try {
    const [models, model, saes] = await Promise.all(["v1/models", "v1/steercap/model", "v1/steercap/saes"].map((path) => json(path)));
    view.source.saes = new Map(saes.data.filter((one) => one.site === "resid_post").map((one) => [one.layer, one.name]));
    byId("key-form").hidden = true;
    const names = models.data.map((one) => one.id);
    let missing = "";
    if (!names.includes(state.model)) {
      if (state.model) missing = `This view is of the model “${state.model}”, which this server does not have for you; “${names[0]}” answers. `;
      state.model = names[0];
    }
    byId("models").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    byId("models").value = state.model;
    byId("models-field").hidden = names.length < 2;
    size = `${model.num_layers} layers × ${model.hidden_size}`;
    if (!shown) named(state.model);
    if (!model.points.some((point) => point.site === "resid_post")) throw new Failure("This server was started without the site resid_post, which the explorer reads.");
    missing += await offer();
    const first = known.keys().next().value;
    if (!state.direction && first && !location.hash) state.direction = byId("direction").value = first;
    byId("compare").disabled = known.size < 2 || !state.direction;
    if (state.direction && !state.measure) state.measure = "cosine";
    view.settings = { ...view.settings, direction: state.direction, compare: state.compare, measure: state.measure || "norm" };
    const run = state.run;
    await ask();
    if (run !== "plain" && view.looks[run]) view.change({ run });
    if (missing) tell(new Failure(missing.trim()));
  } catch (error) {
    tell(error);
  }
}

byId("more").value = MORE.join("\n");
byId("less").value = LESS.join("\n");
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("text").addEventListener("input", (event) => (state.text = event.target.value));
byId("length").addEventListener("input", (event) => (state.length = Math.min(512, Math.max(1, Math.round(Number(event.target.value)) || 1))));
byId("models").addEventListener("change", (event) => (state.model = event.target.value));
for (const choice of document.getElementsByName("mode")) {
  choice.addEventListener("change", () => {
    if (Object.values(EXAMPLE).includes(state.text) || !state.text.trim()) state.text = EXAMPLE[choice.value];
    state.mode = choice.value;
    show();
  });
}
byId("direction").addEventListener("change", async (event) => {
  await direct({ direction: event.target.value });
  await steer();
});
byId("compare").addEventListener("change", (event) => direct({ compare: event.target.value }));
byId("make-form").addEventListener("submit", make);
byId("upload").addEventListener("change", upload);
byId("dose").addEventListener("input", dosed);
byId("at").addEventListener("change", (event) => {
  state.at = Number(event.target.value);
  following = true;
  view.change({ layer: state.at });
  offerLayers();
  steer();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  begin();
});
byId("link").addEventListener("click", (event) =>
  keeping(event.target, async () => {
    link();
    if (!navigator.clipboard) throw new Failure("A page that did not come by HTTPS may not copy; the link is in the address bar.");
    await navigator.clipboard.writeText(location.href);
  }, "The link is copied."),
);
byId("file").addEventListener("click", (event) => keeping(event.target, async () => saveFile(await keptView()), "The file is saved."));
byId("png").addEventListener("click", (event) => keeping(event.target, () => savePicture(view, byId("model").textContent, answers), "The picture is saved."));
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // what is behind # is the view
  byId("view").focus();
  byId("view").scrollIntoView();
});
addEventListener("hashchange", () => {
  take(location.hash);
  begin();
});
addEventListener("pagehide", () => Object.keys(waiting).forEach(forget));

take(location.hash);
begin();
