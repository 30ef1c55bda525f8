"""A session: one prompt that arrives in several parts, answered part by part, by an engine that keeps its place."""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from schemas.requests import Endpoint
from service.client.options import Options, split
from service.client.stream import Stream
from service.errors import SessionLost

Call = Callable[..., Awaitable[Any]]
StreamOf = Callable[[Endpoint, Mapping[str, Any], Options], Stream]


class Session:
    """Made by ``Client.session``. Each part is a completion whose prompt goes on after the answer to the part before.

    Parts may be sent before the earlier ones are answered; they are answered in their order. The last one says
    ``final=True``; a session that hears nothing for the workers' ``session_idle_s`` ends by itself. Its KV cache is
    one worker's; if that is lost, another goes on from the tokens. What can't be gone on with, such as a session with
    images or a seed, raises RequestFailed with status 409, and a new session is needed.
    """

    def __init__(self, *, call: Call, stream_of: StreamOf, defaults: Mapping[str, Any]) -> None:
        self.name = uuid.uuid4().hex
        self._call = call
        self._stream_of = stream_of
        self._defaults = dict(defaults)
        self._part = 0
        self._over = False

    async def complete(self, prompt: str | list[int], *, final: bool = False, **rest: Any) -> Any:
        """The answer to a part."""
        return await self._call(Endpoint.COMPLETIONS, **self._body(prompt, final, rest))

    def stream(self, prompt: str | list[int], *, final: bool = False, **rest: Any) -> Stream:
        """The same, streamed. A part is sent when its iteration begins."""
        options, body = split(self._body(prompt, final, rest))
        return self._stream_of(Endpoint.COMPLETIONS, body, options)

    def _body(self, prompt: str | list[int], final: bool, rest: Mapping[str, Any]) -> dict[str, Any]:
        """A part's body and options; its number is its place among the calls. Raises SessionLost after the last."""
        if self._over:
            raise SessionLost(f"session {self.name!r} has had its last part")
        part, self._part, self._over = self._part, self._part + 1, final
        place = {"session": self.name, "part": part, "final": final}
        return {**self._defaults, **rest, "prompt": prompt, **place}
