// Numbers as colours: blue below nothing, orange above it, mixed in OKLab so that equal steps look equal.

const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const encoded = (part) => (part <= 0.0031308 ? part * 12.92 : 1.055 * part ** (1 / 2.4) - 0.055);

function labOf(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => linear(parseInt(hex.slice(at, at + 2), 16) / 255));
  const long = Math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue);
  const middle = Math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue);
  const short = Math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue);
  return [
    0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
    1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
    0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
  ];
}

function rgbOf([light, a, b]) {
  const long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const middle = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (light - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * middle + 1.707614701 * short,
  ].map((part) => Math.round(255 * encoded(Math.min(1, Math.max(0, part)))));
}

const mixed = (from, to, share) => rgbOf(from.map((part, at) => part + share * (to[at] - part)));

/** The colours of the page as it is now, dark or light. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const ends = { centre: labOf(named("centre")), below: labOf(named("below")), above: labOf(named("above")), full: labOf(named("full")) };
  return {
    ink: named("ink"),
    quiet: named("quiet"),
    line: named("line"),
    paper: named("paper"),
    mark: named("mark"),
    nothing: named("nothing"),
    /** Of a value with a sign, whose colour is full at `limit`: red, green and blue. */
    diverging: (value, limit) => mixed(ends.centre, value < 0 ? ends.below : ends.above, limit ? Math.min(1, Math.abs(value) / limit) : 0),
    /** Of a share from 0 to 1. */
    sequential: (share) => mixed(ends.centre, ends.full, Math.min(1, Math.max(0, share))),
  };
}

export const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** Black or white, whichever is read better on a colour. */
export function inkOn(rgb) {
  const [red, green, blue] = rgb.map((part) => linear(part / 255));
  const light = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  return (light + 0.05) / 0.05 > 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}

/** Where colours are full: the greatest value that is at most ten times the median, as the first token of most models
 * lies far beyond all others. */
export function limitOf(values) {
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort((one, other) => one - other);
  if (!sizes.length) return 1;
  const most = 10 * sizes[Math.floor(sizes.length / 2)];
  const near = sizes.filter((size) => size <= most);
  return near[near.length - 1] || sizes[sizes.length - 1] || 1;
}

/** A number as people read it. */
export function written(value, signed = true) {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e5) ? size.toExponential(1) : size >= 1000 ? size.toFixed(0) : size >= 10 ? size.toFixed(1) : size.toFixed(3);
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

/** A probability, in per cent. */
export const chanceOf = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

const SIGNS = { " ": "·", "\t": "⇥", "\r": "␍", "\n": "↵", "\u00a0": "⍽" };

/** A token's text with its white space seen. */
export const visible = (text) => [...text].map((letter) => SIGNS[letter] ?? letter).join("") || "∅";

/** An element with properties, attributes (their names with a dash, or role) and children. */
export function element(kind, properties = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role" || name === "for" || name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
