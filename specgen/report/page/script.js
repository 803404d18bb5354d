"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const config = { displayModeBar: false, responsive: true };
const origins = { a: "accepted", c: "correction", b: "bonus", p: "plain" };

// A figure is kept in the light palette; its colours are swapped as it is drawn.
function coloured(value) {
  if (typeof value === "string") return dark.matches && data.dark[value] || value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
}

function draw(name) {
  const figure = coloured(data.figures[name]);
  return Plotly.react(name, figure.data, figure.layout, config);
}

function drawAll() {
  return Promise.all(Object.keys(data.figures).map(draw));
}

const text = document.getElementById("text");
const status = document.getElementById("token");
const [arm, prompt] = ["arm", "prompt"].map((name) => document.getElementById(name));

function described([piece, letter, overlap, round, place]) {
  const shown = overlap === null ? "nothing was drafted here" : `overlap ${overlap.toFixed(3)}`;
  const about = letter === "p" ? "" : `, ${shown}`;
  return `${JSON.stringify(piece)}: ${origins[letter]}${about}; round ${round}, token ${place}`;
}

function tokenElement(token, at) {
  const element = document.createElement("span");
  element.className = `t ${token[1]}${token[0].includes("\n") ? " newline" : ""}`;
  element.textContent = token[0];
  element.title = described(token);
  element.tabIndex = at ? -1 : 0; // one stop for the Tab key; the arrows do the rest
  element.setAttribute("role", "option");
  element.setAttribute("aria-selected", "false");
  element.setAttribute("aria-label", element.title);
  return element;
}

function showGeneration() {
  const view = data.views.find((v) => v.arm === arm.value && v.prompt === prompt.value);
  const traces = data.figures.timeline.data;
  const rounds = (view ? view.verify : []).map((_, at) => at + 1);
  ["draft", "verify", "other"].forEach((part, at) => {
    traces[at].x = rounds;
    traces[at].y = view ? view[part] : [];
  });
  document.getElementById("prompt-text").textContent = view ? view.text : "";
  text.replaceChildren(...(view ? view.tokens.map(tokenElement) : []));
  status.textContent = view ? "Hover, tap or focus a token for its overlap." : "This arm did not decode this prompt.";
  return draw("timeline");
}

function showToken(event) {
  if (event.target.title) status.textContent = event.target.title;
}

function move(event) {
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const tokens = [...text.children];
  const at = tokens.indexOf(event.target);
  const next = { Home: tokens[0], End: tokens.at(-1) }[event.key] ?? tokens[at + (steps[event.key] ?? NaN)];
  if (at < 0 || !next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

if (text) {
  arm.addEventListener("change", showGeneration);
  prompt.addEventListener("change", showGeneration);
  for (const kind of ["mouseover", "focusin", "click"]) text.addEventListener(kind, showToken);
  text.addEventListener("keydown", move);
  showGeneration();
}
dark.addEventListener("change", drawAll);
drawAll().then(() => { document.documentElement.dataset.drawn = "yes"; });
