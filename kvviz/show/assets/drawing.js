// Draws one map: rows, outlines and arrows, and the strip of the whole storage.
  // In this file, `f` is the result of sizes(), and `w` is the result of paint() for the visible bytes.
  // Heights in CSS pixels: largest height of a map, largest and smallest height of a row, and height of the strip.
  const MOST_HEIGHT = 420, MOST_ROW = 24, LEAST_ROW = 3, STRIP = 26;
  // A map of at least WIDE CSS pixels has room for the labels of rows. The labels then take ROW_LABEL CSS pixels.
  const WIDE = 640, ROW_LABEL = 118;
  // Largest width of a byte, and smallest width at which a byte shows its value, in CSS pixels.
  const WIDEST_BYTE = 40, VALUE_WIDTH = 17;
  // Limit of the arrows that are drawn for one byte.
  const MOST_ARROWS = 12;

  // Return the byte of [i, stop) that has the most severe state.
  function worst(painted, i, stop) {
    for (let j = i + 1; j < stop; j++) if (SEVERITY[painted.state[j]] > SEVERITY[painted.state[i]]) i = j;
    return i;
  }

  class Drawing {
    // Return the sizes of the drawing for the present width and zoom. Lengths are in CSS pixels.
    sizes() {
      const width = this.stage.clientWidth, right = width >= WIDE ? ROW_LABEL : 6;
      const inner = Math.max(width - LEFT - right, 40);
      const shown = Math.ceil((this.stop - this.start + (this.start - this.anchor) % this.row) / this.row);
      const rows = Math.min(shown, this.lastRow - this.firstRow + 1);
      const base = Math.max(6, Math.min(18, Math.floor(MOST_HEIGHT / rows)));
      const height = Math.min(rows * base, MOST_HEIGHT);
      const rowHeight = Math.max(LEAST_ROW, Math.min(MOST_ROW, base * this.look.zoom));
      const across = Math.max(1, Math.min(this.look.zoom, this.row * WIDEST_BYTE / inner));
      const most = Math.max(1, Math.floor(MOST_BYTES / this.row));
      const px = (inner / this.row) * across, columns = this.row / across;
      return { width, inner, height, rowHeight, base, px, columns, rows: Math.min(Math.ceil(height / rowHeight), most) };
    }

    // Move the visible part back into the storage, if it lies outside, and return the sizes.
    clamp() {
      const f = this.sizes(), look = this.look;
      look.left = Math.max(0, Math.min(look.left, this.row - f.columns));
      look.top = Math.max(this.firstRow, Math.min(look.top, this.lastRow - Math.floor(f.height / f.rowHeight) + 1));
      look.top = Math.max(this.firstRow, Math.floor(look.top));
      return f;
    }

    // Return the first byte of a row. Row 0 begins at byte `anchor`.
    rowStart(row) { return this.anchor + row * this.row; }

    // Return the result of paint() for the visible rows.
    window(f) {
      const a = Math.max(0, this.rowStart(this.look.top)), b = Math.min(this.nbytes, this.rowStart(this.look.top + f.rows));
      if (!this.painted || this.painted.a !== a || this.painted.b !== b) this.painted = paint(this, a, b);
      return this.painted;
    }

    // Return the middle of a byte on the canvas, and whether it is visible.
    where(byte) {
      const f = this.sizes(), row = Math.floor((byte - this.anchor) / this.row);
      const x = LEFT + (byte - this.rowStart(row) - this.look.left + 0.5) * f.px;
      const y = (row - this.look.top + 0.5) * f.rowHeight;
      return { x, y, shown: x >= LEFT && x < LEFT + f.inner && row >= this.look.top && y < f.height };
    }

    // Return the byte at a place of the canvas, or null.
    byteAt(x, y) {
      const f = this.sizes(), column = Math.floor((x - LEFT) / f.px + this.look.left);
      if (x < LEFT || x >= LEFT + f.inner || y < 0 || y >= f.height || column < 0 || column >= this.row) return null;
      const byte = this.rowStart(this.look.top + Math.floor(y / f.rowHeight)) + column;
      return byte >= 0 && byte < this.nbytes ? byte : null;
    }

    // Draw rows and axis on an invisible canvas, the sheet, and copy the sheet to the canvas. Draw the strip.
    draw() {
      if (!this.stage.clientWidth) return;
      const f = this.clamp(), ratio = devicePixelRatio || 1, colours = theme();
      this.sheet = this.sheet || element("canvas");
      const context = sized(this.sheet, f.width, f.height + AXIS, ratio);
      const painted = this.window(f);
      this.touched = this.lit && !("state" in this.lit) ? this.touchedBy(painted) : null;
      const patterns = DATA.states.map((state) => pattern(context, state.hatch, ratio));
      context.font = "10px sans-serif";
      context.textBaseline = "middle";
      for (let row = 0; row < f.rows; row++) this.drawRow(context, f, painted, row, colours, patterns);
      this.drawAxis(context, f, colours);
      if (this.stripCanvas) this.drawStrip(f, ratio, colours);
      this.drawOver(f, colours);
    }

    // Copy the drawn sheet to the canvas, and draw outlines and arrows over it.
    drawOver(f = this.sizes(), colours = theme()) {
      if (!this.sheet || !this.stage.clientWidth) return;
      const context = sized(this.canvas, f.width, f.height + AXIS, devicePixelRatio || 1);
      context.drawImage(this.sheet, 0, 0, f.width, f.height + AXIS);
      context.font = "10px sans-serif";
      context.textBaseline = "middle";
      within(context, LEFT - 2, f.inner + 4, f.height, () => this.drawPointers(context, f, colours));
    }

    // Draw one row. Neighbouring bytes with the same owner, writers and state are drawn as one rectangle.
    drawRow(context, f, w, row, colours, patterns) {
      const start = this.rowStart(this.look.top + row), y = row * f.rowHeight, gap = f.rowHeight > 7 ? 1 : 0;
      if (start >= this.nbytes || y >= f.height) return;
      const first = Math.floor(this.look.left), last = Math.min(this.row, Math.ceil(this.look.left + f.columns));
      const withValues = f.px >= VALUE_WIDTH && this.planes[this.frame];
      let from = null, at = -1;
      const blocksAndLayers = [new Set(), new Set()];
      const flush = (to) => {
        if (from !== null) this.drawStretch(context, f, w, start, from, to, y, gap, colours, patterns, withValues);
        from = null;
      };
      const step = Math.max(1, Math.floor(1 / f.px)), touched = this.touched;
      within(context, LEFT, f.inner, f.height, () => {
        for (let column = first; column < last; column += step) {
          let i = start + column - w.a;
          if (i < 0 || i >= w.state.length) { flush(column); at = -1; continue; }
          i = worst(w, i, Math.min(i + step, w.state.length));
          const alike = at >= 0 && w.state[i] === w.state[at] && w.owner[i] === w.owner[at] && w.count[i] === w.count[at]
            && w.ownerCell[i] === w.ownerCell[at] && w.writer[i] === w.writer[at] && (!touched || touched[i] === touched[at]);
          at = i;
          if (!alike) {
            flush(column); from = column;
            const view = this.everybody[w.owner[i]];
            if (view) {
              if (view.axes[0] === "block") blocksAndLayers[0].add(indexOf(view, w.ownerCell[i])[0]);
              if (typeof view.key === "number") blocksAndLayers[1].add(view.key);
            }
          }
        }
        flush(last);
      });
      if (y + f.rowHeight / 2 < f.height && row % Math.ceil(9 / f.rowHeight) === 0) {
        context.fillStyle = css(colours.soft);
        context.textAlign = "right";
        context.fillText("0x" + Math.max(start, 0).toString(16), LEFT - 5, y + f.rowHeight / 2);
        if (f.width >= WIDE) {
          context.textAlign = "left";
          context.fillText(label(blocksAndLayers), LEFT + f.inner + 6, y + f.rowHeight / 2, ROW_LABEL - 10);
        }
      }
    }

    // Draw the columns [from, to) of one row. Their bytes have the same owner, writers and state.
    drawStretch(context, f, w, start, from, to, y, gap, colours, patterns, withValues) {
      const first = start + from - w.a;
      const i = worst(w, first, Math.min(start + to - w.a, first + Math.ceil(1 / f.px)));
      const state = w.state[i], owner = this.everybody[w.owner[i]], writer = this.writers[w.writer[i]];
      const fill = colours.ofState[state] || colours.owned(owner.hue, owner.role, owner.half);
      const x = LEFT + (from - this.look.left) * f.px, wide = (to - from) * f.px, high = f.rowHeight - gap;
      const edge = wide > 5 ? 0.6 : 0;
      context.globalAlpha = this.isLit(state, owner, i) ? 1 : DIMMED;
      context.fillStyle = css(fill);
      context.fillRect(x, y, wide - edge, high);
      if (patterns[state]) { context.fillStyle = patterns[state]; context.fillRect(x, y, wide - edge, high); }
      if (state === UNREACHED && wide > 2) {
        context.strokeStyle = css(colours.soft); context.lineWidth = 0.8;
        context.strokeRect(x + 0.4, y + 0.4, wide - edge - 0.8, high - 0.8);
      }
      context.globalAlpha = 1;
      this.drawChanged(context, f, start, from, to, y, high, colours);
      context.fillStyle = colours.textOn(fill);
      context.textAlign = "center";
      if (withValues) {
        for (let column = from; column < to; column++) {
          const value = this.value(start + column), middle = (column - this.look.left + 0.5) * f.px;
          const fits = f.rowHeight > 9 && middle > 7 && middle < f.inner - 7;
          if (value !== null && fits) context.fillText(hex(value), LEFT + middle, y + high / 2);
        }
      } else if (f.rowHeight >= 10) {
        const text = mark(state, owner, writer, w.count[i], wide);
        if (text) context.fillText(text, Math.max(x, LEFT) + Math.min(wide, f.inner) / 2, y + high / 2);
      }
    }

    // Draw a bar under each byte that the last step changed.
    drawChanged(context, f, start, from, to, y, high, colours) {
      if (!this.frame) return;
      const before = this.planes[this.frame - 1], now = this.planes[this.frame];
      context.fillStyle = css(colours.ink);
      for (let column = from; column < to; column++) {
        const i = start + column - this.start;
        if (i >= 0 && i < now.length && before[i] !== now[i]) {
          const bar = Math.max(2, high / 4);
          context.fillRect(LEFT + (column - this.look.left) * f.px, y + high - bar, Math.max(f.px, 1), bar);
        }
      }
    }

    // Draw the numbers of the columns below the bytes.
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

    // Draw outlines around the bytes of the finding, the selected byte and the byte under the pointer. For each misplaced
    // writer, draw an arrow from the place where it belongs to the place where it writes.
    drawPointers(context, f, colours) {
      const arrows = [];
      if (this.finding) {
        const [actual, rightful] = this.finding.places;
        if (this.finding.arrow && rightful) arrows.push([rightful[0], actual[0], "belongs here", "lies here"]);
        else this.outline(context, f, actual[0], actual[1] - actual[0], colours, 2);
      }
      for (const byte of [this.selected, this.hover]) {
        if (byte === null) continue;
        const { owner, writers } = ownershipAt(this, byte), line = byte === this.selected ? 2.4 : 1.2;
        if (owner) this.outline(context, f, startOf(owner.view, owner.index), sizeOf(owner.view), colours, line);
        for (const writer of writers.slice(0, MOST_ARROWS)) {
          const own = this.owners.find((view) => view.who === writer.view.who);
          const actual = startOf(writer.view, writer.index), rightful = own ? startOf(own, writer.index) : actual;
          if (rightful !== actual) arrows.push([rightful, actual, "", ""]);
        }
        this.outline(context, f, byte, 1, colours, 1);
      }
      if (this.twin !== null) this.outline(context, f, this.twin, 1, colours, 2.4);
      for (const [from, to, start, end] of arrows) this.arrow(context, f, from, to, start, end, colours);
    }

    // Draw a frame around `size` bytes. If the bytes reach into several rows, draw one frame per row.
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

    // Draw an arrow between two bytes, with a word at each end. If one of the bytes is not visible, write the offset of
    // this byte instead.
    arrow(context, f, from, to, start, end, colours) {
      const point = (byte) => {
        const at = this.where(byte);
        return { x: Math.max(LEFT, Math.min(LEFT + f.inner, at.x)), y: Math.max(4, Math.min(f.height - 4, at.y)), shown: at.shown };
      };
      const a = point(from), b = point(to);
      if (!a.shown && !b.shown) return;
      if (!a.shown || !b.shown) {
        const here = a.shown ? a : b, [near, other] = a.shown ? [from, to] : [to, from];
        this.word(context, f, here, `${a.shown ? "lies" : "belongs"} at 0x${other.toString(16)} ${other > near ? "↓" : "↑"}`, colours);
        return;
      }
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
      if (start) this.word(context, f, a, start, colours);
      if (end) this.word(context, f, b, end, colours);
    }

    // Write a word next to a place.
    word(context, f, at, text, colours) {
      const wide = context.measureText(text).width + 6, away = Math.max(8, f.px * 2 + 4), beside = at.x - wide - away;
      const x = Math.min(beside >= LEFT ? beside : at.x + away, LEFT + f.inner - wide);
      context.fillStyle = css(colours.paper); context.fillRect(x, at.y - 7, wide, 14);
      context.fillStyle = css(colours.ink); context.textAlign = "left"; context.fillText(text, x + 3, at.y);
    }

    // Draw the strip of the whole storage. For each column, the upper bar shows the owner of most bytes. The lower bar is
    // high if many bytes are written.
    drawStrip(f, ratio, colours) {
      const context = sized(this.stripCanvas, f.width, STRIP, ratio);
      const x = (byte) => LEFT + (byte / this.nbytes) * f.inner;
      this.strip.forEach(([owned, written, most], n) => {
        const [start, stop] = this.columnOf(n), hue = most < 0 ? -1 : this.owners[most >> 1].hue, shared = most >= 0 && most & 1;
        const a = Math.round(x(start) * ratio) / ratio, wide = Math.max(Math.round(x(stop) * ratio) / ratio - a, 1 / ratio);
        const colour = hue < 0 ? colours.ofState[UNOWNED] : colours.owned(hue, "data", "K");
        context.fillStyle = css(shared ? mix(colours.ink, colours.paper, STRIP_SHARED) : colour);
        context.fillRect(a, 4, wide, 10);
        const share = owned ? written / owned : written ? 2 : 0;
        context.fillStyle = css(share > 1 ? colours.ofState[CONTESTED] : mix(colours.ink, colours.paper, STRIP_WRITTEN));
        const high = Math.min(8, share > 1 ? 8 : 8 * share);
        context.fillRect(a, 24 - high, wide, high);
      });
      context.fillStyle = css(colours.soft); context.font = "10px sans-serif"; context.textAlign = "right"; context.textBaseline = "middle";
      context.fillText("owned", LEFT - 5, 9); context.fillText("written", LEFT - 5, 20);
      const below = this.look.top + Math.ceil(f.height / f.rowHeight);
      const a = x(Math.max(0, this.rowStart(this.look.top))), b = x(Math.min(this.nbytes, this.rowStart(below)));
      context.strokeStyle = css(colours.ink); context.lineWidth = 2;
      context.strokeRect(a - 1, 1, Math.max(b - a + 2, 3), STRIP - 2);
    }

    // Return the tooltip of the column of the strip that holds this byte.
    stripText(byte) {
      const n = this.strip.findIndex((_, column) => byte < this.columnOf(column)[1]);
      const [owned, written, most] = this.strip[n], [start, stop] = this.columnOf(n);
      return [`bytes [${start}, ${stop}) of ${this.nbytes}`, `${owned} owned, ${written} written`,
        most < 0 ? "nobody owns any" : `${most & 1 ? "shared; most: " : ""}${this.owners[most >> 1].name}`];
    }

    columnOf(n) {
      const edge = (k) => Number(BigInt(this.nbytes) * BigInt(k) / BigInt(this.strip.length));
      return [edge(n), edge(n + 1)];
    }
  }
