"""What serves a language model over the cache: blocks, generation, offloading, connectors, scenarios."""
