// Colours and hatches. They come from kvviz.show.colours and kvviz.show.states, as DATA. They are mixed with the
// background colour of the page.
  // Return red, green and blue (0 to 255) of a CSS colour such as "#47a", "#4477AA", "rgb(68, 119, 170)" or "black".
  function rgb(text) {
    const six = /^#(..)(..)(..)$/.exec(text.trim());
    if (six) return six.slice(1).map((part) => parseInt(part, 16));
    const three = /^#(.)(.)(.)$/.exec(text.trim());
    if (three) return three.slice(1).map((part) => parseInt(part + part, 16));
    const parts = text.match(/[\d.]+/g);
    return parts && parts.length > 2 ? parts.slice(0, 3).map(Number) : text.trim() === "black" ? [0, 0, 0] : [255, 255, 255];
  }
  function css(parts) { return `rgb(${parts.map(Math.round).join(",")})`; }
  function mix(colour, paper, share) { return colour.map((part, i) => share * part + (1 - share) * paper[i]); }
  function luminance([r, g, b]) {
    const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  }

  // Lines and labels that are less important have only this part (0 to 1) of the text colour.
  const SOFT = 0.6, STRIP_WRITTEN = 0.45, STRIP_SHARED = 0.3;
  // Opacity of bytes that are not highlighted, if other bytes are highlighted.
  const DIMMED = 0.16;

  // Return the present colours. They change if the page changes between light and dark.
  function theme() {
    const style = getComputedStyle(root);
    const paper = rgb(style.getPropertyValue("--kvviz-paper")), ink = rgb(style.color);
    const hues = DATA.colours.hues.map(rgb), cache = new Map();
    const owned = (hue, role, half) => {
      const kind = role === "scale" ? "scale" : "data", key = `${hue} ${half} ${kind}`;
      if (!cache.has(key)) {
        const shade = DATA.colours.shades[`${half} ${kind}`] || DATA.colours.shades[kind];
        cache.set(key, mix(shade.colour ? rgb(shade.colour) : hues[hue % hues.length], paper, shade.share));
      }
      return cache.get(key);
    };
    const ofState = DATA.states.map((state) => state.colour && mix(rgb(state.colour), paper, state.share));
    const textOn = (fill) => luminance(fill) < DATA.colours.white_text_below ? DATA.colours.white : DATA.colours.ink;
    return { paper, ink, owned, ofState, soft: mix(ink, paper, SOFT), textOn };
  }

  // Return the pattern of a hatch. Return null if there is no hatch.
  function pattern(context, hatch, ratio) {
    if (!hatch) return null;
    const tile = element("canvas");
    tile.width = tile.height = Math.round(hatch.canvas_step * ratio);
    const pen = tile.getContext("2d"), size = tile.width;
    pen.strokeStyle = pen.fillStyle = hatch.ink;
    pen.lineWidth = ratio;
    if (hatch.kind === "dots") pen.fillRect(0, 0, ratio, ratio);
    else {
      pen.beginPath();
      pen.moveTo(0, size); pen.lineTo(size, 0);
      if (hatch.kind === "crosses") { pen.moveTo(0, 0); pen.lineTo(size, size); }
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }
