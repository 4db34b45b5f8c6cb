// Colours that follow the page, and small things for drawing.
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

  // Five digits of 85 hold four bytes: see kvviz.show.live_map.packed.
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;,=:?@^_`{|}~";
  function unpacked(text) {
    const size = text.length - Math.ceil(text.length / 5), bytes = new Uint8Array(size + 4);
    for (let i = 0, at = 0; i < text.length; i += 5, at += 4) {
      let value = 0;
      for (let k = i; k < i + 5; k++) value = value * 85 + (k < text.length ? DIGITS.indexOf(text[k]) : 84);
      for (let k = at + 3; k >= at; k--) { bytes[k] = value % 256; value = Math.floor(value / 256); }
    }
    return bytes.slice(0, size);
  }

  function changed(plane, changes) {
    const next = plane.slice();
    for (const [at, text] of changes) next.set(unpacked(text), at);
    return next;
  }
