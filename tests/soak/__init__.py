"""Hours of traffic, strangers and broker restarts: whether anything grows."""
