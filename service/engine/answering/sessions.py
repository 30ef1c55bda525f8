"""Sessions: one request of the engine whose prompt arrives in several calls, as AsyncLLM's streaming input takes it.

Each part of the prompt is a call with an answer of its own, made by the same handler as any other. The engine keeps
what it has computed between the parts; it drops the last token that it sampled in each (vLLM's way), so a session of
token ids says what one prompt of all of them would. These ids are what a session has come to: an engine that is told
them goes on with it, by a request whose first prompt begins with them. A part of a session that is not here, or no
longer, and of which nobody tells that, is refused; it never begins anew as if nothing were missing. What is said of a
session does not name it: who knows its name, and shares its owner, can go on with it, and results are read by many.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from schemas.base import Origin
from schemas.progress import Part, Progress
from service.engine.versions import vllm_frontend, vllm_progress
from service.errors import SessionLost
from service.ports import Turn

_Key = tuple[str, tuple[str, bytes | None], str]


class Session:
    """One session. Parts are entered in the order of their calls, and generate in the order of their numbers."""

    def __init__(self, name: str, over: Callable[["Session"], None], begun: Progress | None = None) -> None:
        """``begun``: what it has come to elsewhere."""
        self.name = name
        self.request_id: str | None = None
        """The engine's request, once there is one."""
        self.parts = [] if begun is None else list(begun.parts)
        """Those that were answered, as the engine keeps them."""
        self.tokens = sum(len(part.prompt) + len(part.said) for part in self.parts)
        """Of the prompt and of the answers so far."""
        self._begun = begun
        self._engine = ""
        self._obstacle = False
        """Whether there is more to it than its tokens."""
        self._over = over
        self._entered: dict[int, Origin | None] = {}
        self._failed: set[int] = set()
        self._next = len(self.parts)
        self._ended: str | None = None
        self._moved = asyncio.Condition()
        self._inputs: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None
        self._reading = False
        self._llm: Any = None
        self._adapter: str | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def enter(self, turn: Turn) -> None:
        """A call for a part has come. Raises SessionLost for one that was here already."""
        if turn.part in self._entered or turn.part < self._next:
            raise SessionLost(f"part {turn.part} of this session was taken already")
        self._entered[turn.part] = turn.origin
        if self._idle is not None and turn.part == self._next:
            self._idle.cancel()

    def in_vain(self, turn: Turn) -> bool:
        """Whether this very request had its turn here: it comes again, so what it came to was never committed."""
        taken = self._entered.get(turn.part)
        return taken is not None and taken == turn.origin and turn.part <= self._next

    def has_come_to(self, progress: Progress) -> bool:
        """Whether it is where it was committed to be: parts may have been answered elsewhere, or here and in vain."""
        return self._next == len(progress.parts) and self.parts == list(progress.parts)

    def progress(self, call_id: str) -> Progress | None:
        """What it has come to, for another engine to go on with; None where it can't be."""
        if self._obstacle:
            return None
        return Progress.model_construct(call=call_id, engine=self._engine, parts=tuple(self.parts))

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
        self, llm: Any, turn: Turn, prompt: Any, params: Any, request_id: str, *, engine: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """The outputs of the part whose turn it is, as they come; the last one has its finish reason.

        ``engine`` is the digest of what makes its tokens. Raises SessionLost, and ValueError (vLLM's own too) for a
        part that can't be taken.
        """
        length = self._checked(llm, prompt, params, options)
        part = Part.model_construct(prompt=list(prompt["prompt_token_ids"]), text=prompt.get("prompt"))
        self._obstacle = self._obstacle or vllm_progress.more_than_tokens(prompt, params)
        if self._outputs is None:
            self._engine = engine
            prompt = self._after_what_was(llm, prompt)
        params = vllm_frontend.in_pieces(params)
        self._inputs.put_nowait(vllm_frontend.streaming_input(prompt, params))
        if turn.final:
            self._inputs.put_nowait(None)
        if self._outputs is None:
            self._llm, self.request_id = llm, request_id
            self._adapter = _name_of(options)
            self._outputs = llm.generate(self._feed(), params, request_id, **options)
        said: list[int] = []
        asked = None if self._begun is None else [token for each in (*self.parts, part) for token in each.prompt]
        while True:
            self._reading = True
            try:
                output = await anext(self._outputs)
            except StopAsyncIteration:
                raise SessionLost("this session has ended") from None
            finally:
                self._reading = False
            said += (token for completion in output.outputs for token in completion.token_ids)
            if asked is not None:  # vLLM counts and shows what the parts have asked, not what was answered
                output.prompt_token_ids = asked
            yield output
            if output.finished or any(completion.finish_reason for completion in output.outputs):
                break
        part.said.extend(said[:-1])
        self.parts.append(part)
        self.tokens += length + len(part.said)

    async def leave(self, turn: Turn, *, completed: bool, idle_s: float) -> None:
        """A call has its answer. A part that was not completed ends the session: the next one would miss it."""
        if not completed:
            self._failed.add(turn.part)
        elif turn.final:
            await self.end(f"part {turn.part} of this session was its last")
        elif self._next == turn.part:
            self._next += 1
            if self._next not in self._entered and self._ended is None:
                self._idle = asyncio.get_running_loop().call_later(idle_s, self._expire, idle_s)
        if self._next in self._failed:
            await self.end(f"part {self._next} of this session was not completed")
        await self.stir()

    async def end(self, reason: str) -> None:
        """Give the engine's request back; parts that wait or come later are refused with the reason."""
        if self._ended is not None:
            return
        self._ended = reason
        self._over(self)
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

    def _after_what_was(self, llm: Any, prompt: Any) -> Any:
        """The prompt of a part with all that was before it. Raises SessionLost where that can't be gone on with."""
        if self._begun is None:
            return prompt
        if self._begun.engine != self._engine:
            raise SessionLost("this session was begun by another model, adapter or version; begin again with part 0")
        if self._obstacle:
            raise SessionLost("this part is more than tokens, and its session's beginning is not here; begin again")
        before = [token for part in self.parts for token in (*part.prompt, *part.said)]
        vocabulary = llm.model_config.get_vocab_size()
        if not all(0 <= token < vocabulary for token in before):
            raise SessionLost("this model has no such tokens as this session; begin again with part 0")
        texts = [part.text for part in self.parts] + [prompt.get("prompt")]
        joined = {**prompt, "prompt_token_ids": [*before, *prompt["prompt_token_ids"]]}
        return {**joined, "prompt": "".join(filter(None, texts))} if any(texts) else joined

    async def _feed(self) -> AsyncGenerator[Any, None]:
        while (piece := await self._inputs.get()) is not None:
            yield piece

    def end_soon(self, reason: str) -> None:
        """End it, and be forgotten at once."""
        self._over(self)
        self._ending = asyncio.create_task(self.end(reason), name=f"session {self.name}")

    def _expire(self, idle_s: float) -> None:
        self.end_soon(f"no part of this session came for {idle_s:g} s")


class Sessions:
    """All that are open, by alias, owner and name."""

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._open: dict[_Key, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, alias: str, turn: Turn, begun: Progress | None = None) -> Session:
        """The session of a part; the first one opens it. Raises SessionLost. Calls of it must enter in their order.

        ``begun`` is what it had come to when the part was asked for: where it is not here, it goes on from there.
        """
        key = alias, turn.owner, turn.session
        session = self._open.get(key)
        if session is not None and (session.in_vain(turn) or (begun is not None and not session.has_come_to(begun))):
            session.end_soon("this session has gone on elsewhere")
            session = None
        if session is None:
            if turn.part != (0 if begun is None else len(begun.parts)):
                raise SessionLost("this session is not here: it has ended, or its worker has; begin again with part 0")
            session = self._open[key] = Session(turn.session, lambda ended: self._forget(key, ended), begun)
        session.enter(turn)
        return session

    def _forget(self, key: _Key, session: Session) -> None:
        if self._open.get(key) is session:
            del self._open[key]

    async def close(self) -> None:
        """End them all."""
        for session in list(self._open.values()):
            await session.end("the engine is stopping")


def _name_of(options: dict[str, Any]) -> str | None:
    adapter = options.get("lora_request")
    return None if adapter is None else str(adapter.lora_name)
