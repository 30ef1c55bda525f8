"""Strangers' words, where something would obey them: a terminal, a spreadsheet."""

_ASCII_AND_C1 = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINES = (0x2028, 0x2029)
_SURROGATES = range(0xD800, 0xE000)
"""Halves of characters, which no encoding has."""
_OBEYED = dict.fromkeys(
    {*_ASCII_AND_C1, *_DIRECTIONS, *_LINES, *_SURROGATES} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}"
)
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")


def shown(text: str) -> str:
    """The text without what a terminal obeys: controls but line breaks and tabs, and changes of direction."""
    return text.translate(_OBEYED)


def cell(text: str) -> str:
    """The text as a spreadsheet takes it for text: behind an apostrophe where it would be a formula."""
    return shown(f"'{text}" if text.startswith(_FORMULAS) else text)
