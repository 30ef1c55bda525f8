"""Which model runs next, and for how long: pure decisions over values, without I/O and without a clock of their own."""
