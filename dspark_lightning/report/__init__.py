"""One HTML page about a run: what it learned, how it decodes, what serving it would give."""
