"""An engine without a model, for volume and faults; it passes the same specification as the real one.

Each alias speaks words that name it, one per step, so that a result's content tells which model answered. All calls
of the active alias advance together, as in continuous batching; calls of the others are frozen where they are.
"""

import asyncio
import itertools
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from schemas.control import Cache
from schemas.errors import nearest
from schemas.progress import Begun, Part, Progress, Said
from schemas.requests import Endpoint
from service.errors import ConfigError, EngineDied, HandedBack, LoraRefused, NotContinued, SwitchFailed, UnknownModel
from service.models_file import ModelsFile
from service.ports import Answer, Call, ChunkSink, Inquiry, Observer, Reply, Transition, Turn
from tests.support.tally import Tally

POISON = "<poison>"
"""A prompt that contains this kills the engine when it runs."""
MOST_WORDS = 1 << 20
DESCRIBED = (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)
"""Endpoints of which it says what they take."""
_ANSWERED = frozenset({*DESCRIBED, Endpoint.RESPONSES})
_TALKING = (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)
_BEFORE = 2
"""Events of a stream of messages before its first word."""
_ENGINE = "words"
BROKEN = "<broken>"
"""A prompt that contains this is answered with a server error that is worth a retry."""


@dataclass(slots=True, eq=False)
class _Run:
    call: Call
    wanted: int
    prompt_tokens: int
    started: float
    poison: bool
    first: float | None = None
    words: list[str] = field(default_factory=list)
    reason: str | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    handed_back: bool = False
    streamed: bool = False
    told: int = 0
    """Words that a stream has handed on."""
    continued: tuple[int, ...] = ()
    before: int = 0
    """Words that its session had said."""
    unread: int = 0
    """Steps in which its prompt is still read."""
    reading: int = 0
    """Tokens of its prompt that are to be read, where that takes time."""

    @property
    def steps_on(self) -> bool:
        """Whether the next step of its model gives it a word."""
        return self.reason is None and not self.handed_back


class FakeEngine:
    """``step_s``: how long one step of the active model takes; 0 answers at once. ``switch_s``: a switch's stall.

    ``prompt_steps``: in how many of its first steps a call says nothing. ``row_s`` is what a step takes more for each
    call in it, ``prompt_token_s`` for each token of a prompt: as many as ``batch_tokens`` allow beside what speaks, in
    the order in which the calls came, as vLLM reads them.
    """

    def __init__(
        self,
        aliases: tuple[str, ...] = ("llama", "qwen"),
        *,
        active: str | None = None,
        step_s: float = 0.0,
        prompt_steps: int = 0,
        row_s: float = 0.0,
        prompt_token_s: float = 0.0,
        batch_tokens: int = 2048,
        switch_s: float = 0.0,
        max_model_len: int = 4096,
        broken_loads: frozenset[str] = frozenset(),
        tally: Tally | None = None,
    ) -> None:
        self._tally = tally
        self._aliases = aliases
        self._serving = active or aliases[0]
        self._target: str | None = None
        self._step_s = step_s
        self._prompt_steps = prompt_steps
        self._row_s = row_s
        self._prompt_token_s = prompt_token_s
        self._batch_tokens = batch_tokens
        self._switch_s = switch_s
        self._max_model_len = max_model_len
        self.broken_loads = broken_loads
        self._tiers = dict.fromkeys(aliases, Tier.DROPPED) | {self._serving: Tier.RESIDENT}
        self._pinned: set[str] = set()
        self._asleep: set[str] = set()
        self._loras: dict[str, dict[str, str]] = {alias: {} for alias in aliases}
        self._runs: dict[str, _Run] = {}
        self._lock = asyncio.Lock()
        self._work = asyncio.Event()
        self._death: asyncio.Future[BaseException] | None = None
        self._stepper: asyncio.Task[None] | None = None
        self.expected: tuple[str, ...] = ()
        self.steps = 0
        self.profiling: set[str] = set()
        self._sessions: dict[str, tuple[Part, ...]] = {}
        self.forgets = False
        """Whether it goes on with nothing that was said before."""

    # --- what is there ---

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._aliases

    @property
    def active(self) -> str:
        return self._target or self._serving

    def contexts(self) -> tuple[ContextInfo, ...]:
        return tuple(self._info(alias) for alias in self._aliases)

    def tiers(self) -> Mapping[str, Tier]:
        return {alias: self._tiers[alias] for alias in self._aliases}

    def asleep(self) -> Collection[str]:
        return self._asleep

    @property
    def device_bytes(self) -> int | None:
        return None

    def _info(self, alias: str) -> ContextInfo:
        return ContextInfo(
            alias=alias,
            tier=self._tiers[alias],
            active=alias == self._serving,
            asleep=alias in self._asleep,
            pinned=alias in self._pinned,
            unfinished=sum(run.call.alias == alias for run in self._runs.values()),
            loras=tuple(self._loras[alias]),
            max_model_len=self._max_model_len,
        )

    # --- answering ---

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        self._alive()
        if call.id in self._runs:
            raise NotContinued("the run that said it has not ended yet")
        problem = self._problem(call)
        if problem is not None:
            return problem
        text = _prompt(call)
        words = text.count(" ") + 1
        if words >= self._max_model_len:
            return _error(400, "BadRequestError", f"The maximum context length is {self._max_model_len} tokens")
        if BROKEN in text:
            return _error(500, "InternalServerError", "The model stumbled", retriable=True)
        if call.endpoint is Endpoint.COUNT_TOKENS:
            return Answer(200, {"input_tokens": words, "context_management": {"original_input_tokens": words}})
        wanted = _wanted(call.body)
        run = _Run(call, wanted, words, time.monotonic(), poison=POISON in text, unread=self._prompt_steps)
        run.reading = words if self._prompt_token_s else 0
        run.streamed = on_chunk is not None
        if call.turn is not None:
            return await self._answer_part(run, call.turn, on_chunk, progress)
        if progress is not None:
            self._continue(run, progress)
        return await self._run(run, on_chunk)

    async def _run(self, run: _Run, on_chunk: ChunkSink | None) -> Answer:
        call = run.call
        self._runs[call.id] = run
        try:
            await self._generate(run, on_chunk)
        finally:
            del self._runs[call.id]
        return self._response(run)

    async def _answer_part(
        self, run: _Run, turn: Turn, on_chunk: ChunkSink | None, progress: Progress | None
    ) -> Answer:
        """Parts of one session come one after the other here. Words are counted on through all of its answers."""
        call, key = run.call, turn.digest(run.call.alias)
        there = self._sessions.get(key, ())
        parts = there if progress is None else progress.parts
        known = progress is None or progress.engine == _ENGINE
        if not known or len(parts) != turn.part:
            return _error(409, "SessionLost", "This session is not here: begin again with part 0")
        self._sessions.pop(key, None)
        run.before = sum(len(part.said) for part in parts)
        run.prompt_tokens += sum(len(part.prompt) for part in parts)
        answer = await self._run(run, on_chunk)
        if turn.final or answer.status != 200 or answer.aborted:
            return replace(answer, session=Progress(call=call.id, engine=_ENGINE))
        prompt = list(range(_prompt(call).count(" ") + 1))
        parts = (*parts, Part(prompt=prompt, said=list(range(len(run.words) - 1)), text=_prompt(call)))
        self._sessions[key] = parts
        return replace(answer, session=Progress(call=call.id, engine=_ENGINE, parts=parts))

    def _continue(self, run: _Run, progress: Progress) -> None:
        begun = progress.of(run.call.id)
        if self.forgets or (progress.call, progress.engine) != (run.call.id, _ENGINE) or begun is None:
            raise NotContinued("another engine began it, or under another id")
        if begun.prompt != _prompt(run.call):
            raise NotContinued("its prompt is another one now")
        run.words = [f"{run.call.alias}{index} " for index in begun.sequences[0].tokens]
        run.told = len(run.words)
        run.continued = (*progress.continued, run.told)
        run.reason = "length" if len(run.words) >= run.wanted else None

    def progress(self, call_id: str) -> Progress | None:
        run = self._runs.get(call_id)
        told = 0 if run is None else run.told if run.streamed else len(run.words)
        if run is None or run.reason == "abort" or told == 0 or run.call.turn is not None:
            return None
        begun = Begun(id=call_id, prompt=_prompt(run.call), sequences=(Said(tokens=list(range(told))),))
        events = told + (_BEFORE if run.call.endpoint is Endpoint.MESSAGES else 0) if run.streamed else 0
        return Progress(call=call_id, engine=_ENGINE, requests=(begun,), events=events, continued=run.continued)

    async def _generate(self, run: _Run, on_chunk: ChunkSink | None) -> None:
        if self._step_s == 0 and run.call.alias == self._serving and not self._lock.locked():
            while run.reason is None:
                self._advance(run)
                self._alive()
        else:
            self._start()
        while run.reason is None or run.told < len(run.words):
            if on_chunk is not None and run.told < len(run.words):
                for chunk in _chunks(run, run.words[run.told], run.told):
                    await on_chunk(chunk)
                run.told += 1
                continue
            if run.reason is not None:
                break
            if run.handed_back:
                raise HandedBack(f"{run.call.alias} gives way", self.progress(run.call.id))
            await run.moved.wait()
            run.moved.clear()
            self._alive()
        if on_chunk is not None:
            for chunk in _chunks(run, "", run.told, reason=run.reason):
                await on_chunk(chunk)

    def _start(self) -> None:
        self._work.set()
        if self._stepper is None:
            self._stepper = asyncio.create_task(self._run_steps(), name="fake-engine")

    async def _run_steps(self) -> None:
        """All calls of the active alias advance by one word per step.

        As a device's, steps follow each other by their own clock: what the loop is busy with delays none but its own.
        """
        clock = asyncio.get_running_loop().time
        done_at = clock()
        while True:
            if not self._work.is_set():
                await self._work.wait()
                done_at = clock()
            done_at += self._step_s + self._begin_step()
            await asyncio.sleep(max(0.0, done_at - clock()))
            if self._lock.locked():
                async with self._lock:
                    pass
                done_at = clock()
            batch = self._batch()
            if not batch or self._serving in self._asleep:
                self._work.clear()
                continue
            self.steps += 1
            for run in batch:
                self._advance(run)

    def _batch(self) -> list[_Run]:
        return [run for run in self._runs.values() if run.call.alias == self._serving and run.steps_on]

    def _begin_step(self) -> float:
        """Read what there is room for; what that and the calls in the step take beside ``step_s``."""
        batch = self._batch()
        room = self._batch_tokens - sum(not run.reading for run in batch)
        before = room
        for run in batch:
            part = min(run.reading, room)
            run.reading -= part
            room -= part
        return self._row_s * len(batch) + self._prompt_token_s * (before - room)

    def _advance(self, run: _Run) -> None:
        if run.poison:
            self.kill(f"the prompt of {run.call.id} killed it")
        if self._death is not None and self._death.done():
            return
        if run.reading > 0:
            return
        if run.unread > 0:
            run.unread -= 1
            return
        run.first = run.first or time.monotonic()
        run.words.append(f"{run.call.alias}{run.before + len(run.words)} ")
        if self._tally is not None:
            self._tally.add()
        if len(run.words) >= run.wanted:
            run.reason = "length"
        run.moved.set()

    async def inquire(self, alias: str, inquiry: Inquiry) -> Reply:
        self._alive()
        if alias not in self._aliases:
            raise UnknownModel(f"unknown model {alias!r}{nearest(alias, self._aliases)}")
        said: dict[str, Any] = {"model": alias, "query": inquiry.query}
        if inquiry.path == "/collective_rpc":
            body = json.loads(inquiry.body)
            if "method" not in body:
                return Reply(400, "application/json", b'{"detail": "Missing \'method\' in request body"}')
            tasks = body["method"] == "get_supported_tasks"
            said = {"results": [["generate"] if tasks else f"{body['method']} of {alias}"]}
        elif inquiry.path == "/server_info":
            said |= {"vllm_config": f"model={alias}"}
        elif inquiry.path == "/tokenizer_info":
            said |= {"tokenizer_class": "Words"}
        else:
            return Reply(404, "application/json", b'{"detail": "Not Found"}')
        return Reply(200, "application/json", json.dumps(said).encode())

    async def openapi(self) -> Mapping[str, Any]:
        body = {"type": "object", "properties": {"model": {"type": "string"}}, "required": ["model"]}
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Asked"}}}
        operation = {"summary": "Words", "requestBody": {"content": content}, "responses": {"200": {"description": ""}}}
        paths = {endpoint.value: {"post": operation} for endpoint in DESCRIBED}
        return {"paths": paths, "components": {"schemas": {"Asked": body}}}

    async def abort(self, call_id: str) -> None:
        run = self._runs.get(call_id)
        if run is not None and run.reason is None:
            run.reason = "abort"
            run.moved.set()

    def tokens(self, call_id: str) -> int:
        run = self._runs.get(call_id)
        return 0 if run is None else len(run.words)

    def _problem(self, call: Call) -> Answer | None:
        if call.alias not in self._aliases:
            return _error(404, "NotFoundError", f"The model `{call.alias}` does not exist.")
        if call.endpoint not in _ANSWERED:
            return _error(404, "NotFoundError", f"The model does not support {call.endpoint}")
        messages = call.body.get("messages")
        if call.endpoint in _TALKING and not (isinstance(messages, list) and {*map(type, messages)} <= {dict}):
            return _error(400, "BadRequestError", "messages must be a list of objects")
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            limit = call.body.get(name)
            if limit is None and name == "max_tokens" and call.endpoint is Endpoint.MESSAGES:
                return _error(400, "BadRequestError", "max_tokens: Field required")
            if limit is not None and not (isinstance(limit, int) and 0 <= limit <= MOST_WORDS):
                return _error(400, "BadRequestError", f"{name} must be an integer from 0 to {MOST_WORDS}")
        return None

    def _response(self, run: _Run) -> Answer:
        call, text = run.call, "".join(run.words)
        usage = {"prompt_tokens": run.prompt_tokens, "completion_tokens": len(run.words)}
        usage["total_tokens"] = sum(usage.values())
        choice: dict[str, Any] = {"index": 0, "finish_reason": run.reason}
        if call.endpoint is Endpoint.CHAT:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if call.endpoint is Endpoint.CHAT else "text_completion"
        body = {"id": call.id, "object": kind, "model": call.alias, "choices": [choice], "usage": usage}
        if call.endpoint is Endpoint.RESPONSES:
            body = _spoken(run)
        if call.endpoint is Endpoint.MESSAGES:
            body = _message(run)
        first = None if run.first is None else run.first - run.started
        n = call.body.get("n")
        samples = n if isinstance(n, int) and n > 0 else 1
        return Answer(
            200,
            body,
            aborted=run.reason == "abort",
            first_token_s=first,
            continued=run.continued,
            longest=None if call.turn is not None else math.ceil(len(run.words) / samples),
        )

    # --- switching ---

    async def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode = SwitchMode.KEEP,
        drain_timeout: float = 60.0,
        leftover: Leftover = Leftover.ABORT,
        observe: Observer | None = None,
    ) -> SwitchReport:
        self._alive()
        if alias not in self._aliases:
            raise UnknownModel(f"unknown model {alias!r}{nearest(alias, self._aliases)}")
        async with self._lock:
            self._target = alias
            try:
                return await self._switch(alias, mode, drain_timeout, leftover, observe or (lambda _step: None))
            finally:
                self._target = None
                self._work.set()

    async def _switch(
        self, alias: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, observe: Observer
    ) -> SwitchReport:
        left, began = self._serving, time.perf_counter()
        report = SwitchReport(
            from_model=left, to_model=alias, mode=mode, tier_found=self._tiers[alias], core_pid=os.getpid()
        )
        if left == alias:
            report = report.model_copy(update={"switched": False, "tier_left": Tier.RESIDENT})
            observe(Transition(SwitchPhase.NO_OP, time.time(), report))
            return report
        observe(Transition(SwitchPhase.ACCEPTED, time.time(), report))
        if mode is SwitchMode.DRAIN:
            observe(Transition(SwitchPhase.DRAINING, time.time(), report))
            await self._drain(left, drain_timeout)
            self._alive()
        drained = time.perf_counter() - began
        aborted = 0
        if mode is SwitchMode.ABORT or (mode is SwitchMode.DRAIN and leftover is Leftover.ABORT):
            for run in [run for run in self._runs.values() if run.call.alias == left and run.reason is None]:
                await self.abort(run.call.id)
                aborted += 1
        observe(Transition(SwitchPhase.SWITCHING, time.time(), report))
        if alias in self.broken_loads:
            observe(Transition(SwitchPhase.ROLLED_BACK, time.time(), report))
            raise SwitchFailed(f"Failed to switch model from {left} to {alias}: no weights")
        await asyncio.sleep(self._switch_s)
        self._alive()
        self._serving = alias
        self._tiers[alias] = Tier.RESIDENT
        took = time.perf_counter() - began
        kept = sum(run.call.alias == left and run.reason is None for run in self._runs.values())
        report = report.model_copy(
            update={"ms": took * 1e3, "switch_s": took, "drain_s": drained, "kept": kept, "aborted": aborted}
        )
        observe(Transition(SwitchPhase.COMPLETED, time.time(), report))
        return report

    async def _drain(self, alias: str, limit: float) -> None:
        """Step the model being left until its calls are done or the limit is over."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            batch = [run for run in self._runs.values() if run.call.alias == alias and run.reason is None]
            if not batch:
                return
            await asyncio.sleep(self._step_s)
            for run in batch:
                if run.reason is None:
                    self._advance(run)

    # --- contexts, adapters, the rest ---

    @property
    def brings_beside(self) -> frozenset[Tier]:
        return frozenset({Tier.PARKED, Tier.DROPPED})

    def expect(self, order: Sequence[str]) -> None:
        self.expected = tuple(order)

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        self._known(alias)
        if not stall and self._tiers[alias] is Tier.DROPPED:
            return self._info(alias)
        return self._set(alias, Tier.RESIDENT)

    async def park(self, alias: str) -> ContextInfo:
        return self._set(alias, Tier.PARKED)

    async def drop(self, alias: str) -> ContextInfo:
        self._asleep.discard(alias)
        return self._set(alias, Tier.DROPPED)

    async def pin(self, alias: str, pinned: bool) -> ContextInfo:
        self._known(alias)
        (self._pinned.add if pinned else self._pinned.discard)(alias)
        return self._info(alias)

    def _set(self, alias: str, tier: Tier) -> ContextInfo:
        self._known(alias)
        if alias == self._serving and tier is not Tier.RESIDENT:
            raise SwitchFailed(f"{alias} is active; switch to another model first")
        self._tiers[alias] = tier
        return self._info(alias)

    async def add_lora(self, alias: str, name: str, path: str) -> None:
        self._known(alias)
        if name in self._loras:
            raise LoraRefused(f"{name} is a model; an adapter needs a name of its own")
        if ".." in path:
            raise LoraRefused(f"{path} is not below lora_root")
        self._loras[alias][name] = path

    async def remove_lora(self, alias: str, name: str) -> None:
        self._known(alias)
        if self._loras[alias].pop(name, None) is None:
            raise UnknownModel(f"no LoRA {name!r} on {alias}")

    async def pin_lora(self, alias: str, name: str) -> None:
        if name not in self.loras(alias):
            raise UnknownModel(f"no LoRA {name!r} on {alias}")

    def loras(self, alias: str) -> tuple[str, ...]:
        self._known(alias)
        return tuple(self._loras[alias])

    async def reset_caches(
        self,
        alias: str | None = None,
        cache: Cache | None = None,
        *,
        running: bool = False,
        external: bool = False,
    ) -> bool:
        chosen = self._chosen(alias)
        return running or cache in {"mm", "encoder"} or not any(run.call.alias in chosen for run in self._runs.values())

    async def profile(self, alias: str | None = None, *, start: bool) -> None:
        if any(self._tiers[each] is Tier.DROPPED for each in self._chosen(alias or self._serving)):
            raise UnknownModel(f"{alias} is not loaded, and has nothing to profile: switch to it first, or preload it")
        if start:
            self.profiling |= set(self._chosen(alias or self._serving))
        else:
            self.profiling -= set(self._chosen(alias))

    async def sleep(self, level: int, alias: str | None = None) -> tuple[ContextInfo, ...]:
        for one in self._chosen(alias):
            self._asleep.add(one)
            self._tiers[one] = Tier.PARKED if level == 1 else Tier.DROPPED
        return self.contexts()

    async def wake(self, alias: str | None = None) -> tuple[ContextInfo, ...]:
        for one in self._chosen(alias):
            self._asleep.discard(one)
        self._tiers[self._serving] = Tier.RESIDENT
        self._work.set()
        return self.contexts()

    async def reload(self, models: ModelsFile) -> Mapping[str, str]:
        if self._serving not in models.models:
            raise ConfigError(f"{models.path}: the active alias {self._serving!r} can't be removed")
        names = dict.fromkeys(itertools.chain(self._aliases, models.models))
        changes = {
            name: "kept" if name in self._aliases and name in models.models else
            "added" if name in models.models else "removed"
            for name in names
        }  # fmt: skip
        self._aliases = tuple(models.models)
        for alias in self._aliases:
            self._tiers.setdefault(alias, Tier.DROPPED)
            self._loras.setdefault(alias, {})
        return changes

    def _chosen(self, alias: str | None) -> tuple[str, ...]:
        if alias is None:
            return self._aliases
        self._known(alias)
        return (alias,)

    def _known(self, alias: str) -> None:
        if alias not in self._aliases:
            raise UnknownModel(f"unknown model {alias!r}{nearest(alias, self._aliases)}")

    # --- its end ---

    def kill(self, cause: str = "killed") -> None:
        """Die as an engine process does: every call fails, and nothing runs any more."""
        death = self._future()
        if not death.done():
            death.set_result(EngineDied(f"the engine died: {cause}"))
        for run in self._runs.values():
            run.moved.set()

    def hand_back(self, alias: str) -> None:
        """Give up a model's unfinished calls, as under pressure of memory."""
        for run in self._runs.values():
            if run.call.alias == alias and run.reason is None:
                run.handed_back = True
                run.moved.set()

    async def died(self) -> BaseException:
        return await asyncio.shield(self._future())

    async def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
            self._stepper = None

    def _future(self) -> "asyncio.Future[BaseException]":
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        return self._death

    def _alive(self) -> None:
        if self._death is not None and self._death.done():
            raise EngineDied(str(self._death.result()))


def _wanted(body: Mapping[str, Any]) -> int:
    return max(
        1, int(body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens") or 16)
    )


def _prompt(call: Call) -> str:
    if call.endpoint is Endpoint.RESPONSES:
        return str(call.body.get("input", ""))
    if call.endpoint in _TALKING:
        return " ".join(str(message.get("content", "")) for message in call.body.get("messages", ()))
    return str(call.body.get("prompt", ""))


def _chunks(run: _Run, word: str, number: int, reason: str | None = None) -> list[dict[str, Any]]:
    return (
        _events(run, word, number, reason)
        if run.call.endpoint is Endpoint.MESSAGES
        else [_chunk(run, word, number, reason)]
    )


def _chunk(run: _Run, word: str, number: int, reason: str | None = None) -> dict[str, Any]:
    if run.call.endpoint is Endpoint.RESPONSES:
        return _event(run, word, number, reason)
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if run.call.endpoint is Endpoint.CHAT:
        choice["delta"] = {"content": word}
        return {"id": run.call.id, "object": "chat.completion.chunk", "model": run.call.alias, "choices": [choice]}
    choice["text"] = word
    return {"id": run.call.id, "object": "text_completion", "model": run.call.alias, "choices": [choice]}


def _spoken(run: _Run) -> dict[str, Any]:
    """OpenAI's object of a response."""
    said = {"type": "output_text", "text": "".join(run.words), "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]}
    tokens = {"input_tokens": run.prompt_tokens, "output_tokens": len(run.words)}
    return {
        "id": f"resp_{run.call.id}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": run.call.alias,
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {**tokens, "total_tokens": sum(tokens.values())},
    }


def _message(run: _Run) -> dict[str, Any]:
    """Anthropic's message."""
    return {
        "id": run.call.id,
        "type": "message",
        "role": "assistant",
        "model": run.call.alias,
        "content": [{"type": "text", "text": "".join(run.words)}],
        "stop_reason": {"length": "max_tokens"}.get(run.reason or ""),
        "stop_sequence": None,
        "usage": {"input_tokens": run.prompt_tokens, "output_tokens": len(run.words)},
    }


def _events(run: _Run, word: str, number: int, reason: str | None) -> list[dict[str, Any]]:
    """Of Anthropic's stream: what comes before the first word, a word, what comes after the last one."""
    found: list[dict[str, Any]] = []
    whole = _message(run)
    if number == 0:
        found.append({"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}})
        found.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    if reason is None:
        delta = {"type": "text_delta", "text": word}
        return [*found, {"type": "content_block_delta", "index": 0, "delta": delta}]
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    return [
        *found,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended, "usage": whole["usage"]},
        {"type": "message_stop"},
    ]


def _event(run: _Run, word: str, number: int, reason: str | None) -> dict[str, Any]:
    if reason is not None:
        return {"type": "response.completed", "sequence_number": number, "response": _spoken(run)}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return {"type": "response.output_text.delta", "sequence_number": number, "delta": word, "logprobs": [], **place}


def _error(status: int, kind: str, message: str, *, retriable: bool = False) -> Answer:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Answer(status, {"error": error}, retriable=retriable)
