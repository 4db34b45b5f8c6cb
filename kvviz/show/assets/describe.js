// The tooltip of one byte, with the same words as kvviz.show.describe.describe.
  // Return owner, writers and state of one byte.
  function ownershipAt(map, byte) {
    const owners = partsAt(map.owners, byte), writers = partsAt(map.writers, byte);
    const owner = owners.find((part) => part.view.role === "data") || owners[0] || null;
    if (!owner && !writers.length) {
      const beneath = partsAt(map.beneath, byte).slice(0, 1);
      if (beneath.length) return { owner: beneath[0], writers: beneath, state: RIGHT };
    }
    let state = owner ? UNREACHED : UNOWNED;
    if (writers.length > 1) state = CONTESTED;
    else if (writers.length) state = owners.some((part) => same(part, writers[0])) ? RIGHT : MISPLACED;
    return { owner, writers, state };
  }

  function describe(map, byte) {
    const { owner, writers, state } = ownershipAt(map, byte), value = map.value(byte);
    const lines = [`byte ${byte} (0x${byte.toString(16)})` + (value === null ? "" : `: 0x${hex(value)} = ${value}`)];
    if (owner) {
      const at = startOf(owner.view, owner.index);
      lines.push(`${partText(owner)}, byte ${byte - at} of ${sizeOf(owner.view)}`);
    } else lines.push("padding: nobody's byte");
    const strangers = writers.filter((part) => !same(part, owner));
    if (state === UNREACHED) lines.push("nobody writes here");
    else if (state === CONTESTED || strangers.length) {
      const more = writers.length - DATA.most_writers;
      const named = writers.slice(0, DATA.most_writers).map(partText).join("; ") + (more > 0 ? `; and ${more} more` : "");
      lines.push(`${STATES[state]}: written by ${writers.length}: ${named}`);
    }
    const meaning = value === null ? "" : decoded(map, { owner, writers, state }, value);
    return meaning ? [...lines, meaning] : lines;
  }

  // Return what a byte with this value means, or "". `map.mode` is null, or what kvviz.cache.modes.Mode.as_data returns.
  function decoded(map, { owner, writers, state }, value) {
    const mode = map.mode;
    if (!mode || !mode.scale_bytes || !owner) return "";
    if (state !== CONTESTED && !writers.some((part) => same(part, owner))) return "";
    if (owner.view.role === "scale") return decodedScale(map, startOf(owner.view, owner.index));
    const reads = map.writers.find((view) => view.who === owner.view.scale);
    if (owner.view.role !== "data" || !reads || reads.shape.some((size, a) => size !== owner.view.shape[a])) return "";
    return decodedCode(map, startOf(reads, owner.index.slice(0, reads.shape.length)), value);
  }

  function decodedScale(map, start) {
    const mode = map.mode;
    if (!(mode.scale_dtype in SCALES)) return `a ${mode.scale_dtype} scale: this map cannot decode its value`;
    const scale = scaleAt(map, start);
    return scale ? `a scale: ${number(scale[0])}${mode.zero_point_mask ? ", zero point " + scale[1] : ""}` : "";
  }

  function decodedCode(map, start, value) {
    const mode = map.mode;
    if (!mode.values.length || !(mode.scale_dtype in SCALES)) {
      return `a ${mode.code} code with a ${mode.scale_dtype} scale: this map cannot decode its value`;
    }
    const scale = scaleAt(map, start);
    if (!scale) return `the scale of this code is read at byte ${start}, whose value is not known`;
    const [size, zero] = scale;
    const products = codesIn(mode, value).map((c) => `${number(c)} x ${number(size)} = ${number((c - zero) * size)}`);
    const notes = [mode.zero_point_mask && `codes less the zero point ${zero}`, mode.rotated && "rotated"].filter(Boolean);
    return `code x scale at byte ${start}: ${products.join(" and ")}${notes.length ? ` (${notes.join("; ")})` : ""}`;
  }

  // For each dtype of a scale, two functions that read it from a DataView: as a number, and as its bits.
  const SCALES = {
    float32: [(bytes) => bytes.getFloat32(0, true), (bytes) => bytes.getUint32(0, true)],
    float16: [(bytes) => float16(bytes.getUint16(0, true)), (bytes) => bytes.getUint16(0, true)],
  };

  // Return a scale and its zero point, which is 0 if the mode has no zero points. Return null if a byte of the scale is
  // unknown.
  function scaleAt(map, start) {
    const mode = map.mode, bytes = map.bytesAt(start, mode.scale_bytes);
    if (!bytes) return null;
    const [size, bits] = SCALES[mode.scale_dtype].map((read) => read(bytes));
    return [size, bits & mode.zero_point_mask];
  }

  // Return the number that each code in a byte stands for. If a byte has two codes, the code in the low four bits comes
  // first. JSON has no NaN, so null in `mode.values` stands for NaN.
  function codesIn(mode, byte) {
    const codes = mode.codes_per_byte === 1 ? [byte] : [byte & 15, byte >> 4];
    return codes.map((code) => mode.values[code] ?? NaN);
  }

  // Return the number that the bits of a float16 stand for: 1 bit of sign, 5 bits of exponent with bias 15, and 10 bits
  // of mantissa.
  function float16(bits) {
    const exponent = (bits >> 10) & 31, mantissa = bits & 1023, sign = bits >> 15 ? -1 : 1;
    if (exponent === 31) return mantissa ? NaN : sign * Infinity;
    return sign * (exponent ? 1024 + mantissa : mantissa) * 2 ** (Math.max(exponent, 1) - 25);
  }

  // Return a number as tooltips show it. kvviz.show.describe.number returns the same text.
  function number(x) {
    if (Number.isNaN(x)) return "nan";
    if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
    if (x === Math.trunc(x) && Math.abs(x) < 1e6) return String(Math.trunc(x) + 0);
    if (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6) return x.toFixed(6);
    return x.toExponential(5).replace("e+", "e");
  }

  function hex(value) { return value.toString(16).padStart(2, "0"); }
