"""Sessions: one request of the engine whose prompt arrives in several calls, as AsyncLLM's streaming input takes it.

Each part of the prompt is a call with an answer of its own, made by the same handler as any other. The engine keeps
what it has computed between the parts; it drops the last token that it sampled in each (vLLM's way), so a session of
token ids says what one prompt of all of them would. A session is in this process alone: a part of one that is not
here, or no longer, is refused, and never begins anew as if nothing were missing. What is said of a session does not
name it: who knows its name, and shares its owner, can go on with it, and results are read by many.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from service.engine.versions import vllm_frontend
from service.errors import SessionLost
from service.ports import Turn

_Key = tuple[str, tuple[str, bytes | None], str]


class Session:
    """One session. Parts are entered in the order of their calls, and generate in the order of their numbers."""

    def __init__(self, name: str, over: Callable[[], None]) -> None:
        self.name = name
        self.request_id: str | None = None
        """The engine's request, once there is one."""
        self.tokens = 0
        """Of the prompt and of the answers so far, as the engine keeps them."""
        self._over = over
        self._entered: set[int] = set()
        self._failed: set[int] = set()
        self._next = 0
        self._ended: str | None = None
        self._moved = asyncio.Condition()
        self._inputs: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None
        self._reading = False
        self._llm: Any = None
        self._adapter: str | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._expiring: asyncio.Task[None] | None = None

    def enter(self, part: int) -> None:
        """A call for a part has come. Raises SessionLost for one that was here already."""
        if part in self._entered:
            raise SessionLost(f"part {part} of this session was taken already")
        self._entered.add(part)
        if self._idle is not None:
            self._idle.cancel()

    async def stir(self) -> None:
        """Let those who wait for their turn look again: one of them was aborted."""
        async with self._moved:
            self._moved.notify_all()

    async def turn(self, part: int, unwanted: Callable[[], bool]) -> None:
        """Wait until the parts before this one are answered, or until it is unwanted. Raises SessionLost."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._ended is not None or self._next == part or unwanted())
        if self._ended is not None:
            raise SessionLost(self._ended)

    async def generate(
        self, llm: Any, turn: Turn, prompt: Any, params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """The outputs of the part whose turn it is, as they come; the last one has its finish reason.

        Raises SessionLost, and ValueError (vLLM's own too) for a part that can't be taken.
        """
        length = self._checked(llm, prompt, params, options)
        params = vllm_frontend.in_pieces(params)
        self._inputs.put_nowait(vllm_frontend.streaming_input(prompt, params))
        if turn.final:
            self._inputs.put_nowait(None)
        if self._outputs is None:
            self._llm, self.request_id = llm, request_id
            self._adapter = _name_of(options)
            self._outputs = llm.generate(self._feed(), params, request_id, **options)
        generated = 0
        while True:
            self._reading = True
            try:
                output = await anext(self._outputs)
            except StopAsyncIteration:
                raise SessionLost("this session has ended") from None
            finally:
                self._reading = False
            generated += sum(len(completion.token_ids) for completion in output.outputs)
            yield output
            if output.finished or any(completion.finish_reason for completion in output.outputs):
                break
        self.tokens += length + max(0, generated - 1)

    async def leave(self, turn: Turn, *, completed: bool, idle_s: float) -> None:
        """A call has its answer. A part that was not completed ends the session: the next one would miss it."""
        if not completed:
            self._failed.add(turn.part)
        elif turn.final:
            await self.end(f"part {turn.part} of this session was its last")
        elif self._next == turn.part:
            self._next += 1
        if self._next in self._failed:
            await self.end(f"part {self._next} of this session was not completed")
        elif self._ended is None and not self._entered.difference(range(self._next)):
            self._idle = asyncio.get_running_loop().call_later(idle_s, self._expire, idle_s)
        await self.stir()

    async def end(self, reason: str) -> None:
        """Give the engine's request back; parts that wait or come later are refused with the reason."""
        if self._ended is not None:
            return
        self._ended = reason
        self._over()
        if self._idle is not None:
            self._idle.cancel()
        if self._outputs is not None and not self._reading:
            await self._outputs.aclose()
        elif self._llm is not None:
            await self._llm.abort(self.request_id)  # whoever reads its outputs comes to their end
        await self.stir()

    def _checked(self, llm: Any, prompt: Any, params: Any, options: dict[str, Any]) -> int:
        """The length of a part's prompt. Raises ValueError where the part can't be taken."""
        vllm_frontend.check_streaming_input(llm, params)
        if self._outputs is not None and _name_of(options) != self._adapter:
            raise ValueError("All parts of a session go to the same model or adapter")
        length, limit = len(prompt["prompt_token_ids"]), llm.model_config.max_model_len
        if self.tokens + length >= limit:
            raise ValueError(
                f"This model's maximum context length is {limit} tokens. However, the session has {self.tokens} "
                f"already, and this part has {length}. Please begin a new session."
            )
        return length

    async def _feed(self) -> AsyncGenerator[Any, None]:
        while (piece := await self._inputs.get()) is not None:
            yield piece

    def _expire(self, idle_s: float) -> None:
        reason = f"no part of this session came for {idle_s:g} s"
        self._expiring = asyncio.create_task(self.end(reason), name=f"session {self.name}")


class Sessions:
    """All that are open, by alias, owner and name."""

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._open: dict[_Key, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, alias: str, turn: Turn) -> Session:
        """The session of a part; the first one opens it. Raises SessionLost. Calls of it must enter in their order."""
        key = alias, turn.owner, turn.session
        session = self._open.get(key)
        if session is None:
            if turn.part > 0:
                raise SessionLost("this session is not here: it has ended, or its worker has; begin again with part 0")
            session = self._open[key] = Session(turn.session, lambda: self._forget(key))
        session.enter(turn.part)
        return session

    def _forget(self, key: _Key) -> None:
        self._open.pop(key, None)

    async def close(self) -> None:
        """End them all."""
        for session in list(self._open.values()):
            await session.end("the engine is stopping")


def _name_of(options: dict[str, Any]) -> str | None:
    adapter = options.get("lora_request")
    return None if adapter is None else str(adapter.lora_name)
