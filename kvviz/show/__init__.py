"""Shows results to people: byte maps, the page of an audit, and explorers (sliders that change a small cache)."""
