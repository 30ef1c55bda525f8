"""A call in flight, and the engine client through which vLLM's handlers make its requests.

The handlers are given ``CallClient`` where vLLM's server gives them its AsyncLLM. It passes everything on, and
notes under the call that is being answered which engine requests belong to it: so that they can be aborted and
counted by the call's id, and so that a streamed answer can be put together by the handler itself (see ``Run.replay``).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from schemas.progress import Begun, Progress
from service.engine.answering import said
from service.engine.answering.constraints import ModelConstraints, check_outcome
from service.engine.answering.sessions import Session
from service.engine.models.checkpoint import identity
from service.engine.versions import vllm_frontend, vllm_progress
from service.platforms import current
from service.ports import Turn

RUN: ContextVar["Run | None"] = ContextVar("gearshift_run", default=None)
"""The call that the current task answers; None for requests that come by another way, such as HTTP."""


class CallAborted(Exception):
    """The call was ended before it had anything that its handler could make a partial answer of."""


@dataclass(slots=True)
class EngineRequest:
    """One request of a call to the engine: a completion of several prompts makes one per prompt."""

    id: str
    generated: int = 0
    longest: int = 0
    """What the sample that has said most of all has said."""
    shared: bool = False
    """Whether it is a session's, which generates for other calls as well."""
    merged: Any = None
    """vLLM's RequestOutput so far, kept where the answer is streamed."""
    states: list[Any] = field(default_factory=list)
    """What vLLM's OutputProcessor knows of its samples; it forgets those that end."""
    told: dict[int, int] = field(default_factory=dict)
    """Of a stream: how many tokens of each sample its handler has dealt with, events and all."""
    adapter: Any = None
    """vLLM's LoRARequest, if it is for an adapter."""
    features: tuple[str, ...] = ()
    """The identifiers of its prompt's images, and of what else is no text."""
    parameters: Any = None
    """vLLM's SamplingParams, where it generates."""
    prompt: str = ""
    """The digest of its prompt, once that was asked for."""

    @property
    def tokens(self) -> int:
        """Generated so far, of all its samples: of those that have ended, too."""
        known = sum(state.detokenizer.num_output_tokens() for state in self.states)
        return self.generated if self.shared else max(known, self.generated)


@dataclass(slots=True)
class Run:
    """The state of a call while it is answered.

    ``streamed``: its outputs are kept, and ``replay`` then gives them to the handler a second time, which answers
    without a stream and without the engine. The whole answer of a stream is therefore vLLM's own, by the code that
    answers where no stream is asked for, not our reading of its chunks.
    """

    id: str
    priority: int = 0
    tenant: str = ""
    streamed: bool = False
    drawn: bool = False
    """Its stream names its items by what vLLM drew: another run would give them other names."""
    beams: bool = False
    aborted: bool = False
    """An abort was asked for."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with it, for those that wait."""
    cut: bool = False
    """An abort reached it: its text is partial."""
    failure: BaseException | None = None
    refusal: Exception | None = None
    """What a handler failed with whose route makes less of it than the server's exception handlers do."""
    cache_salt: str | None = None
    """What its prompt shares the prefix cache with, where vLLM's request may not say it."""
    first_token_s: float | None = None
    rendered: Any = None
    """What the handler made of the prompt, so that a replay need not tokenize (or decode images) again."""
    client: "CallClient | None" = None
    """Where its requests go, once its model's handlers are there."""
    turn: Turn | None = None
    session: Session | None = None
    """Where it goes on, if it is a part of a session."""
    requests: list[EngineRequest] = field(default_factory=list)
    begun: Progress | None = None
    """What it has said elsewhere, where it goes on from there."""
    continued: int = 0
    """How many tokens of that its requests have taken over."""
    events: int = 0
    """Of a stream: how many events were handed on, here and elsewhere."""
    told: int = 0
    """How many of them by when its handler last asked for more."""
    live: bool = True
    """Its handler is past what was said elsewhere: what it streams now is new."""
    started: float = field(default_factory=time.monotonic)
    _replayed: deque[EngineRequest] | None = None

    async def abort(self) -> None:
        """End it: what its requests have becomes their final output, and its handler answers with that."""
        self.aborted = True
        self.ending.set()
        if self.session is not None:
            await self.session.stir()
        if self.client is not None:
            await self.client.abort([request.id for request in self.requests])

    def tokens(self) -> int:
        """Tokens generated so far, by the frontend's own count."""
        if self.client is None:
            return 0
        return sum(request.tokens for request in self.requests)

    @property
    def longest(self) -> int | None:
        """Tokens of its longest sample; None where its requests tell no sample's: a beam search's, a session's."""
        if self.beams or self.session is not None:
            return None
        return max((request.longest for request in self.requests), default=0)

    @property
    def history(self) -> tuple[int, ...]:
        """How many tokens it had each time that a run went on with it, this one included."""
        before = () if self.begun is None else self.begun.continued
        return (*before, self.continued) if self.continued else before

    def progress(self) -> Progress | None:
        """What it has said, here and elsewhere; None where that is nothing, or can't be gone on with."""
        if self.client is None or not self.requests:
            return self.begun
        if (
            self.aborted
            or self.beams
            or self.drawn
            or self.session is not None
            or (self.streamed and len(self.requests) > 1)
        ):
            return None
        if any(self.client.obstacle(request) for request in self.requests):
            return None
        found = {begun.id: begun for begun in (self.begun.requests if self.begun is not None else ())}
        for request in self.requests:
            begun = self.client.said(request, streamed=self.streamed)
            if begun is not None and (request.id not in found or begun.tokens > found[request.id].tokens):
                found[request.id] = begun
        requests = tuple(found.values())
        progress = Progress(
            call=self.id,
            engine=self.client.fingerprint,
            requests=requests,
            events=self.told,
            continued=self.history,
        )
        return progress if progress.tokens else None

    def replay(self) -> None:
        """From here on the engine's outputs are repeated instead of generated."""
        self._replayed = deque(self.requests)

    @property
    def replaying(self) -> bool:
        return self._replayed is not None

    def repeated(self) -> Any:
        """The outputs of the next engine request, as one. The handler asks in the same order as the first time."""
        assert self._replayed is not None
        return self._replayed.popleft().merged

    def check_beams(self) -> None:
        """Raise CallAborted where an abort reached a beam search, of which no part can be answered."""
        if self.cut and self.beams:
            raise CallAborted

    def check_pooled(self) -> None:
        """Raise CallAborted where an abort reached a pooling request: half a vector is no answer."""
        if self.aborted:
            raise CallAborted

    def note(self, request: EngineRequest, output: Any) -> None:
        """Take notice of an output of the engine, before the handler does."""
        self.cut = self.cut or any(completion.finish_reason == "abort" for completion in output.outputs)
        whole = output
        if self.streamed:
            if request.merged is None:
                request.merged = own(output)
            else:
                request.merged.add(own(output), aggregate=True)
            whole = request.merged
        said = [len(completion.token_ids) for completion in whole.outputs]
        request.generated, request.longest = sum(said), max(said, default=0)
        self.live = self.live or output.finished or sum(each.generated for each in self.requests) > self.continued
        if self.first_token_s is None and self.live and any(completion.token_ids for completion in output.outputs):
            since_start = time.monotonic() - self.started
            # A session's request keeps the time of its first part.
            latency = None if self.session is not None else vllm_frontend.first_token_latency(output)
            self.first_token_s = latency or since_start

    def handled(self, request: EngineRequest, output: Any) -> None:
        """Its handler asks for more: what it made of an output is on its way. How it ends may not be, yet."""
        if self.streamed and not output.finished:
            request.told = {each.index: len(each.token_ids) for each in request.merged.outputs}
            self.told = self.events


def own(output: Any) -> Any:
    """A copy of an engine's output that may be added to: the handler reads the original."""
    output = copy(output)
    output.outputs = [copy(completion) for completion in output.outputs]
    for completion in output.outputs:
        completion.token_ids = list(completion.token_ids)
        completion.logprobs = copy(completion.logprobs)
    return output


class CallClient:
    """The engine client of one alias' handlers: its AsyncLLM, with the call's requests noted."""

    def __init__(self, llm: Any, constraints: ModelConstraints) -> None:
        self._llm = llm
        self._constraints = constraints
        model = llm.vllm_config.model_config
        self.fingerprint = vllm_progress.fingerprint(llm.vllm_config, identity(model.model, model.revision))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def obstacle(self, request: EngineRequest) -> str | None:
        """Why a request is always begun anew."""
        if not current().continues:
            return "this device's runner knows nothing of a new request but its prompt"
        return vllm_progress.obstacle(self._llm.vllm_config, request.parameters)

    def said(self, request: EngineRequest, *, streamed: bool) -> Begun | None:
        """What a request has said; of a stream, what was told of it."""
        whole = request.merged if streamed else next(iter(request.states), None)
        if whole is None:
            return None
        sequences = said.of_output(whole, request.told) if streamed else said.of_states(request.states)
        request.prompt = request.prompt or said.digest(whole.prompt_token_ids or (), request.adapter, request.features)
        return said.begun(request.id, request.prompt, sequences, whole.num_cached_tokens or 0)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        run = RUN.get()
        if run is not None and run.replaying:
            yield run.repeated()
            return
        if run is None:
            await self._constraints.check(sampling_params)
            async with aclosing(self._llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    check_outcome(output)
                    yield output
            return
        if run.session is not None and run.turn is not None:
            part = self._part(run, run.session, run.turn, prompt, sampling_params, request_id, options)
            try:
                async with aclosing(part) as outputs:
                    async for output in outputs:
                        yield output
            except Exception as error:
                run.failure = error
                raise
            return
        request = self._begin(run, request_id)  # before it waits for anything: a replay keeps to the handler's order
        request.parameters = sampling_params
        await self._constraints.check(sampling_params, run.ending, run.tenant)
        if run.aborted:
            run.cut = True
            yield self._nothing(run, request, prompt, sampling_params)
            return
        options["priority"] = run.priority
        try:
            async with aclosing(self._llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    check_outcome(output)
                    run.note(request, output)
                    run.check_beams()
                    yield output
                    run.handled(request, output)
        except Exception as error:
            run.failure = error
            raise

    async def _part(
        self,
        run: Run,
        session: Session,
        turn: Turn,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:
        """One part of a session: its outputs where the answer is streamed, else all of them as one."""
        await self._constraints.check(sampling_params, run.ending, run.tenant)
        if run.beams or run.requests:
            raise ValueError("A part of a session is one prompt, without beam search")
        await session.turn(turn.part, lambda: run.aborted)
        request = self._begin(run, session.request_id or request_id)
        request.shared = True
        if run.aborted:
            run.cut = True
            yield self._nothing(run, request, prompt, sampling_params)
            return
        options["priority"] = run.priority
        adapter = options.get("lora_request")
        engine = self.fingerprint if adapter is None else f"{self.fingerprint} {said.digest((), adapter)}"
        outputs = session.generate(self._llm, turn, prompt, sampling_params, request_id, engine=engine, **options)
        whole, generated = None, 0
        async with aclosing(outputs):
            async for output in outputs:
                check_outcome(output)
                run.note(request, output)
                request.generated = generated = generated + sum(len(each.token_ids) for each in output.outputs)
                if run.streamed:
                    yield output
                elif whole is None:
                    whole = own(output)
                else:
                    whole.add(own(output), aggregate=True)
        if whole is not None:
            whole.finished = True
            yield whole

    async def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        run = RUN.get()
        if run is not None:
            self._begin(run, request_id)
            options["priority"] = run.priority
        try:
            async with aclosing(self._llm.encode(prompt, pooling_params, request_id, **options)) as outputs:
                async for output in outputs:
                    if run is not None:
                        run.check_pooled()
                    yield output
        except Exception as error:
            if run is not None:
                run.failure = error
            raise

    @staticmethod
    def _begin(run: Run, request_id: str) -> EngineRequest:
        request = EngineRequest(request_id)
        run.requests.append(request)
        return request

    @staticmethod
    def _nothing(run: Run, request: EngineRequest, prompt: Any, sampling_params: Any) -> Any:
        """What a request that was aborted before the engine had it comes to."""
        run.check_beams()
        output = vllm_frontend.aborted_output(request.id, prompt, sampling_params)
        run.note(request, output)
        return output
