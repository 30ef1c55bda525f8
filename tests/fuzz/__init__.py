"""Malformed records by the thousand: through the decoders, and through a whole worker."""
