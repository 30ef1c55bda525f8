"""A tool that is called by any model: its grammar leaves it no more to say, in some sixty tokens.

A model that was never trained to call one says white space wherever a grammar lets it, and to no end.
"""

from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from deploy.local.models import SPECIAL

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
_BYTES = sorted(ByteLevel.alphabet())
"""After the special ones, the first tokens of our models' vocabularies."""
CALLED: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": "required",
    "logit_bias": {str(len(SPECIAL) + _BYTES.index(space)): -100 for space in "ĉĊčĠ"},
    "ignore_eos": False,
    "max_tokens": 100,
}
"""What is said of a chat. ``tool_choice`` may be ``NAMED`` as well."""


def calls(body: dict[str, Any]) -> list[str]:
    """The names of the tools that a chat's answer calls."""
    (choice,) = body["choices"]
    return [call["function"]["name"] for call in choice["message"].get("tool_calls") or ()]
