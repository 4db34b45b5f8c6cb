// One interactive map: its state, its controls, and its reactions to mouse, keyboard and touch.
  const ZOOM_STEP = 1.6;
  const HELP = "Point at a byte, tap it, or use the arrow keys. To zoom, use plus and minus, two fingers, or the wheel with Ctrl. Dragging moves the map.";
  const STRIP_HELP = "The strip shows the whole storage. The upper bars show the owner of most bytes (grey: several layers). "
    + "The lower bars are red if more bytes are written than owned. Click the strip to move the map to a place.";
  class ByteMap extends Drawing {
    constructor(data, node, group) {
      super();
      Object.assign(this, data);
      this.node = node; this.group = group;
      this.owners = data.owners.map((view) => prepared(view, data.forms));
      this.beneath = data.beneath.map((view) => prepared(view, data.forms));
      this.everybody = [...this.owners, ...this.beneath];
      this.writers = data.writers.map((view) => typeof view === "number" ? this.owners[view] : prepared(view, data.forms));
      this.frame = 0; this.planes = [data.values === null ? null : unpacked(data.values)];
      for (const [, changes] of data.frames) this.planes.push(changed(this.planes[this.planes.length - 1], changes));
      this.anchor = this.start % this.row;
      this.firstRow = this.anchor ? -1 : 0;
      this.lastRow = Math.ceil((this.nbytes - this.anchor) / this.row) - 1;
      this.initialLook = { zoom: 1, left: 0, top: Math.floor((this.start - this.anchor) / this.row) };
      this.look = { ...this.initialLook };
      this.hover = this.twin = this.selected = null;
      this.lit = null;
      this.build();
    }

    // Return the value of a byte after the chosen step, or null if the value is not known.
    value(byte) {
      const plane = this.planes[this.frame];
      return plane && byte >= this.start && byte < this.stop ? plane[byte - this.start] : null;
    }

    // Return `size` bytes that begin at byte `at`, or null if some of these bytes are not known.
    bytesAt(at, size) {
      const plane = this.planes[this.frame];
      if (!plane || at < this.start || at + size > this.stop) return null;
      return new DataView(plane.buffer, plane.byteOffset + at - this.start, size);
    }

    // Add canvas, strip, controls, and the line that tells about the byte under the pointer or about the selected byte.
    build() {
      const stage = this.node.querySelector(".kvviz-stage"), image = stage.querySelector("img");
      this.stage = stage;
      this.canvas = element("canvas", "kvviz-live", { tabindex: "0", role: "application" });
      this.canvas.setAttribute("aria-label", `${image.alt} Arrow keys move byte by byte, plus and minus zoom, Escape ends the selection.`);
      this.tip = element("div", "kvviz-tip", { "aria-hidden": "true" });
      stage.append(this.canvas);
      if (this.strip.length) {
        this.stripCanvas = element("canvas", "kvviz-strip kvviz-live", { "aria-hidden": "true" });
        stage.append(this.stripCanvas);
        if (!root.querySelector(".kvviz-strip-help")) {  // once for all maps of the output
          const help = element("div", "kvviz-note kvviz-strip-help kvviz-live");
          help.textContent = STRIP_HELP;
          stage.append(help);
        }
        this.listenToStrip();
      }
      image.style.display = "none";
      this.summary = element("div", "kvviz-selected", { "aria-live": "polite" });
      const readout = element("div", "kvviz-readout kvviz-live");
      readout.append(this.summary, this.tip);
      stage.after(readout);
      this.node.append(this.bar());
      this.legend();
      // Functions for tests.
      this.canvas.kvviz = { describe: (byte) => describe(this, byte), state: (byte) => STATES[ownershipAt(this, byte).state],
        painted: (a, b) => Array.from(paint(this, a, b).state, (s) => STATES[s]), where: (byte) => this.where(byte),
        look: () => ({ ...this.look }), selected: () => this.selected, lit: () => this.lit };
      this.listen();
      this.showSelected();
      new ResizeObserver(() => this.draw()).observe(stage);
    }

    // Return the controls under a map.
    bar() {
      const bar = element("div", "kvviz-bar kvviz-live");
      const button = (text, name, call) => {
        const made = element("button", "", { type: "button", "aria-label": name, title: name });
        made.textContent = text;
        on(made, "click", call);
        bar.append(made);
      };
      button("−", "zoom out", () => this.zoomBy(1 / ZOOM_STEP));
      button("+", "zoom in", () => this.zoomBy(ZOOM_STEP));
      button("whole rows", "back to the first view", () => { this.look = { ...this.initialLook }; this.share(); });
      const keys = [...new Map(this.owners.map((view) => [view.key, view])).values()];
      if (keys.length > DATA.colours.hues.length) {  // then an entry of the legend stands for several layers
        const choice = element("select", "", { "aria-label": "highlight" });
        const name = (view) => typeof view.key === "number" ? `layer ${view.key}` : view.key;
        choice.append(new Option("highlight: everything", ""));
        keys.forEach((view) => choice.append(new Option(name(view), String(view.hue))));
        on(choice, "change", () => this.highlight(choice.value === "" ? null : { hue: Number(choice.value) }));
        bar.append(choice);
        this.choice = choice;
      }
      const to = element("input", "", { type: "text", placeholder: "go to byte, 0x…", "aria-label": "go to byte" });
      on(to, "keydown", (event) => {
        const text = to.value.trim(), byte = Number(text);
        if (event.key !== "Enter" || !text) return;
        if (Number.isInteger(byte) && byte >= 0 && byte < this.nbytes) this.select(byte, true);
        else this.summary.textContent = `${text} is not a byte of this storage: give a number from 0 to ${this.nbytes - 1}`;
      });
      bar.append(to);
      if (this.frames.length) bar.append(this.frameBar());
      return bar;
    }

    // Return the slider of a time lapse.
    frameBar() {
      const box = element("label", ""), name = element("span", "");
      const slider = element("input", "", { type: "range", min: "0", max: String(this.frames.length), value: "0" });
      slider.setAttribute("aria-label", "step through the writes");
      const showName = () => { name.textContent = ` ${this.frame ? this.frames[this.frame - 1][0] : "before"}`; };
      on(slider, "input", () => {
        this.frame = Number(slider.value);
        showName(); this.draw(); this.showSelected();
        if (this.hover !== null) this.fillTip(describe(this, this.hover));
      });
      showName();
      box.append(slider, name);
      return box;
    }

    // Turn the entries of the legend into buttons. A click on a button highlights the bytes of the entry.
    legend() {
      this.node.querySelectorAll(".kvviz-legend li").forEach((item) => {
        const what = item.dataset.kvviz;
        const hue = what.startsWith("hue ") ? Number(what.slice(4)) : null;
        const key = hue === null ? { state: STATES.indexOf(what) } : { hues: hue };
        const button = element("button", "", { type: "button", "aria-pressed": "false" });
        button.append(...item.childNodes);
        item.append(button);
        on(button, "click", () => this.highlight(button.getAttribute("aria-pressed") === "true" ? null : key, what));
      });
    }

    // Highlight the bytes of one state or hue, on all maps that share the zoom. All other bytes are dimmed. If `key` is
    // null, nothing is highlighted any more.
    highlight(key, what) {
      for (const map of this.group) {
        map.lit = key;
        map.node.querySelectorAll(".kvviz-legend li").forEach((item) =>
          item.firstChild.setAttribute("aria-pressed", String(!!key && item.dataset.kvviz === what)));
        if (map.choice) map.choice.value = key && "hue" in key ? String(key.hue) : "";
        if (map.choice && map.choice.selectedIndex < 0) map.choice.value = "";
        map.draw();
      }
    }

    isLit(state, owner, i) {
      if (!this.lit) return true;
      return "state" in this.lit ? state === this.lit.state : this.touched[i];
    }

    // Return an array with 1 for each byte of [a, b) that a highlighted view owns or writes, and 0 for all other bytes.
    touchedBy({ a, b }) {
      const marks = new Uint8Array(b - a), views = new Set([...this.everybody, ...this.writers]);
      const fill = (view) => (at) => marks.fill(1, Math.max(at - a, 0), Math.max(at + view.width - a, 0));
      const { hue, hues } = this.lit, chosen = (view) => hue === undefined ? view.hue % DATA.colours.hues.length === hues : view.hue === hue;
      views.forEach((view) => chosen(view) && visit(view, a, b, fill(view)));
      return marks;
    }

    listen() {
      const canvas = this.canvas;
      let down = null, moved = false;
      const fingers = new Map();  // the places of all fingers on the map
      const apart = () => { const [p, q] = [...fingers.values()]; return [Math.hypot(p[0] - q[0], p[1] - q[1]) || 1, (p[0] + q[0]) / 2, (p[1] + q[1]) / 2]; };
      on(canvas, "pointermove", (event) => {
        const [x, y] = spot(event, canvas);
        if (fingers.has(event.pointerId)) {
          const before = fingers.size === 2 ? apart()[0] : 0;
          fingers.set(event.pointerId, [x, y]);
          if (fingers.size === 2) { const [now, midX, midY] = apart(); moved = true; this.zoomBy(now / before, midX, midY); return; }
        }
        if (down && (Math.abs(x - down.x) > 4 || Math.abs(y - down.y) > 4)) moved = true;
        if (down && moved) {
          const f = this.sizes();
          this.look.left = down.left - (x - down.x) / f.px;
          if (event.pointerType === "mouse") this.look.top = down.top - Math.round((y - down.y) / f.rowHeight);
          this.share();
          return;
        }
        this.point(this.byteAt(x, y));
      });
      on(canvas, "pointerdown", (event) => {
        const [x, y] = spot(event, canvas);
        if (event.pointerType === "touch") fingers.set(event.pointerId, [x, y]);
        down = fingers.size > 1 ? null : { x, y, left: this.look.left, top: this.look.top };
        moved = fingers.size > 1;
        if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
      });
      on(canvas, "pointerup", (event) => {
        fingers.delete(event.pointerId);
        const [x, y] = spot(event, canvas);
        if (down && !moved) {
          const byte = this.byteAt(x, y);
          if (byte !== null) this.select(byte);
          if (event.pointerType !== "mouse") this.point(byte);
        }
        down = null;
      });
      on(canvas, "pointercancel", (event) => { fingers.delete(event.pointerId); down = null; });
      on(canvas, "pointerleave", (event) => { if (event.pointerType === "mouse") this.point(null); });
      // The wheel zooms with Ctrl, or after a click into the map. Otherwise it scrolls the page. At the limit of the zoom,
      // the page stays where it is, so that no gesture is half a zoom and half a scroll.
      on(canvas, "wheel", (event) => {
        if (!event.ctrlKey && document.activeElement !== canvas) return;
        event.preventDefault();
        const [x, y] = spot(event, canvas);
        this.zoomBy(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 240), x, y);
        this.point(this.byteAt(x, y));
      }, { passive: false });
      on(this.node, "keydown", (event) => {  // the notebook must not react to keys that a control uses
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.target === canvas) this.key(event);
        else if (!event.shiftKey) event.stopPropagation();
      });
      on(canvas, "blur", () => this.point(null));
    }

    key(event) {
      const f = this.sizes(), page = Math.max(1, Math.floor(f.height / f.rowHeight) - 1) * this.row;
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.row, ArrowDown: this.row, PageUp: -page, PageDown: page };
      const now = this.selected === null ? Math.max(0, this.rowStart(this.look.top)) : this.selected;
      const next = now + (this.selected === null ? 0 : steps[event.key]);
      if (event.key in steps) this.select(next >= 0 && next < this.nbytes ? next : now, true);
      else if (event.key === "Home") this.select(this.start, true);
      else if (event.key === "End") this.select(this.stop - 1, true);
      else if (event.key === "+" || event.key === "=") this.zoomBy(ZOOM_STEP);
      else if (event.key === "-") this.zoomBy(1 / ZOOM_STEP);
      else if (event.key === "Escape") { this.select(null); this.highlight(null); }
      else return;
      event.preventDefault();
      event.stopPropagation();
    }

    // Tell about the byte under the pointer, below this map and below the maps that share the pointer.
    point(byte) {
      for (const map of this.group) {
        const twin = map === this ? null : byte !== null && byte < map.nbytes ? byte : null;
        if (map.twin === twin && map !== this) continue;
        map.twin = twin;
        map.hover = map === this ? byte : null;
        map.drawOver();
        if (map !== this) {
          if (twin === null) map.tip.style.display = "none";
          else map.showTip(describe(map, twin));
        }
      }
      if (byte === null) this.tip.style.display = "none";
      else this.showTip(describe(this, byte));
    }

    fillTip(lines) {
      this.tip.replaceChildren(...lines.map((line, n) => {
        const row = element(n ? "div" : "b", "");
        row.textContent = line;
        return row;
      }));
    }

    showTip(lines) {
      this.fillTip(lines);
      this.tip.style.display = "block";
    }

    listenToStrip() {
      const jump = (event) => {
        const [x] = spot(event, this.stripCanvas), f = this.sizes();
        const byte = Math.floor(Math.max(0, Math.min(0.999999, (x - LEFT) / f.inner)) * this.nbytes);
        if (event.buttons) {
          this.look.top = Math.floor((byte - this.anchor) / this.row) - Math.floor(f.height / f.rowHeight / 2);
          this.share();
        }
        this.showTip(this.stripText(byte));
      };
      on(this.stripCanvas, "pointermove", jump);
      on(this.stripCanvas, "pointerdown", jump);
      on(this.stripCanvas, "pointerleave", () => { this.tip.style.display = "none"; });
    }

    // Zoom and keep a place of the canvas fixed. Without a place, keep the selected byte fixed if it is visible, and
    // otherwise the upper left corner.
    zoomBy(factor, x = null, y = null) {
      const f = this.sizes(), look = this.look, at = this.selected === null ? null : this.where(this.selected);
      if (x === null) { x = at && at.shown ? at.x : LEFT; y = at && at.shown ? at.y : 0; }
      const column = (x - LEFT) / f.px + look.left, row = Math.floor(y / f.rowHeight) + look.top;
      look.zoom = Math.max(0.2, Math.min(look.zoom * factor, Math.max(1, (this.row * WIDEST_BYTE) / f.inner, 20 / f.base)));
      const g = this.sizes();
      look.left = column - (x - LEFT) / g.px;
      look.top = row - Math.floor(y / g.rowHeight);
      this.share();
    }

    select(byte, follow) {
      for (const map of this.group) { map.selected = byte < map.nbytes ? byte : null; map.showSelected(); }
      if (follow) {
        const f = this.sizes(), at = this.where(byte), row = Math.floor((byte - this.anchor) / this.row);
        if (!at.shown) {
          const rows = Math.floor(f.height / f.rowHeight), column = byte - this.rowStart(row);
          if (row < this.look.top || row >= this.look.top + rows) this.look.top = row - Math.floor(rows / 2);
          if (column < this.look.left || column >= this.look.left + f.columns - 1) this.look.left = column - f.columns / 2;
        }
      }
      this.share();
    }

    // Give the zoom of this map to all maps that share it, and draw these maps.
    share() {
      this.clamp();
      for (const map of this.group) { if (map !== this) map.look = { ...this.look }; map.draw(); }
    }

    // Show the text of the selected byte below the map. A screen reader reads this text.
    showSelected() {
      const help = root.querySelector(".kvviz-map") === this.node ? HELP : "";  // once for all maps of the output
      this.summary.textContent = this.selected === null ? help : describe(this, this.selected).join("\n");
    }
  }

  // `gone` is aborted after the output was removed from the page. This removes the listeners outside the map.
  const gone = new AbortController();
  let away = 0;
  const windows = {}, every = [];
  root.querySelectorAll(".kvviz-map").forEach((node, n) => {
    const m = DATA.maps[n], group = windows[[m.start, m.stop, m.nbytes]] ??= [];  // maps with the same window share their zoom
    group.push(new ByteMap(m, node, group));
    every.push(group[group.length - 1]);
  });
  // JupyterLab hides its page while a theme changes. A hidden map cannot be drawn. So wait for the next animation frame.
  const redraw = () => requestAnimationFrame(() => every.forEach((map) => map.draw()));
  const themes = new MutationObserver(redraw);
  for (const node of [document.documentElement, document.body]) {
    themes.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-theme", "class"] });
  }
  on(matchMedia("(prefers-color-scheme: dark)"), "change", redraw, { signal: gone.signal });
  // A notebook may remove an output and put it back later. If 30 checks in 5 minutes do not find the output, stop.
  const watch = setInterval(() => {
    if (root.isConnected || ++away < 30) { away = root.isConnected ? 0 : away; return; }
    clearInterval(watch); gone.abort(); themes.disconnect();
  }, 10000);
})();
