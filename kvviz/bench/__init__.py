"""Runs released vLLM engines on the CPU, in environments of their own, and records what their caches look like."""
