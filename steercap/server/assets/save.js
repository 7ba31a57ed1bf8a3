// A view kept: as a link, as a file that needs no server, as a picture.
import { css, element, inkOn, palette, visible } from "./colours.js";
import { drawAxis, drawCells, laidOut } from "./picture.js";

const FIELDS = ["mode", "text", "length", "model", "direction", "compare", "measure", "run", "layer", "token", "dose", "at"];

/** What a link says behind its #. */
export function fragmentOf(state) {
  const said = new URLSearchParams();
  for (const name of FIELDS) if (state[name] !== undefined && state[name] !== null && state[name] !== "") said.set(name, state[name]);
  return said.toString();
}

/** What a link's # asks for; numbers that are none are left out. */
export function stateOf(fragment) {
  const said = new URLSearchParams(fragment.replace(/^#/, ""));
  const found = {};
  for (const name of FIELDS) {
    const value = said.get(name);
    if (value === null) continue;
    const number = ["length", "layer", "token", "dose", "at"].includes(name);
    if (!number) found[name] = value;
    else if (value !== "" && Number.isFinite(Number(value))) found[name] = Number(value);
  }
  return found;
}

function handed(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const PARTS = ["colours.js", "picture.js", "view.js", "saved.js"];

/** A module as a part of one script: its imports are what stands before it. */
export const joined = (source) => source.replace(/^import\s[\s\S]*?;$/gm, "").replace(/^export /gm, "");

/** One file with all that is seen. */
export async function saveFile(kept) {
  const [style, ...scripts] = await Promise.all(["explorer.css", ...PARTS].map(async (name) => (await fetch(`explorer/${name}`)).text()));
  const data = JSON.stringify(kept).replaceAll("<", "\\u003c");
  const script = scripts.map(joined).join("\n");
  const policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";
  const page = [
    '<!doctype html><html lang="en"><head><meta charset="utf-8">',
    `<meta http-equiv="content-security-policy" content="${policy}">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">',
    `<title>steercap explorer</title><style>${style}</style></head><body class="saved">`,
    '<header><h1>steercap <span>explorer</span></h1><p id="model" class="model"></p></header>',
    '<main><div class="right"><section id="answers" class="answers" aria-label="Answers"></section><div id="view" class="view"></div></div></main>',
    `<script type="application/json" id="kept">${data}</script><script>"use strict";${script}</script></body></html>`,
  ].join("\n");
  handed(new Blob([page], { type: "text/html" }), "steercap-view.html");
}

/** The pictures of a view with the text above them, as they are on the page. */
export function savePicture(view, title, answers) {
  const colours = palette();
  const shown = [view.one, view.two].filter(({ part }) => !part.hidden);
  const places = shown.map(({ picture }) => laidOut(picture.shown, Math.max(640, picture.width - 46), 2));
  const wide = Math.max(640, ...places.map((place) => place.wide + place.axis)) + 32;
  const canvas = element("canvas");
  const font = "system-ui, sans-serif";
  const lines = textLines(canvas.getContext("2d"), view, wide - 32);
  const top = TEXT + lines.length * 24 + 14;
  const high = top + places.reduce((sum, place) => sum + place.high + place.labels + 30, 0) + 8;
  canvas.width = wide * 2;
  canvas.height = high * 2;
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = colours.paper;
  context.fillRect(0, 0, wide, high);
  context.fillStyle = colours.ink;
  context.font = `600 15px ${font}`;
  context.textBaseline = "middle";
  context.fillText(title, 16, 24);
  context.fillStyle = colours.quiet;
  context.font = `12px ${font}`;
  const steered = view.look === view.looks.steered ? `   (${answers.steered.title})` : "";
  context.fillText(view.textTitle.textContent + steered, 16, 46, wide - 32);
  drawText(context, view, lines, colours);
  let down = top;
  shown.forEach(({ title: heading, picture }, at) => {
    context.fillStyle = colours.quiet;
    context.font = `12px ${font}`;
    context.textAlign = "left";
    const legend = view.scale().marks.join("  ·  ");
    context.fillText(`${heading.textContent}   (${legend})`, 16, down + 8);
    context.save();
    context.translate(16, down + 22);
    drawAxis(context, picture.shown, places[at], colours);
    context.translate(places[at].axis, 0);
    drawCells(context, picture.shown, places[at], colours);
    context.restore();
    down += places[at].high + places[at].labels + 30;
  });
  return new Promise((done) => canvas.toBlob((blob) => (handed(blob, "steercap-view.png"), done()), "image/png"));
}

/** Where the text begins. */
const TEXT = 60;
const MONO = "13px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

function textLines(context, view, room) {
  context.font = MONO;
  const lines = [[]];
  let used = 0;
  view.look.tokens.forEach((token, column) => {
    const text = visible(token.text);
    const wide = context.measureText(text).width + 4;
    if (used + wide > room && used) {
      lines.push([]);
      used = 0;
    }
    lines.at(-1).push({ text, column, left: used, wide });
    used += wide;
  });
  return lines;
}

function drawText(context, view, lines, colours) {
  const names = [view.settings.direction];
  const value = view.values(names[0]);
  const scale = view.scale();
  const row = view.look.layers.indexOf(view.settings.layer);
  context.font = MONO;
  context.textAlign = "left";
  lines.forEach((line, at) => {
    for (const { text, column, left, wide } of line) {
      const found = value(row, column);
      const colour = found === undefined || found === null ? null : scale.colour(found, colours);
      context.fillStyle = colour ? css(colour) : colours.nothing;
      context.fillRect(16 + left, TEXT + at * 24, wide - 1, 20);
      context.fillStyle = colour ? inkOn(colour) : colours.ink;
      context.fillText(text, 18 + left, TEXT + 10 + at * 24);
    }
  });
}
