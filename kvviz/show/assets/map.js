// A byte map that lives: it reads views (shape, stride, offset) and works out who owns and who writes any byte of a
// storage of any size. What it says about a byte is what kvviz.show.words.describe says. No ids, no globals, no network.
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

  // ---- geometry ----------------------------------------------------------------------------------------------

  // A view as it is visited: axes by step, the longest first; a trailing axis named "byte" runs inside a cell.
  function prepared(given, forms) {
    const v = { ...forms[given.form], ...given };
    const inner = v.axes.length && v.axes[v.axes.length - 1] === "byte" ? 1 : 0;
    const outer = v.shape.length - inner;
    let cell = 1, width = v.itemsize, low = v.offset, number = 0;
    const dims = [];
    for (let a = v.shape.length - 1; a >= 0; a--) {
      const size = v.shape[a], step = v.stride[a], weight = a < outer ? cell : 0;
      if (a < outer) cell *= Math.max(size, 1);
      if (a >= outer && step === width) { width *= size; continue; }
      if (step === 0) { number += (size - 1) * weight; continue; }
      if (step < 0) { low += step * (size - 1); number += (size - 1) * weight; }
      dims.push([Math.abs(step), size, step < 0 ? -weight : weight]);
    }
    dims.sort((p, q) => q[0] - p[0]);
    const reach = [0];
    for (let k = dims.length - 1; k >= 0; k--) reach.unshift(reach[0] + dims[k][0] * (dims[k][1] - 1));
    const empty = v.shape.some((size) => size === 0);
    const key = "layer" in v ? v.layer : v.name;
    return Object.assign(v, { outer, inner, width, low, number, dims, reach, empty, key });
  }

  // Calls visit(first byte, cell number) for every stretch of the view that reaches into [a, b).
  function visit(v, a, b, call, k = 0, at = v.low, number = v.number) {
    if (v.empty) return;
    if (k === v.dims.length) { if (at < b && at + v.width > a) call(at, number); return; }
    const [step, size, weight] = v.dims[k];
    const first = Math.max(0, Math.floor((a - v.width - v.reach[k + 1] - at) / step) + 1);
    const stop = Math.min(size, Math.ceil((b - at) / step));
    for (let i = first; i < stop; i++) visit(v, a, b, call, k + 1, at + i * step, number + i * weight);
  }

  function indexOf(v, number) {
    const index = [];
    for (let a = v.outer - 1; a >= 0; a--) { index.unshift(number % v.shape[a]); number = Math.floor(number / v.shape[a]); }
    return index;
  }

  function startOf(v, index) { return index.reduce((at, i, a) => at + i * v.stride[a], v.offset); }
  function sizeOf(v) { return v.itemsize * (v.inner ? v.shape[v.outer] : 1); }

  function partText(part) {
    const where = part.index.map((i, a) => `${part.view.axes[a] || "axis " + a} ${i}`).join(", ");
    return `${part.view.name} [${where}]`;
  }

  function same(p, q) { return !!p && !!q && p.view.name === q.view.name && p.number === q.number; }

  function partsAt(views, byte) {
    const found = [];
    for (const view of views) {
      let number = -1;
      visit(view, byte, byte + 1, (_, n) => { number = Math.max(number, n); });
      if (number >= 0) found.push({ view, number, index: indexOf(view, number) });
    }
    return found;
  }

  // Who owns and who writes each byte of [a, b): the states, and the owner's and first writer's numbers.
  function paint(map, a, b) {
    const n = b - a;
    const count = new Uint8Array(n), last = new Int16Array(n).fill(-1), right = new Uint8Array(n);
    const writer = new Int16Array(n).fill(-1), writerCell = new Float64Array(n);
    const owner = new Int16Array(n).fill(-1), ownerCell = new Float64Array(n);
    map.writers.forEach((view, w) => visit(view, a, b, (at, cell) => {
      for (let i = Math.max(at - a, 0), end = Math.min(at + view.width - a, n); i < end; i++) {
        if (last[i] === w) { if (writer[i] === w && cell > writerCell[i]) writerCell[i] = cell; continue; }
        last[i] = w;
        if (count[i] < 255) count[i]++;
        if (writer[i] < 0) { writer[i] = w; writerCell[i] = cell; }
      }
    }));
    map.owners.forEach((view, o) => visit(view, a, b, (at, cell) => {
      const data = view.role === "data";
      for (let i = Math.max(at - a, 0), end = Math.min(at + view.width - a, n); i < end; i++) {
        const now = owner[i];
        if (now < 0 || (data && map.owners[now].role !== "data") || (now === o && cell > ownerCell[i])) {
          owner[i] = o;
          ownerCell[i] = cell;
        }
        if (count[i] === 1 && writerCell[i] === cell && map.writers[writer[i]].name === view.name) right[i] = 1;
      }
    }));
    const state = new Uint8Array(n);
    for (let i = 0; i < n; i++) {
      state[i] = count[i] > 1 ? CONTESTED : count[i] ? (right[i] ? RIGHT : MISPLACED) : owner[i] >= 0 ? UNREACHED : UNOWNED;
    }
    map.beneath.forEach((view, k) => visit(view, a, b, (at, cell) => {
      for (let i = Math.max(at - a, 0), end = Math.min(at + view.width - a, n); i < end; i++) {
        if (state[i] === UNOWNED) { state[i] = RIGHT; owner[i] = map.owners.length + k; ownerCell[i] = cell; }
      }
    }));
    return { a, b, state, count, writer, writerCell, owner, ownerCell };
  }

  // ---- words: as kvviz.show.words.describe ---------------------------------------------------------------------

  function runAt(map, byte) {
    const owners = partsAt(map.owners, byte), writers = partsAt(map.writers, byte);
    const owner = owners.find((part) => part.view.role === "data") || owners[0] || null;
    if (!owner && !writers.length) {
      const under = partsAt(map.beneath, byte).slice(0, 1);
      if (under.length) return { owner: under[0], writers: under, state: RIGHT };
    }
    let state = owner ? UNREACHED : UNOWNED;
    if (writers.length > 1) state = CONTESTED;
    else if (writers.length) state = owners.some((part) => same(part, writers[0])) ? RIGHT : MISPLACED;
    return { owner, writers, state };
  }

  function describe(map, byte) {
    const run = runAt(map, byte), value = map.value(byte);
    const lines = [`byte ${byte} (0x${byte.toString(16)})` + (value === null ? "" : `: 0x${hex(value)} = ${value}`)];
    if (run.owner) {
      const at = startOf(run.owner.view, run.owner.index);
      lines.push(`${partText(run.owner)}, byte ${byte - at} of ${sizeOf(run.owner.view)}`);
    } else lines.push("padding: nobody's byte");
    const strangers = run.writers.filter((part) => !same(part, run.owner));
    if (run.state === UNREACHED) lines.push("nobody writes here");
    else if (run.state === CONTESTED || strangers.length) {
      const more = run.writers.length - DATA.most;
      const named = run.writers.slice(0, DATA.most).map(partText).join("; ") + (more > 0 ? `; and ${more} more` : "");
      lines.push(`${STATES[run.state]}: written by ${run.writers.length}: ${named}`);
    }
    const meaning = value === null ? "" : decoded(map, run, byte, value);
    return meaning ? [...lines, meaning] : lines;
  }

  function decoded(map, run, byte, value) {
    const part = run.owner, mode = map.mode;
    const writes = run.writers.some((writer) => same(writer, part));
    if (!mode || !part || (!writes && run.state !== CONTESTED) || !mode.endsWith("_per_token_head")) return "";
    const int4 = mode.startsWith("int4");
    if (part.view.role === "scale") {
      const scale = map.float(startOf(part.view, part.index));
      return scale ? `a scale: ${number(scale[0])}${int4 ? ", zero-point " + (scale[1] & 15) : ""}` : "";
    }
    const name = (part.view.name.endsWith(" data") ? part.view.name.slice(0, -5) : part.view.name) + " scale";
    const reads = map.writers.find((view) => view.name === name);
    if (part.view.role !== "data" || !reads) return "";
    const at = startOf(reads, part.index), scale = map.float(at);
    if (!scale) return `its scale is read at byte ${at}, whose value is not shown`;
    const zero = int4 ? scale[1] & 15 : 0;
    const codes = int4 ? [value & 15, value >> 4] : [mode.startsWith("int8") ? (value > 127 ? value - 256 : value) : e4m3(value)];
    const product = (c) => `${number(c)} x ${number(scale[0])} = ${number((c - zero) * scale[0])}`;
    const shift = int4 ? ` (codes less the zero-point ${zero}; rotated)` : "";
    return `code x scale at byte ${at}: ${codes.map(product).join(" and ")}${shift}`;
  }

  function e4m3(code) {
    const exponent = (code >> 3) & 15, mantissa = code & 7;
    if (exponent === 15 && mantissa === 7) return NaN;
    const size = exponent ? (8 + mantissa) * 2 ** (exponent - 10) : mantissa * 2 ** -9;
    return code >> 7 ? -size : size;
  }

  function number(x) {
    if (Number.isNaN(x)) return "nan";
    if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
    if (x === Math.trunc(x) && Math.abs(x) < 1e6) return String(Math.trunc(x) + 0);
    if (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6) return x.toFixed(6);
    return x.toExponential(5).replace("e+", "e");
  }

  function hex(value) { return value.toString(16).padStart(2, "0"); }

  // ---- colours -------------------------------------------------------------------------------------------------

  function rgb(text) {
    const probe = /^#(..)(..)(..)$/.exec(text.trim());
    if (probe) return probe.slice(1).map((part) => parseInt(part, 16));
    const three = /^#(.)(.)(.)$/.exec(text.trim());
    if (three) return three.slice(1).map((part) => parseInt(part + part, 16));
    const parts = text.match(/[\d.]+/g);
    return parts && parts.length > 2 ? parts.slice(0, 3).map(Number) : text.trim() === "black" ? [0, 0, 0] : [255, 255, 255];
  }
  function css(parts) { return `rgb(${parts.map(Math.round).join(",")})`; }
  function mix(colour, paper, share) { return colour.map((part, i) => share * part + (1 - share) * paper[i]); }
  function light([r, g, b]) {
    const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  }

  function theme() {
    const looks = getComputedStyle(root);
    const paper = rgb(looks.getPropertyValue("--jp-layout-color1") || "#ffffff");
    const ink = rgb(looks.color || "#1a1a1a");
    const hues = DATA.hues.map(rgb), cache = new Map();
    const owned = (hue, role, half) => {
      const key = `${hue} ${role} ${half}`;
      if (!cache.has(key)) {
        const colour = hues[hue % hues.length], share = role === "scale" ? 1 : half === "V" ? 0.3 : 0.55;
        cache.set(key, mix(colour, paper, share));
      }
      return cache.get(key);
    };
    const fixed = [null, rgb(DATA.red), rgb(DATA.orange), paper, mix([150, 150, 150], paper, 0.28)];
    return { paper, ink, owned, fixed, soft: mix(ink, paper, 0.6), on: (fill) => light(fill) < 0.2 ? "#fff" : "#1a1a1a" };
  }

  function hatch(context, kind, ratio) {
    const tile = element("canvas");
    tile.width = tile.height = Math.round(7 * ratio);
    const pen = tile.getContext("2d");
    pen.strokeStyle = kind === UNOWNED ? "rgba(128,128,128,.55)" : "rgba(20,20,20,.62)";
    pen.lineWidth = ratio;
    const s = tile.width;
    if (kind === UNOWNED) { pen.fillStyle = pen.strokeStyle; pen.fillRect(0, 0, ratio, ratio); }
    else {
      pen.beginPath();
      pen.moveTo(0, s); pen.lineTo(s, 0);
      if (kind === MISPLACED) { pen.moveTo(0, 0); pen.lineTo(s, s); }
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  // ---- one map -------------------------------------------------------------------------------------------------

  class ByteMap {
    constructor(data, node, group) {
      Object.assign(this, data);
      this.node = node; this.group = group;
      this.owners = data.owners.map((view) => prepared(view, data.forms));
      this.beneath = data.beneath.map((view) => prepared(view, data.forms));
      this.everybody = [...this.owners, ...this.beneath];
      this.writers = data.writers.map((view) => typeof view === "number" ? this.owners[view] : prepared(view, data.forms));
      this.frame = 0; this.planes = [data.values === null ? null : decode64(data.values)];
      for (const [, changes] of data.frames) this.planes.push(changed(this.planes[this.planes.length - 1], changes));
      this.anchor = this.start % this.row;
      this.firstRow = this.anchor ? -1 : 0;
      this.lastRow = Math.ceil((this.nbytes - this.anchor) / this.row) - 1;
      this.home = { zoom: 1, left: 0, top: Math.floor((this.start - this.anchor) / this.row) };
      this.look = { ...this.home };
      this.hover = this.twin = this.selected = null;
      this.lit = null;
      this.build();
    }

    value(byte) {
      const plane = this.planes[this.frame];
      return plane && byte >= this.start && byte < this.stop ? plane[byte - this.start] : null;
    }

    float(at) {
      const plane = this.planes[this.frame];
      if (!plane || at < this.start || at + 4 > this.stop) return null;
      const view = new DataView(plane.buffer, plane.byteOffset + at - this.start, 4);
      return [view.getFloat32(0, true), view.getUint32(0, true)];
    }

    build() {
      const stage = this.node.querySelector(".kvviz-stage"), image = stage.querySelector("img");
      this.stage = stage;
      this.canvas = element("canvas", "kvviz-live", { tabindex: "0", role: "application" });
      this.canvas.setAttribute("aria-label", `${image.alt} Arrow keys move byte by byte, plus and minus zoom, Escape lets go.`);
      this.tip = element("div", "kvviz-tip kvviz-live", { "aria-hidden": "true" });
      stage.append(this.canvas);
      if (this.strip.length) {
        this.band = element("canvas", "kvviz-strip kvviz-live", { "aria-hidden": "true" });
        stage.append(this.band);
        this.listenBand();
      }
      stage.append(this.tip);
      image.style.display = "none";
      this.said = element("div", "kvviz-said kvviz-live", { "aria-live": "polite" });
      this.node.append(this.bar(), this.said);
      this.legend();
      this.canvas.kvviz = { describe: (byte) => describe(this, byte), state: (byte) => STATES[runAt(this, byte).state],
        painted: (a, b) => Array.from(paint(this, a, b).state, (s) => STATES[s]), where: (byte) => this.where(byte),
        look: () => ({ ...this.look }), selected: () => this.selected, lit: () => this.lit };
      this.listen();
      this.say();
      new ResizeObserver(() => this.draw()).observe(stage);
    }

    bar() {
      const bar = element("div", "kvviz-bar kvviz-live");
      const button = (text, name, call) => {
        const made = element("button", "", { type: "button", "aria-label": name, title: name });
        made.textContent = text;
        on(made, "click", call);
        bar.append(made);
      };
      button("−", "zoom out", () => this.zoomBy(1 / 1.6));
      button("+", "zoom in", () => this.zoomBy(1.6));
      button("whole rows", "back to where it began", () => { this.look = { ...this.home }; this.share(); });
      const keys = [...new Map(this.owners.map((view) => [view.key, view])).values()];
      if (keys.length > 1) {
        const choice = element("select", "", { "aria-label": "light up" });
        choice.append(new Option("light up: everything", ""));
        keys.forEach((view) => choice.append(new Option(typeof view.key === "number" ? `layer ${view.key}` : view.key, String(view.hue))));
        on(choice, "change", () => this.light(choice.value === "" ? null : { hue: Number(choice.value) }));
        bar.append(choice);
        this.choice = choice;
      }
      const to = element("input", "", { type: "text", placeholder: "go to byte, 0x…", "aria-label": "go to byte" });
      on(to, "keydown", (event) => {
        const text = to.value.trim(), byte = Number(text);
        if (event.key !== "Enter" || !text) return;
        if (Number.isInteger(byte) && byte >= 0 && byte < this.nbytes) this.select(byte, true);
        else this.said.textContent = `${text} is no byte of this storage: 0 to ${this.nbytes - 1}`;
      });
      bar.append(to);
      if (this.frames.length) bar.append(this.frameBar());
      return bar;
    }

    frameBar() {
      const box = element("label", ""), slider = element("input", "", { type: "range", min: "0", max: String(this.frames.length), value: "0" });
      const name = element("span", "");
      const tell = () => { name.textContent = ` ${this.frame ? this.frames[this.frame - 1][0] : this.before}`; };
      slider.setAttribute("aria-label", "step through the writes");
      on(slider, "input", () => { this.frame = Number(slider.value); tell(); this.draw(); this.say(); if (this.hover !== null) this.fill(describe(this, this.hover)); });
      tell();
      box.append(slider, name);
      return box;
    }

    legend() {
      this.node.querySelectorAll(".kvviz-legend li").forEach((item) => {
        const what = item.dataset.kvviz, key = what.startsWith("hue ") ? { hues: Number(what.slice(4)) } : { state: STATES.indexOf(what) };
        const button = element("button", "", { type: "button", "aria-pressed": "false" });
        button.append(...item.childNodes);
        item.append(button);
        on(button, "click", () => this.light(button.getAttribute("aria-pressed") === "true" ? null : key, what));
      });
    }

    light(key, what) {
      for (const map of this.group) {
        map.lit = key;
        map.node.querySelectorAll(".kvviz-legend li").forEach((item) => item.firstChild.setAttribute("aria-pressed", String(!!key && item.dataset.kvviz === what)));
        if (map.choice) map.choice.value = key && "hue" in key ? String(key.hue) : "";
        map.draw();
      }
    }

    isLit(state, owner, writer) {
      if (!this.lit) return true;
      if ("state" in this.lit) return state === this.lit.state;
      const hues = [owner, writer].filter(Boolean).map((view) => view.hue);
      return "hue" in this.lit ? hues.includes(this.lit.hue)
        : state === RIGHT && owner && owner.hue % DATA.hues.length === this.lit.hues;
    }

    // Sizes of the drawing for the present width and zoom; all in CSS pixels.
    frameOf() {
      const width = this.stage.clientWidth, right = width >= 640 ? 118 : 6;
      const inner = Math.max(width - LEFT - right, 40), rows = Math.min(Math.ceil((this.stop - this.start + (this.start - this.anchor) % this.row) / this.row), this.lastRow - this.firstRow + 1);
      const base = Math.max(6, Math.min(18, Math.floor(420 / rows)));
      const height = Math.min(rows * base, 420);
      const rowHeight = Math.max(3, Math.min(24, base * this.look.zoom));
      const across = Math.max(1, this.look.zoom);
      const most = Math.max(1, Math.floor(MOST_BYTES / this.row));
      return { width, inner, height, rowHeight, px: (inner / this.row) * across, columns: this.row / across, rows: Math.min(Math.ceil(height / rowHeight), most) };
    }

    clamp() {
      const f = this.frameOf(), look = this.look;
      look.left = Math.max(0, Math.min(look.left, this.row - f.columns));
      look.top = Math.max(this.firstRow, Math.min(look.top, this.lastRow - Math.floor(f.height / f.rowHeight) + 1));
      look.top = Math.max(this.firstRow, Math.floor(look.top));
      return f;
    }

    rowStart(row) { return this.anchor + row * this.row; }

    window(f) {
      const a = Math.max(0, this.rowStart(this.look.top)), b = Math.min(this.nbytes, this.rowStart(this.look.top + f.rows));
      if (!this.painted || this.painted.a !== a || this.painted.b !== b) this.painted = paint(this, a, b);
      return this.painted;
    }

    where(byte) {
      const f = this.frameOf(), row = Math.floor((byte - this.anchor) / this.row);
      const x = LEFT + (byte - this.rowStart(row) - this.look.left + 0.5) * f.px;
      return { x, y: (row - this.look.top + 0.5) * f.rowHeight, shown: x >= LEFT && x < LEFT + f.inner && row >= this.look.top && (row - this.look.top + 0.5) * f.rowHeight < f.height };
    }

    byteAt(x, y) {
      const f = this.frameOf(), column = Math.floor((x - LEFT) / f.px + this.look.left);
      if (x < LEFT || x >= LEFT + f.inner || y < 0 || y >= f.height || column < 0 || column >= this.row) return null;
      const byte = this.rowStart(this.look.top + Math.floor(y / f.rowHeight)) + column;
      return byte >= 0 && byte < this.nbytes ? byte : null;
    }

    draw() {
      if (!this.stage.clientWidth) return;
      const f = this.clamp(), ratio = devicePixelRatio || 1, colours = theme();
      this.sheet = this.sheet || element("canvas");
      const context = sized(this.sheet, f.width, f.height + AXIS, ratio);
      const painted = this.window(f);
      const patterns = [null, hatch(context, CONTESTED, ratio), hatch(context, MISPLACED, ratio), null, hatch(context, UNOWNED, ratio)];
      context.font = "10px sans-serif";
      context.textBaseline = "middle";
      for (let row = 0; row < f.rows; row++) this.drawRow(context, f, painted, row, colours, patterns);
      this.drawAxis(context, f, colours);
      if (this.band) this.drawBand(f, ratio, colours);
      this.hint(f, colours);
    }

    // The drawn sheet, and over it what is pointed at.
    hint(f = this.frameOf(), colours = theme()) {
      if (!this.sheet || !this.stage.clientWidth) return;
      const context = sized(this.canvas, f.width, f.height + AXIS, devicePixelRatio || 1);
      context.drawImage(this.sheet, 0, 0, f.width, f.height + AXIS);
      context.font = "10px sans-serif";
      context.textBaseline = "middle";
      within(context, 0, f.width, f.height, () => this.drawPointers(context, f, colours));
    }

    drawRow(context, f, w, row, colours, patterns) {
      const start = this.rowStart(this.look.top + row), y = row * f.rowHeight, gap = f.rowHeight > 7 ? 1 : 0;
      if (start >= this.nbytes || y >= f.height) return;
      const first = Math.floor(this.look.left), last = Math.min(this.row, Math.ceil(this.look.left + f.columns));
      const bytes = f.px >= 17 && this.planes[this.frame];
      let from = null, at = -1;
      const homes = [new Set(), new Set()];
      const flush = (to) => {
        if (from !== null) this.drawRun(context, f, w, start, from, to, y, gap, colours, patterns, bytes);
        from = null;
      };
      const step = Math.max(1, Math.floor(1 / f.px));
      within(context, LEFT, f.inner, f.height, () => {
        for (let column = first; column < last; column += step) {
          let i = start + column - w.a;
          if (i < 0 || i >= w.state.length) { flush(column); at = -1; continue; }
          for (let j = i + 1; j < Math.min(i + step, w.state.length); j++) if (SEVERITY[w.state[j]] > SEVERITY[w.state[i]]) i = j;
          const alike = at >= 0 && w.state[i] === w.state[at] && w.owner[i] === w.owner[at] && w.count[i] === w.count[at]
            && w.ownerCell[i] === w.ownerCell[at] && w.writer[i] === w.writer[at];
          at = i;
          if (!alike) {
            flush(column); from = column;
            const view = this.everybody[w.owner[i]];
            if (view) {
              if (view.axes[0] === "block") homes[0].add(indexOf(view, w.ownerCell[i])[0]);
              if (typeof view.key === "number") homes[1].add(view.key);
            }
          }
        }
        flush(last);
      });
      if (y + f.rowHeight / 2 < f.height && row % Math.ceil(9 / f.rowHeight) === 0) {
        context.fillStyle = css(colours.soft);
        context.textAlign = "right";
        context.fillText("0x" + Math.max(start, 0).toString(16), LEFT - 5, y + f.rowHeight / 2);
        if (f.width >= 640) { context.textAlign = "left"; context.fillText(label(homes), LEFT + f.inner + 6, y + f.rowHeight / 2, 108); }
      }
    }

    drawRun(context, f, w, start, from, to, y, gap, colours, patterns, bytes) {
      let i = start + from - w.a;
      for (let j = i; j < Math.min(start + to - w.a, i + Math.ceil(1 / f.px)); j++) if (SEVERITY[w.state[j]] > SEVERITY[w.state[i]]) i = j;
      const state = w.state[i], owner = this.everybody[w.owner[i]], writer = this.writers[w.writer[i]];
      const fill = state === RIGHT ? colours.owned(owner.hue, owner.role, owner.half) : colours.fixed[state];
      const x = LEFT + (from - this.look.left) * f.px, wide = (to - from) * f.px, high = f.rowHeight - gap;
      const edge = wide > 5 ? 0.6 : 0;
      context.globalAlpha = this.isLit(state, owner, writer) ? 1 : 0.16;
      context.fillStyle = css(fill);
      context.fillRect(x, y, wide - edge, high);
      if (patterns[state]) { context.fillStyle = patterns[state]; context.fillRect(x, y, wide - edge, high); }
      if (state === UNREACHED && wide > 2) { context.strokeStyle = css(colours.soft); context.lineWidth = 0.8; context.strokeRect(x + 0.4, y + 0.4, wide - edge - 0.8, high - 0.8); }
      context.globalAlpha = 1;
      this.drawChanged(context, f, start, from, to, y, high, colours);
      context.fillStyle = colours.on(fill);
      context.textAlign = "center";
      if (bytes) {
        for (let column = from; column < to; column++) {
          const value = this.value(start + column), middle = (column - this.look.left + 0.5) * f.px;
          if (value !== null && f.rowHeight > 9 && middle > 7 && middle < f.inner - 7) context.fillText(hex(value), LEFT + middle, y + high / 2);
        }
      } else if (f.rowHeight >= 10) {
        const word = mark(state, owner, writer, w.count[i], wide);
        if (word) context.fillText(word, Math.max(x, LEFT) + Math.min(wide, f.inner) / 2, y + high / 2);
      }
    }

    drawChanged(context, f, start, from, to, y, high, colours) {
      if (!this.frame) return;
      const before = this.planes[this.frame - 1], now = this.planes[this.frame];
      context.fillStyle = css(colours.ink);
      for (let column = from; column < to; column++) {
        const i = start + column - this.start;
        if (i >= 0 && i < now.length && before[i] !== now[i]) {
          context.fillRect(LEFT + (column - this.look.left) * f.px, y + high - Math.max(2, high / 4), Math.max(f.px, 1), Math.max(2, high / 4));
        }
      }
    }

    drawAxis(context, f, colours) {
      context.fillStyle = css(colours.soft);
      context.textAlign = "center";
      const every = niceStep(f.columns / Math.max(2, Math.floor(f.inner / 70)));
      for (let column = Math.ceil(this.look.left / every) * every; column <= this.look.left + f.columns; column += every) {
        const x = LEFT + (column - this.look.left) * f.px;
        context.fillRect(x, f.height, 1, 3);
        context.fillText(String(column), Math.min(x, LEFT + f.inner - 6), f.height + 10);
      }
    }

    // Outlines of what is pointed at, and arrows from where writers belong to where they land.
    drawPointers(context, f, colours) {
      const arrows = [];
      if (this.finding) {
        const [landed, meant] = this.finding.places;
        if (this.finding.arrow && meant) arrows.push([meant[0], landed[0], "meant", "lands"]);
        else this.outline(context, f, landed[0], landed[1] - landed[0], colours, 2);
      }
      for (const byte of [this.selected, this.hover]) {
        if (byte === null) continue;
        const run = runAt(this, byte);
        const part = run.owner;
        if (part) this.outline(context, f, startOf(part.view, part.index), sizeOf(part.view), colours, byte === this.selected ? 2.4 : 1.2);
        for (const writer of run.writers.slice(0, 4)) {
          const home = this.owners.find((view) => view.name === writer.view.name);
          const landed = startOf(writer.view, writer.index), meant = home ? startOf(home, writer.index) : landed;
          if (meant !== landed) arrows.push([meant, landed, "", ""]);
        }
        this.outline(context, f, byte, 1, colours, 1);
      }
      if (this.twin !== null) this.outline(context, f, this.twin, 1, colours, 2.4);
      for (const [from, to, start, end] of arrows) this.arrow(context, f, from, to, start, end, colours);
    }

    outline(context, f, byte, size, colours, line) {
      for (let at = byte; at < byte + size;) {
        const row = Math.floor((at - this.anchor) / this.row), end = Math.min(byte + size, this.rowStart(row + 1));
        const x = LEFT + (at - this.rowStart(row) - this.look.left) * f.px, y = (row - this.look.top) * f.rowHeight;
        if (y > -f.rowHeight && y < f.height) {
          context.strokeStyle = css(colours.paper); context.lineWidth = line + 2;
          context.strokeRect(x, y, Math.max((end - at) * f.px, 2), f.rowHeight - 1);
          context.strokeStyle = css(colours.ink); context.lineWidth = line;
          context.strokeRect(x, y, Math.max((end - at) * f.px, 2), f.rowHeight - 1);
        }
        at = end;
      }
    }

    arrow(context, f, from, to, start, end, colours) {
      const point = (byte) => {
        const at = this.where(byte);
        return { x: Math.max(LEFT, Math.min(LEFT + f.inner, at.x)), y: Math.max(4, Math.min(f.height - 4, at.y)), shown: at.shown };
      };
      const a = point(from), b = point(to);
      if (!a.shown && !b.shown) return;
      const bend = Math.max(18, Math.abs(a.x - b.x) / 3), side = a.x + bend + 10 < LEFT + f.inner ? 1 : -1;
      const c = { x: a.x + side * bend, y: a.y }, d = { x: b.x + (a.x === b.x ? side : Math.sign(a.x - b.x)) * bend, y: b.y };
      for (const [colour, line] of [[colours.paper, 4.5], [colours.ink, 1.7]]) {
        context.strokeStyle = css(colour); context.lineWidth = line;
        context.beginPath(); context.moveTo(a.x, a.y); context.bezierCurveTo(c.x, c.y, d.x, d.y, b.x, b.y); context.stroke();
      }
      const angle = Math.atan2(b.y - d.y, b.x - d.x);
      context.fillStyle = css(colours.ink);
      context.beginPath(); context.moveTo(b.x, b.y);
      for (const turn of [2.7, -2.7]) context.lineTo(b.x + 9 * Math.cos(angle + turn), b.y + 9 * Math.sin(angle + turn));
      context.fill();
      for (const [at, text, gone] of [[a, start, " ↕"], [b, end, " ↕"]]) {
        if (!text) continue;
        const word = at.shown ? text : text + gone;
        const wide = context.measureText(word).width + 6, y = at.y, beside = at.x - wide - Math.max(8, f.px * 2 + 4);
        const x = beside >= LEFT ? beside : at.x + Math.max(8, f.px * 2 + 4);
        context.fillStyle = css(colours.paper); context.fillRect(x, y - 7, wide, 14);
        context.fillStyle = css(colours.ink); context.textAlign = "left"; context.fillText(word, x + 3, y);
      }
    }

    // The whole storage: above whose bytes, below how many are written for each one owned.
    drawBand(f, ratio, colours) {
      const context = sized(this.band, f.width, 26, ratio);
      const x = (byte) => LEFT + (byte / this.nbytes) * f.inner;
      this.strip.forEach(([owned, written, most], n) => {
        const [start, stop] = this.columnOf(n), hue = most < 0 ? -1 : this.owners[most >> 1].hue, shared = most >= 0 && most & 1;
        const a = Math.round(x(start) * ratio) / ratio, wide = Math.max(Math.round(x(stop) * ratio) / ratio - a, 1 / ratio);
        const colour = hue < 0 ? colours.fixed[UNOWNED] : colours.owned(hue, "data", "K");
        context.fillStyle = css(shared ? mix(colours.ink, colours.paper, 0.3) : colour);
        context.fillRect(a, 4, wide, 10);
        const share = owned ? written / owned : written ? 2 : 0;
        context.fillStyle = css(share > 1 ? rgb(DATA.red) : mix(colours.ink, colours.paper, 0.45));
        const high = Math.min(8, share > 1 ? 8 : 8 * share);
        context.fillRect(a, 24 - high, wide, high);
      });
      context.fillStyle = css(colours.soft); context.font = "10px sans-serif"; context.textAlign = "right"; context.textBaseline = "middle";
      context.fillText("owned", LEFT - 5, 9); context.fillText("written", LEFT - 5, 20);
      const a = x(Math.max(0, this.rowStart(this.look.top))), b = x(Math.min(this.nbytes, this.rowStart(this.look.top + Math.ceil(f.height / f.rowHeight))));
      context.strokeStyle = css(colours.ink); context.lineWidth = 2;
      context.strokeRect(a - 1, 1, Math.max(b - a + 2, 3), 24);
    }

    bandText(byte) {
      const n = this.strip.findIndex((_, column) => byte < this.columnOf(column)[1]);
      const [owned, written, most] = this.strip[n], [start, stop] = this.columnOf(n);
      return [`bytes [${start}, ${stop}) of ${this.nbytes}`, `${owned} owned, ${written} written`,
        most < 0 ? "nobody's" : `${most & 1 ? "shared; most: " : ""}${this.owners[most >> 1].name}`];
    }

    columnOf(n) {
      const edge = (k) => Number(BigInt(this.nbytes) * BigInt(k) / BigInt(this.strip.length));
      return [edge(n), edge(n + 1)];
    }

    // ---- hands ----

    listen() {
      const canvas = this.canvas;
      let down = null, moved = false, scrolled = -999, engaged = false;
      on(window, "wheel", () => { if (!engaged) scrolled = performance.now(); }, { passive: true, capture: true });
      on(canvas, "pointermove", (event) => {
        if (performance.now() - scrolled > 350) engaged = true;
        const [x, y] = spot(event, canvas);
        if (down && (Math.abs(x - down.x) > 4 || Math.abs(y - down.y) > 4)) moved = true;
        if (down && moved) {
          const f = this.frameOf();
          this.look.left = down.left - (x - down.x) / f.px;
          if (event.pointerType === "mouse") this.look.top = down.top - Math.round((y - down.y) / f.rowHeight);
          this.share();
          return;
        }
        this.point(this.byteAt(x, y), x, y);
      });
      on(canvas, "pointerdown", (event) => {
        const [x, y] = spot(event, canvas);
        down = { x, y, left: this.look.left, top: this.look.top };
        moved = false;
        if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
      });
      on(canvas, "pointerup", (event) => {
        const [x, y] = spot(event, canvas);
        if (down && !moved) {
          const byte = this.byteAt(x, y);
          if (byte !== null) this.select(byte);
          if (event.pointerType !== "mouse") this.point(byte, x, y);
        }
        down = null;
      });
      on(canvas, "pointercancel", () => { down = null; });
      on(canvas, "pointerleave", (event) => { engaged = false; if (event.pointerType === "mouse") this.point(null); });
      on(canvas, "wheel", (event) => {
        if (!engaged && !event.ctrlKey) return;  // a page that scrolls past goes on scrolling
        event.preventDefault();
        const [x, y] = spot(event, canvas);
        this.zoomBy(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 240), x, y);
        this.point(this.byteAt(x, y), x, y);
      }, { passive: false });
      on(this.node, "keydown", (event) => {  // what a control needs, Enter or an arrow, is not the notebook's
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.target === canvas) this.key(event);
        else if (!event.shiftKey) event.stopPropagation();
      });
      on(canvas, "blur", () => this.point(null));
    }

    key(event) {
      const f = this.frameOf(), page = Math.max(1, Math.floor(f.height / f.rowHeight) - 1) * this.row;
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.row, ArrowDown: this.row, PageUp: -page, PageDown: page };
      const now = this.selected === null ? Math.max(0, this.rowStart(this.look.top)) : this.selected;
      if (event.key in steps) this.select(this.selected === null ? now : Math.max(0, Math.min(this.nbytes - 1, now + steps[event.key])), true);
      else if (event.key === "Home") this.select(this.start, true);
      else if (event.key === "End") this.select(this.stop - 1, true);
      else if (event.key === "+" || event.key === "=") this.zoomBy(1.6);
      else if (event.key === "-") this.zoomBy(1 / 1.6);
      else if (event.key === "Escape") { this.select(null); this.light(null); }
      else return;
      event.preventDefault();
      event.stopPropagation();
    }

    point(byte, x = 0, y = 0) {
      for (const map of this.group) {
        const twin = map === this ? null : byte !== null && byte < map.nbytes ? byte : null;
        if (map.twin === twin && map !== this) continue;
        map.twin = twin;
        map.hover = map === this ? byte : null;
        map.hint();
        if (map !== this) {
          if (twin === null) map.tip.style.display = "none";
          else { const at = map.where(twin); map.showTip(describe(map, twin), at.x, at.y); }
        }
      }
      if (byte === null) this.tip.style.display = "none";
      else this.showTip(describe(this, byte), x, y);
    }

    fill(lines) {
      this.tip.replaceChildren(...lines.map((line, n) => {
        const row = element(n ? "div" : "b", "");
        row.textContent = line;
        return row;
      }));
    }

    showTip(lines, x, y) {
      const tip = this.tip;
      this.fill(lines);
      tip.style.display = "block";
      const wide = this.stage.clientWidth;
      tip.style.left = `${Math.max(0, Math.min(x + 14, wide - tip.offsetWidth - 2))}px`;
      tip.style.top = `${y + 18}px`;
    }

    listenBand() {
      const jump = (event) => {
        const [x] = spot(event, this.band), f = this.frameOf();
        const byte = Math.floor(Math.max(0, Math.min(0.999999, (x - LEFT) / f.inner)) * this.nbytes);
        if (event.buttons) {
          this.look.top = Math.floor((byte - this.anchor) / this.row) - Math.floor(f.height / f.rowHeight / 2);
          this.share();
        }
        this.showTip(this.bandText(byte), x, f.height + AXIS + 12);
      };
      on(this.band, "pointermove", jump);
      on(this.band, "pointerdown", jump);
      on(this.band, "pointerleave", () => { this.tip.style.display = "none"; });
    }

    zoomBy(factor, x = null, y = null) {
      const f = this.frameOf(), look = this.look, at = this.selected === null ? null : this.where(this.selected);
      if (x === null) { x = at && at.shown ? at.x : LEFT + f.inner / 2; y = at && at.shown ? at.y : f.height / 2; }
      const column = (x - LEFT) / f.px + look.left, row = Math.floor(y / f.rowHeight) + look.top;
      look.zoom = Math.max(0.2, Math.min(look.zoom * factor, Math.max(1, (this.row * 40) / f.inner)));
      const g = this.frameOf();
      look.left = column - (x - LEFT) / g.px;
      look.top = row - Math.floor(y / g.rowHeight);
      this.share();
    }

    select(byte, follow) {
      for (const map of this.group) { map.selected = byte < map.nbytes ? byte : null; map.say(); }
      if (follow) {
        const f = this.frameOf(), at = this.where(byte), row = Math.floor((byte - this.anchor) / this.row);
        if (!at.shown) {
          const rows = Math.floor(f.height / f.rowHeight), column = byte - this.rowStart(row);
          if (row < this.look.top || row >= this.look.top + rows) this.look.top = row - Math.floor(rows / 2);
          if (column < this.look.left || column >= this.look.left + f.columns - 1) this.look.left = column - f.columns / 2;
        }
      }
      this.share();
    }

    share() {
      this.clamp();
      for (const map of this.group) { if (map !== this) map.look = { ...this.look }; map.draw(); }
    }

    say() {
      this.said.textContent = this.selected === null
        ? "Point at a byte, tap one, or use the arrow keys; plus, minus and the wheel zoom." : describe(this, this.selected).join("\n");
    }
  }

  // ---- small things --------------------------------------------------------------------------------------------

  function on(node, name, call, options) { node.addEventListener(name, call, options); }

  function element(name, className, attributes = {}) {
    const made = document.createElement(name);
    if (className) made.className = className;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function sized(canvas, width, height, ratio) {
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = `${height}px`; }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  function within(context, x, width, height, call) {
    context.save();
    context.beginPath(); context.rect(x, 0, width, height); context.clip();
    call();
    context.restore();
  }

  function spot(event, canvas) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function niceStep(least) {
    for (let power = 1; ; power *= 10) for (const digit of [1, 2, 4, 5, 8]) if (digit * power >= least) return digit * power;
  }

  function label([blocks, layers]) {
    const span = (word, found) => {
      const all = [...found].sort((p, q) => p - q);
      return all.length > 1 ? `${word}s ${all[0]}–${all[all.length - 1]}` : all.length ? `${word} ${all[0]}` : "";
    };
    return [span("block", blocks), span("layer", layers)].filter(Boolean).join(" · ");
  }

  // What is written into a run, the longest word that fits: as the figures have it.
  function mark(state, owner, writer, count, wide) {
    const layer = (view) => view && typeof view.key === "number" ? `L${view.key}` : "";
    let words = [];
    if (state === CONTESTED) words = [`${count} writers`, String(count)];
    else if (state === MISPLACED) words = [writer.name, layer(writer) && layer(writer) !== layer(owner) ? layer(writer) : "!", "!"];
    else if (state === UNREACHED) words = ["nobody writes here"];
    else if (state === UNOWNED) words = ["padding"];
    else {
      const what = owner.role === "scale" ? ["scale", "s"] : owner.half ? [owner.half] : [owner.role];
      words = [...what.map((word) => `${layer(owner)} ${word}`.trim()), layer(owner), what[what.length - 1]];
    }
    return words.find((word) => word && word.length * 6 + 4 <= wide) || "";
  }

  function decode64(text) {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return bytes;
  }

  function changed(plane, changes) {
    const next = plane.slice();
    for (const [at, text] of changes) next.set(decode64(text), at);
    return next;
  }

  const linked = [], every = [];
  root.querySelectorAll(".kvviz-map").forEach((node, n) => {
    const group = DATA.linked ? linked : [];
    group.push(new ByteMap(DATA.maps[n], node, group));
    every.push(group[group.length - 1]);
  });
  const redraw = () => every.forEach((map) => map.draw());
  const themes = new MutationObserver(() => root.isConnected ? redraw() : themes.disconnect());
  for (const node of [document.documentElement, document.body]) {
    themes.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-theme", "class"] });
  }
  on(matchMedia("(prefers-color-scheme: dark)"), "change", redraw);
})();
