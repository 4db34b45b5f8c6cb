// Small helpers for nodes, events and canvases, and for the texts on bytes and rows.
  function on(node, name, call, options) { node.addEventListener(name, call, options); }

  function element(name, className, attributes = {}) {
    const made = document.createElement(name);
    if (className) made.className = className;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // Give a canvas its size in CSS pixels, clear the canvas, and return its drawing context.
  function sized(canvas, width, height, ratio) {
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = `${height}px`; }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  // Let `call` draw, but only between the x coordinates x and x + width.
  function within(context, x, width, height, call) {
    context.save();
    context.beginPath(); context.rect(x, 0, width, height); context.clip();
    call();
    context.restore();
  }

  // Return the place of an event within a canvas, in CSS pixels.
  function spot(event, canvas) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function niceStep(least) {
    for (let power = 1; ; power *= 10) for (const digit of [1, 2, 4, 5, 8]) if (digit * power >= least) return digit * power;
  }

  // Return the label of a row, for example "block 1 · layer 0". kvviz.show.rows makes the same labels.
  function label([blocks, layers]) {
    const span = (word, found) => {
      const all = [...found].sort((p, q) => p - q);
      return all.length > 1 ? `${word}s ${all[0]}–${all[all.length - 1]}` : all.length ? `${word} ${all[0]}` : "";
    };
    return [span("block", blocks), span("layer", layers)].filter(Boolean).join(" · ");
  }

  // Return the longest text that fits on bytes that are together `wide` pixels wide. A letter is about 6 pixels wide.
  function mark(state, owner, writer, count, wide) {
    const layer = (view) => view && typeof view.key === "number" ? `L${view.key}` : "";
    let texts = DATA.states[state].marks.map((text) => text.replace("{n}", count));
    if (state === MISPLACED) texts = [writer.name, layer(writer) !== layer(owner) && layer(writer), ...texts];
    if (state === RIGHT) {
      const what = owner.role === "scale" ? ["scale", "s"] : owner.half ? [owner.half] : [owner.role];
      texts = [...what.map((word) => `${layer(owner)} ${word}`.trim()), layer(owner), what[what.length - 1]];
    }
    return texts.find((text) => text && text.length * 6 + 4 <= wide) || "";
  }
