// A saved view, by itself: what it holds is in the page.
import { element } from "./colours.js";
import { View } from "./view.js";

const kept = JSON.parse(document.getElementById("kept").textContent);
document.getElementById("model").textContent = kept.model;
document.getElementById("answers").append(
  ...kept.answers.map(({ title, text }) => element("article", {}, element("h2", {}, title), element("p", { className: "answer" }, text.trimStart()))),
);
const view = new View(document.getElementById("view"), {});
for (const [run, look] of Object.entries(kept.looks)) view.put(run, look);
view.change(kept.settings);
