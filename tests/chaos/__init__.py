"""Three workers on a real broker, everything that can happen to them, and a reader who counts."""
