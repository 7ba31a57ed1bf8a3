// What is seen of one answer: its text in colour, the picture of layers and tokens, and one cell of it in numbers.
// It asks nothing of a server itself, so a saved file shows the same.
import { chanceOf, css, element, inkOn, limitOf, palette, visible, written } from "./colours.js";
import { Picture } from "./picture.js";

export const MEASURES = {
  cosine: "Cosine with the direction",
  projection: "Length along the direction",
  norm: "Length of the row",
  next: "Next token (logit lens)",
};

/** The layer that is looked at first: three fifths up. */
export const firstLayer = (layers) => layers[Math.min(layers.length - 1, Math.round(layers.length * 0.6))];

export class View {
  /**
   * `source.lens(look, layers)` gets what layers say next, `source.features(look, layer)` what the SAE of a layer, one of
   * `source.saes` by layer, finds in its rows; `source.changed(settings)` hears what is chosen.
   */
  constructor(root, source) {
    this.source = source;
    this.looks = {};
    this.settings = { run: "plain", measure: "norm", direction: "", compare: "", layer: null, token: null };
    this.runs = element("div", { className: "choices", role: "radiogroup", "aria-label": "Which answer" });
    this.measures = element("select", { id: "measure" });
    this.measures.addEventListener("change", () => this.change({ measure: this.measures.value }));
    this.legend = element("div", { className: "legend" });
    this.text = element("div", { className: "tokens", role: "listbox", "aria-label": "Tokens", "aria-orientation": "horizontal" });
    this.text.addEventListener("keydown", (event) => this.walked(event));
    this.textTitle = element("h2", {});
    this.pictures = element("div", { className: "pictures" });
    this.one = this.#pictured();
    this.two = this.#pictured();
    this.cell = element("section", { className: "cell", "aria-label": "The chosen cell" });
    this.pictures.append(this.one.part, this.two.part);
    root.replaceChildren(
      element(
        "section",
        { className: "panel", "aria-label": "Text in colour" },
        element("div", { className: "bar" }, this.textTitle, this.runs, element("label", { className: "field", for: "measure" }, "Colour ", this.measures)),
        this.text,
        this.legend,
      ),
      element(
        "div",
        { className: "beside" },
        element(
          "section",
          { className: "panel", "aria-label": "Layers by tokens" },
          element("div", { className: "bar" }, element("h2", {}, "Layers × tokens"), element("p", { id: "keys-of-grid", className: "hint" }, "Click a cell, or walk with the arrow keys.")),
          this.pictures,
        ),
        this.cell,
      ),
    );
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  #pictured() {
    const title = element("h3", {});
    const place = element("div", { className: "picture" });
    const part = element("div", { hidden: true }, title, place);
    const picture = new Picture(place, (row, column) => this.change({ layer: this.look.layers[row], token: column }));
    return { title, part, picture };
  }

  get look() {
    return this.looks[this.settings.run] ?? this.looks.plain;
  }

  /** What one run of the model gave; a new plain one is a new question. */
  put(run, look) {
    this.looks[run] = look;
    this.change({});
  }

  drop(run) {
    delete this.looks[run];
    if (this.settings.run === run) this.settings.run = "plain";
    if (this.look) this.change({});
  }

  change(changed) {
    Object.assign(this.settings, changed);
    const { look, settings } = this;
    if (!look) return;
    if (!look.layers.includes(settings.layer)) settings.layer = firstLayer(look.layers);
    settings.token ??= Math.max(0, look.tokens.findIndex((token) => token.generated) - 1); // the last of the prompt
    settings.token = Math.min(Math.max(0, settings.token), Math.max(0, look.tokens.length - 1));
    this.draw();
    this.source.changed?.(settings, changed);
  }

  /** The measure that can be shown: without a direction, the two that need none. */
  get measure() {
    const { measure, direction } = this.settings;
    const along = measure === "cosine" || measure === "projection";
    return along && !this.look?.directions[direction] ? "norm" : measure;
  }

  /** What one direction, or none, makes of each cell. */
  values(name) {
    const { look, measure } = this;
    if (measure === "norm") return (row, column) => look.norms[row]?.[column];
    if (measure === "next") return (row, column) => look.lens[look.layers[row]]?.[column]?.[0]?.[1];
    const along = look.directions[name];
    const places = look.layers.map((layer) => along?.layers.indexOf(layer) ?? -1);
    return (row, column) => (places[row] < 0 ? undefined : along[measure][places[row]][column]);
  }

  all(name) {
    const value = this.values(name);
    return this.look.layers.flatMap((_, row) => this.look.tokens.map((_, column) => value(row, column)));
  }

  /** How values become colours: `{ colour(value, colours), from, to }`. */
  scale() {
    const { look, measure } = this;
    if (measure === "next") return { colour: (value, colours) => colours.sequential(value), marks: ["0", "probability", "1"], signed: false };
    if (measure === "norm") {
      const sizes = this.all("").filter((value) => value > 0);
      const from = Math.log(sizes.reduce((least, size) => Math.min(least, size), Infinity));
      const to = Math.max(Math.log(limitOf(sizes)), from + 1e-9);
      return {
        colour: (value, colours) => colours.sequential((Math.log(Math.max(value, 1e-30)) - from) / (to - from)),
        marks: [written(Math.exp(from), false), "length, log scale", `≥ ${written(Math.exp(to), false)}`],
        signed: false,
      };
    }
    const names = [this.settings.direction, this.settings.compare].filter((name) => look.directions[name]);
    const limit = limitOf(names.flatMap((name) => this.all(name)));
    return { colour: (value, colours) => colours.diverging(value, limit), marks: [written(-limit), "0", written(limit)], signed: true };
  }

  said(name, row, column) {
    const { look, measure } = this;
    const token = look.tokens[column];
    if (!token) return "";
    const where = `layer ${look.layers[row]}, token ${token.position} “${visible(token.text)}”`;
    const value = this.values(name)(row, column);
    if (measure === "next") {
      const best = look.lens[look.layers[row]]?.[column]?.[0];
      return best ? `${where}: next “${visible(best[0])}”, ${chanceOf(best[1])}` : `${where}: not asked yet`;
    }
    const what = { norm: "length", cosine: "cosine", projection: "along" }[measure];
    return `${where}: ${what} ${value === undefined ? "none at this layer" : written(value, measure !== "norm")}`;
  }

  draw() {
    const { look, settings, measure } = this;
    if (!look) return;
    this.#bars();
    const scale = this.scale();
    const row = look.layers.indexOf(settings.layer);
    const along = measure === "cosine" || measure === "projection";
    const names = along ? [settings.direction, settings.compare].filter((name) => look.directions[name]) : [""];
    [this.one, this.two].forEach(({ title, part, picture }, at) => {
      const name = names[at];
      part.hidden = name === undefined;
      if (name === undefined) return;
      const value = this.values(name);
      title.textContent = along ? `${MEASURES[measure].replace("the direction", `“${name}”`)}` : MEASURES[measure];
      picture.show({
        label: `${title.textContent}: layers by tokens`,
        tokens: look.tokens,
        layers: look.layers,
        colour: (line, column, colours) => {
          const found = value(line, column);
          return found === undefined || found === null ? null : scale.colour(found, colours);
        },
        words: measure === "next" ? (line, column) => look.lens[look.layers[line]]?.[column]?.[0]?.[0] : undefined,
        said: (line, column) => this.said(name, line, column),
      });
      picture.select(row, settings.token);
    });
    this.#text(names[0], scale, row);
    this.#legend(scale);
    this.#cell(row);
    this.#wanted(row);
  }

  #bars() {
    const runs = Object.keys(this.looks);
    if (this.runs.dataset.runs !== runs.join() || this.runs.dataset.run !== this.settings.run) {
      const had = this.runs.contains(document.activeElement);
      this.runs.dataset.runs = runs.join();
      this.runs.dataset.run = this.settings.run;
      this.runs.replaceChildren(
        ...(runs.length < 2 ? [] : runs.map((run) => {
          const choice = element("input", { type: "radio", name: "run", value: run, checked: run === this.settings.run });
          choice.addEventListener("change", () => this.change({ run }));
          return element("label", {}, choice, element("span", {}, run === "plain" ? "Plain" : "Steered"));
        })),
      );
      if (had) this.runs.querySelector("input:checked")?.focus();
    }
    const has = Boolean(this.look.directions[this.settings.direction]);
    const offered = Object.keys(MEASURES).filter((name) => has || name === "norm" || name === "next");
    if (this.measures.dataset.offered !== offered.join()) {
      this.measures.dataset.offered = offered.join();
      this.measures.replaceChildren(...offered.map((name) => element("option", { value: name }, MEASURES[name])));
    }
    this.measures.value = this.measure;
    this.textTitle.textContent = `Tokens at layer ${this.settings.layer}${this.look === this.looks.steered ? ", steered" : ""}`;
  }

  #text(name, scale, row) {
    const { look, settings } = this;
    const colours = palette();
    const value = this.values(name);
    const had = this.text.contains(document.activeElement);
    const parts = [];
    look.tokens.forEach((token, column) => {
      if (token.generated && !look.tokens[column - 1]?.generated) parts.push(element("span", { className: "begins", "aria-hidden": "true" }, "▸"));
      const found = value(row, column);
      const chosen = column === settings.token;
      const part = element("span", { className: `token${token.special ? " special" : ""}${token.generated ? " generated" : ""}`, role: "option", tabIndex: chosen ? 0 : -1, "aria-selected": chosen, "aria-label": this.said(name, row, column), title: this.said(name, row, column) }, token.special ? token.text : token.text.replaceAll("\n", "↵\n") || "∅");
      if (found !== undefined && found !== null) {
        const colour = scale.colour(found, colours);
        part.style.background = css(colour);
        part.style.color = inkOn(colour);
      }
      part.addEventListener("click", () => this.change({ token: column }));
      parts.push(part);
    });
    if (look.rest?.length) parts.push(element("span", { className: "rest", title: "It was the last to be generated; the model has not read it." }, look.rest.join("")));
    this.text.replaceChildren(...parts);
    if (had) this.text.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  }

  walked(event) {
    const to = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if ((!to && !up) || !this.look) return;
    event.preventDefault();
    const { layers, tokens } = this.look;
    const row = layers.indexOf(this.settings.layer) + (up ?? 0);
    const token = Math.min(tokens.length - 1, Math.max(0, this.settings.token + (to ?? 0)));
    this.change({ token, layer: layers[Math.min(layers.length - 1, Math.max(0, row))] });
  }

  #legend(scale) {
    const colours = palette();
    const steps = Array.from({ length: 21 }, (_, at) => at / 20);
    const strip = element("span", { className: "strip", "aria-hidden": "true" });
    strip.append(...steps.map((share) => {
      const part = element("i");
      part.style.background = css(scale.signed ? colours.diverging(2 * share - 1, 1) : colours.sequential(share));
      return part;
    }));
    const [low, middle, high] = scale.marks;
    this.legend.replaceChildren(strip, element("span", { className: "marks" }, element("b", {}, low), element("b", {}, middle), element("b", {}, high)));
  }

  #cell(row) {
    const { look, settings } = this;
    const token = look.tokens[settings.token];
    if (!token) return;
    const numbers = [["Length of the row", written(look.norms[row][settings.token], false)]];
    for (const name of [settings.direction, settings.compare]) {
      const along = look.directions[name];
      const at = along ? along.layers.indexOf(settings.layer) : -1;
      if (!along) continue;
      numbers.push([`Cosine with ${name}`, at < 0 ? "–" : written(along.cosine[at][settings.token])]);
      numbers.push([`Length along ${name}`, at < 0 ? "–" : written(along.projection[at][settings.token])]);
    }
    const { alike } = look;
    const shared = alike?.of?.join() === [settings.direction, settings.compare].join() ? alike.layers.indexOf(settings.layer) : -1;
    if (shared >= 0) numbers.push([`Cosine of ${settings.direction} with ${settings.compare}`, written(alike.cosine[shared])]);
    const said = look.lens[settings.layer]?.[settings.token];
    const next = element("ol", { className: "next" });
    next.append(...(said ?? []).map(([text, chance]) => {
      const bar = element("i", { "aria-hidden": "true" });
      bar.style.width = `${Math.max(0.5, 100 * chance)}%`;
      return element("li", {}, element("code", {}, visible(text)), element("span", { className: "chance" }, chanceOf(chance)), bar);
    }));
    this.cell.replaceChildren(
      element("h2", {}, element("code", {}, visible(token.text))),
      element("p", { className: "hint" }, `layer ${settings.layer} · token ${token.position} · id ${token.id}${token.generated ? " · generated" : ""}`),
      element("dl", {}, ...numbers.flatMap(([what, value]) => [element("dt", {}, what), element("dd", {}, value)])),
      element("h3", {}, "Says next, by the logit lens"),
      said ? next : element("p", { className: "hint waiting" }, "…"),
      ...this.#features(),
    );
  }

  /** The strongest features of the chosen row, where an SAE reads its layer. */
  #features() {
    const { look, settings } = this;
    const read = look.features?.[settings.layer];
    const sae = read?.sae ?? this.source.saes?.get(settings.layer);
    if (!sae) return [];
    const title = element("h3", {}, `Features, by ${sae}`);
    if (!read) return [title, element("p", { className: "hint waiting" }, "…")];
    const found = read.tokens[settings.token] ?? [];
    const list = element("ol", { className: "next features" });
    list.append(...found.map(([feature, value]) => {
      const bar = element("i", { "aria-hidden": "true" });
      bar.style.width = `${Math.max(0.5, (100 * value) / found[0][1])}%`;
      return element("li", {}, element("code", {}, `#${feature}`), element("span", { className: "chance" }, written(value, false)), bar);
    }));
    const active = Math.max(0, read.active[settings.token] ?? 0);
    return [title, list, element("p", { className: "hint" }, active > found.length ? `The ${found.length} strongest of ${active} that are active.` : `${active} active.`)];
  }

  /** Ask for what the chosen cell, or the lens, is to show and is not here. */
  #wanted(row) {
    const { look, measure } = this;
    if (look.asking || look.refused) return;
    const { layers } = look;
    const missing = (layer) => !look.lens[layer];
    const wanted = missing(layers[row]) ? [layers[row]] : measure === "next" ? layers.filter(missing).reverse().slice(0, 4) : [];
    const unread = this.source.saes?.has(layers[row]) && !look.features[layers[row]];
    let coming = null;
    if (this.source.lens && wanted.length) coming = this.source.lens(look, wanted).then((found) => Object.assign(look.lens, found));
    else if (unread) coming = this.source.features(look, layers[row]).then((found) => (look.features[layers[row]] = found));
    if (!coming) return;
    look.asking = true;
    coming
      .catch((error) => ((look.refused = true), this.source.failed?.(error)))
      .finally(() => {
        look.asking = false;
        if (this.look === look) this.draw();
      });
  }
}
