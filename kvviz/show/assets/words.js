// One byte in words: as kvviz.show.describe.describe has it.
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
    const reads = map.writers.find((view) => view.who === part.view.scale);
    if (part.view.role !== "data" || !reads || reads.shape.some((size, a) => size !== part.view.shape[a])) return "";
    const at = startOf(reads, part.index.slice(0, reads.shape.length)), scale = map.float(at);
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
