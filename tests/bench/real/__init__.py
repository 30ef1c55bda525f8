"""Switching at real size: two models of some hundred MB with real shapes and random weights, made here."""
