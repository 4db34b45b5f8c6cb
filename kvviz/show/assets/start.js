// The script of the interactive map. It gets views (shape, stride, offset), and computes the owner and the writers of any
// byte. The storage may have any size. The tooltips have the same words as kvviz.show.describe.describe. The script uses
// no HTML ids, no global variables and no network. All files together are one function. Their order is: start, packing,
// views, describe, colours, canvas, drawing, map. kvviz.show.live_map joins the files and puts the data in.
(function () {
  const script = document.currentScript;
  const root = script && script.previousElementSibling;
  if (!root || !root.classList.contains("kvviz") || root.kvviz) return;
  root.kvviz = root.dataset.kvvizLive = "1";
  // If a browser saved this page, the page still contains nodes that the script added then. Remove these nodes.
  root.querySelectorAll(".kvviz-live").forEach((node) => node.remove());
  root.querySelectorAll("button").forEach((node) => node.replaceWith(...node.childNodes));
  const DATA = "@DATA@";
  const STATES = DATA.states.map((state) => state.name);
  const [RIGHT, CONTESTED, MISPLACED, UNREACHED, UNOWNED] =
    ["right", "contested", "misplaced", "unreached", "unowned"].map((name) => STATES.indexOf(name));
  const SEVERITY = DATA.states.map((state) => state.severity);
  // LEFT is the room left of the bytes for row offsets. AXIS is the room below the bytes for column numbers. Both are in
  // CSS pixels.
  const LEFT = 66, AXIS = 16;
  // Limit of the bytes that are computed at once. 2 MiB take about 0.1 s.
  const MOST_BYTES = 1 << 21;
