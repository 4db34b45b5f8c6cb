// The interactive map. It gets views (shape, stride, offset) and computes the owner and the writers of any byte of a
// storage of any size. Its tooltips have the same words as kvviz.show.describe.describe. It uses no ids, no global
// variables and no network. All files are one function, in this order: start, packing, views, describe, colours,
// canvas, drawing, map. kvviz.show.live_map puts the data in.
(function () {
  const script = document.currentScript;
  const root = script && script.previousElementSibling;
  if (!root || !root.classList.contains("kvviz") || root.kvviz) return;
  root.kvviz = root.dataset.kvvizLive = "1";
  // A page that a browser saved also has the nodes that this script added before. Remove them and start anew.
  root.querySelectorAll(".kvviz-live").forEach((node) => node.remove());
  root.querySelectorAll("button").forEach((node) => node.replaceWith(...node.childNodes));
  const DATA = "@DATA@";
  const STATES = DATA.states.map((state) => state.name);
  const [RIGHT, CONTESTED, MISPLACED, UNREACHED, UNOWNED] =
    ["right", "contested", "misplaced", "unreached", "unowned"].map((name) => STATES.indexOf(name));
  const SEVERITY = DATA.states.map((state) => state.severity);
  // CSS pixels left of the bytes (row offsets) and below the bytes (column numbers).
  const LEFT = 66, AXIS = 16;
  // Most bytes that are painted at once. 2 MiB take about 0.1 s.
  const MOST_BYTES = 1 << 21;
