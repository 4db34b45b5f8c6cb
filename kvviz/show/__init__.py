"""Shows results to people: as byte maps, as the page of an audit, and as explorers (sliders that change a cache)."""
