"""What a structured output's constraint may take of the engine, and how the core says that one took more."""

ONE_TOKEN_S = 0.5
"""Processor time for one token. All other requests of the step wait for it."""
TOO_SLOW = "gearshift: the constraint took too long for one token"
"""The stop reason of a request that was ended for it."""
