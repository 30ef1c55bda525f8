"""The message that a stream of Anthropic's events tells, for where vLLM can't make a whole of the same tokens."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json


class ToldMessage:
    """Takes the events in their order, those of other endpoints too, which tell nothing."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.ended = False
        """Whether it is whole."""
        self._inputs: dict[int, str] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self.message = {**event["message"], "content": []}
        elif kind == "content_block_start":
            self.message["content"].append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            self._add(event["index"], event["delta"])
        elif kind == "message_delta":
            delta = {name: said for name, said in event["delta"].items() if said is not None}
            self.message = {**self.message, **delta, "usage": event.get("usage") or self.message.get("usage")}
        elif kind == "message_stop":
            self.ended = True

    def _add(self, index: int, delta: Mapping[str, Any]) -> None:
        block = self.message["content"][index]
        if "partial_json" in delta:
            self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]
            block["input"] = _as_far_as_it_goes(self._inputs[index])
            return
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] = block.get(name, "") + delta[name]


def _as_far_as_it_goes(text: str) -> dict[str, Any]:
    """An object of JSON that may be cut short anywhere, as Anthropic's client reads it."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
