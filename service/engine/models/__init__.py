"""Which models there are, where each one's context is, and how it is changed; no event loop, no thread."""
