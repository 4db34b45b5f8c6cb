// Computes the owner and the writers of any byte from the shapes, strides and offsets of the views.
  // Add to a view what `visit` needs: the axes, sorted by step with the longest step first, and the width of one cell in
  // bytes. If the last axis has the name "byte", it lies inside a cell. An axis with a negative step is walked from its
  // lowest address upwards.
  function prepared([name, form, offset, hue, who, layer, scale], forms) {
    const v = { ...forms[form], name, offset, hue, who, scale };
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
    const key = layer ?? name;
    const kind = `${v.role} ${v.axes.slice(0, outer)}`, cells = `${v.shape.slice(0, outer)}`;
    return Object.assign(v, { kind, cells, outer, inner, width, low, number, dims, reach, empty, key });
  }

  // Call `call(first byte, cell number)` for every cell that has bytes in [a, b). If the bytes of a cell are not adjacent,
  // call it for each piece of the cell. On each axis, only indices are visited from which the remaining axes can still
  // reach [a, b).
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

  // Return true if two cells have the same view name, the same axis names and the same indices.
  function agree(v, number, other, otherNumber) {
    return v.who === other.who && v.kind === other.kind
      && (v.cells === other.cells ? number === otherNumber : `${indexOf(v, number)}` === `${indexOf(other, otherNumber)}`);
  }
  function same(p, q) { return !!p && !!q && agree(p.view, p.number, q.view, q.number); }

  // For each view, return the cell that holds the byte. If several cells of a view hold the byte, return the cell with
  // the highest number. If no cell holds it, the view is left out.
  function partsAt(views, byte) {
    const found = [];
    for (const view of views) {
      let number = -1;
      visit(view, byte, byte + 1, (_, n) => { number = Math.max(number, n); });
      if (number >= 0) found.push({ view, number, index: indexOf(view, number) });
    }
    return found;
  }

  // Return arrays with one number for each byte of [a, b): state, count of writers, first writer and its cell, owner and
  // its cell. A writer or an owner is -1 if there is none.
  function paint(map, a, b) {
    const n = b - a;
    const count = new Uint16Array(n), last = new Int16Array(n).fill(-1), right = new Uint8Array(n);
    const writer = new Int16Array(n).fill(-1), writerCell = new Float64Array(n);
    const owner = new Int16Array(n).fill(-1), ownerCell = new Float64Array(n);
    map.writers.forEach((view, w) => visit(view, a, b, (at, cell) => {
      for (let i = Math.max(at - a, 0), end = Math.min(at + view.width - a, n); i < end; i++) {
        if (last[i] === w) { if (writer[i] === w && cell > writerCell[i]) writerCell[i] = cell; continue; }
        last[i] = w;
        count[i]++;
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
        if (count[i] === 1 && agree(view, cell, map.writers[writer[i]], writerCell[i])) right[i] = 1;
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
