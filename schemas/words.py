"""Strangers' words: which of them are orders to whatever shows them, as a terminal."""

_ASCII_AND_C1 = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINES = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
"""Halves of characters, which no encoding has."""
_BREAKS = {ord("\n"), ord("\t")}
_OBEYED = dict.fromkeys({*_ASCII_AND_C1, *_DIRECTIONS, *_LINES, *_SURROGATES} - _BREAKS, "\N{REPLACEMENT CHARACTER}")
_UNNAMED = _OBEYED.keys() | _BREAKS


def shown(text: str) -> str:
    """The text without what a terminal obeys: controls but line breaks and tabs, and changes of direction."""
    return text.translate(_OBEYED)


def is_name(text: str) -> bool:
    """Whether it may stand in a line among others: nothing in it is obeyed, and it breaks no line."""
    return text.isprintable() or not ({*map(ord, text)} & _UNNAMED)  # the former is soon said, and far stricter
