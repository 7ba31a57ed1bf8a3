// The picture: layers from bottom to top, tokens from left to right, a colour for each. One canvas, and for those who
// hear it a grid of which the active cell alone stands in the page.
import { css, element, inkOn, palette, visible } from "./colours.js";

const AXIS = 34;
const LABELS = 74;
const MOST_PIXELS = 16000;
const FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

let pictures = 0;

/** Where everything of a picture lies, in CSS pixels. */
export function laidOut(shown, room, density) {
  const columns = Math.max(1, shown.tokens.length);
  const wanted = shown.words ? 74 : Math.min(40, Math.max(13, (room - AXIS) / columns));
  const width = Math.max(2, Math.min(wanted, Math.floor(MOST_PIXELS / density / columns)));
  const height = shown.words ? 17 : Math.max(6, Math.min(18, Math.floor(420 / Math.max(1, shown.layers.length))));
  return { width, height, wide: Math.ceil(width * columns) + 44, high: height * shown.layers.length, labels: LABELS, axis: AXIS };
}

/** Draw the cells and the labels of their tokens. */
export function drawCells(context, shown, place, colours) {
  const { tokens, layers } = shown;
  layers.forEach((layer, row) => {
    const top = place.high - (row + 1) * place.height;
    tokens.forEach((token, column) => {
      const colour = shown.colour(row, column, colours);
      context.fillStyle = colour ? css(colour) : colours.nothing;
      const left = column * place.width;
      context.fillRect(left, top, Math.max(1, place.width - (place.width > 8 ? 1 : 0)), place.height - (place.height > 7 ? 1 : 0));
      const word = shown.words?.(row, column);
      if (word === undefined) return;
      context.font = `11px ${FONT}`;
      context.fillStyle = colour ? inkOn(colour) : colours.quiet;
      context.textBaseline = "middle";
      context.textAlign = "left";
      const text = visible(word);
      context.fillText(text.length > 10 ? `${text.slice(0, 9)}…` : text, left + 4, top + place.height / 2, place.width - 8);
    });
  });
  context.font = `11px ${FONT}`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(12 / place.width));
  tokens.forEach((token, column) => {
    if (column % every) return;
    const text = visible(token.text);
    context.save();
    context.translate(column * place.width + place.width / 2 - 2, place.high + 8);
    context.rotate(Math.PI / 3.2);
    context.fillStyle = token.generated ? colours.ink : colours.quiet;
    context.fillText(text.length > 9 ? `${text.slice(0, 8)}…` : text, 0, 0);
    context.restore();
  });
}

/** Draw the numbers of the layers. */
export function drawAxis(context, shown, place, colours) {
  context.font = `11px ${FONT}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = [1, 2, 5, 10, 20].find((step) => step * place.height >= 15) ?? 50;
  shown.layers.forEach((layer, row) => {
    if (layer % every && row !== shown.layers.length - 1) return;
    if (row === shown.layers.length - 1 && layer % every && every > 1) return;
    context.fillStyle = colours.quiet;
    context.fillText(String(layer), place.axis - 8, place.high - (row + 0.5) * place.height);
  });
}

function sized(canvas, wide, high) {
  const density = devicePixelRatio || 1;
  canvas.width = Math.ceil(wide * density);
  canvas.height = Math.ceil(high * density);
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${high}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  context.clearRect(0, 0, wide, high);
  return context;
}

export class Picture {
  constructor(root, chosen) {
    this.number = pictures++;
    this.chosen = chosen;
    this.shown = { tokens: [], layers: [], colour: () => null, said: () => "" };
    this.at = { row: 0, column: 0 };
    this.axis = element("canvas", { className: "axis", "aria-hidden": "true" });
    this.cells = element("canvas", { className: "cells", "aria-hidden": "true" });
    this.cell = element("div", { id: `cell-${this.number}`, role: "gridcell", className: "heard" });
    this.row = element("div", { role: "row", className: "heard" }, this.cell);
    this.grid = element("div", { className: "grid", role: "grid", tabIndex: 0, "aria-label": "Layers by tokens", "aria-describedby": "keys-of-grid", "aria-activedescendant": this.cell.id }, this.axis, this.cells, this.row);
    this.tip = element("div", { className: "tip", hidden: true, "aria-hidden": "true" });
    root.replaceChildren(this.grid, this.tip);
    this.grid.addEventListener("keydown", (event) => this.pressed(event));
    this.cells.addEventListener("pointerdown", (event) => this.pointed(event, true));
    this.cells.addEventListener("pointermove", (event) => this.pointed(event, false));
    this.cells.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.width = 0;
    new ResizeObserver(([entry]) => {
      if (Math.abs(entry.contentRect.width - this.width) < 1) return;
      this.draw();
    }).observe(this.grid);
  }

  show(shown) {
    this.shown = shown;
    this.grid.setAttribute("aria-label", shown.label);
    this.grid.setAttribute("aria-rowcount", shown.layers.length);
    this.grid.setAttribute("aria-colcount", shown.tokens.length);
    this.draw();
  }

  select(row, column, seen = true) {
    this.at = { row, column };
    this.row.setAttribute("aria-rowindex", this.shown.layers.length - row);
    this.cell.setAttribute("aria-colindex", column + 1);
    this.cell.textContent = this.shown.said(row, column);
    this.draw();
    if (!seen || !this.place) return;
    const left = column * this.place.width;
    const room = this.grid.clientWidth - AXIS;
    if (left < this.grid.scrollLeft) this.grid.scrollLeft = left;
    else if (left + this.place.width > this.grid.scrollLeft + room) this.grid.scrollLeft = left + this.place.width - room;
  }

  draw() {
    this.width = this.grid.clientWidth;
    if (!this.width || !this.shown.tokens.length) return;
    const colours = palette();
    this.place = laidOut(this.shown, this.width - 46, devicePixelRatio || 1);
    const { wide, high, labels, width, height } = this.place;
    drawAxis(sized(this.axis, AXIS, high + labels), this.shown, this.place, colours);
    const context = sized(this.cells, wide, high + labels);
    drawCells(context, this.shown, this.place, colours);
    const left = this.at.column * width;
    const top = high - (this.at.row + 1) * height;
    context.lineWidth = 2;
    context.strokeStyle = colours.mark;
    context.strokeRect(left - 0.5, top - 0.5, Math.max(3, width), Math.max(3, height));
  }

  pointed(event, down) {
    const { tokens, layers } = this.shown;
    if (!this.place) return;
    const column = Math.floor(event.offsetX / this.place.width);
    const row = Math.floor((this.place.high - event.offsetY) / this.place.height);
    if (column < 0 || column >= tokens.length || row >= layers.length || row < 0) {
      this.tip.hidden = true;
      return;
    }
    if (down) this.chosen(row, column);
    if (event.pointerType === "touch") return;
    this.tip.textContent = this.shown.said(row, column);
    this.tip.hidden = false;
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    this.tip.style.top = `${Math.max(4, event.clientY - height - 12)}px`;
  }

  pressed(event) {
    const { tokens, layers } = this.shown;
    const { row, column } = this.at;
    const last = { row: layers.length - 1, column: tokens.length - 1 };
    const to = {
      ArrowUp: [row + 1, column],
      ArrowDown: [row - 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      PageUp: [row + 5, column],
      PageDown: [row - 5, column],
      Home: [event.ctrlKey ? last.row : row, 0],
      End: [event.ctrlKey ? 0 : row, last.column],
    }[event.key];
    if (!to || event.altKey || event.metaKey || !tokens.length) return;
    event.preventDefault();
    const within = (value, most) => Math.min(most, Math.max(0, value));
    this.chosen(within(to[0], last.row), within(to[1], last.column));
  }
}
