// Unpacks bytes that kvviz.show.live_map.packed has packed as text. Five digits of base 85 hold four bytes.
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

  // Return a copy of the bytes with the changes of one step of a time lapse.
  function changed(bytes, changes) {
    const next = bytes.slice();
    for (const [at, text] of changes) next.set(unpacked(text), at);
    return next;
  }
