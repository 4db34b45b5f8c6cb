// A byte map that lives: it reads views (shape, stride, offset) and works out who owns and who writes any byte of a
// storage of any size. What it says about a byte is what kvviz.show.describe.describe says. No ids, no globals, no network.
// One function, in parts: start, views, words, looks, drawing, map.
(function () {
  const script = document.currentScript;
  const root = script && script.previousElementSibling;
  if (!root || !root.classList.contains("kvviz") || root.kvviz) return;
  root.kvviz = root.dataset.kvvizLive = "1";
  // A page that a browser saved holds what an earlier run of this script had made.
  root.querySelectorAll(".kvviz-live").forEach((node) => node.remove());
  root.querySelectorAll("button").forEach((node) => node.replaceWith(...node.childNodes));
  const DATA = "@DATA@";
  const STATES = ["right", "contested", "misplaced", "unreached", "unowned"];
  const [RIGHT, CONTESTED, MISPLACED, UNREACHED, UNOWNED] = [0, 1, 2, 3, 4];
  const SEVERITY = [1, 4, 3, 2, 0];
  const LEFT = 66, AXIS = 16, MOST_BYTES = 1 << 21;
