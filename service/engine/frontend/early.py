"""Requests that wait for their model's first load: known, counted and aborted like all others."""

import asyncio
import functools
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from service.engine.versions import vllm_frontend


class Early(dict[str, tuple[str, int, asyncio.Future[None]]]):
    """Requests that wait for their model's first load: by a name of their own, the caller's id, how many answers each
    is to have, and how it ends.
    """

    @property
    def count(self) -> int:
        """As many as vLLM will count them as."""
        return sum(samples for _, samples, _ in self.values())

    @contextmanager
    def entered(self, request_id: str, samples: int) -> Iterator[asyncio.Future[None]]:
        """Inside, a request can be ended: what is yielded is done then."""
        name = f"{request_id}-{uuid.uuid4().hex}"
        self[name] = request_id, samples, (ended := asyncio.get_running_loop().create_future())
        try:
            yield ended
        finally:
            del self[name]

    def abort(self, ids: Collection[str], *, internal: bool) -> None:
        """End requests, by their own names or by the ids that their callers gave them."""
        for name, (request_id, _, ended) in self.items():
            if (name if internal else request_id) in ids and not ended.done():
                ended.set_result(None)

    def end(self, error: BaseException) -> None:
        """End all of them with an error."""
        for _, _, ended in self.values():
            if not ended.done():
                ended.set_exception(error)


@functools.cache
def early_llm() -> Any:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    class EarlyLLM(AsyncLLM):
        """vLLM's AsyncLLM, which knows requests also as long as they wait for their model's first load.

        Before it makes a request vLLM asks what the model can do, which is answered when that is loaded.
        """

        def __init__(self, early: Early, **given: Any) -> None:
            self._early = early
            try:
                super().__init__(**given)
            except BaseException:
                self.engine_core = None  # it would be ended with this, and the next model needs it
                self.shutdown()
                raise

        @functools.wraps(AsyncLLM.add_request)
        async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            asks_first = not (hasattr(self, "_supported_tasks") or isinstance(prompt, EngineCoreRequest))
            if asks_first and await self._ended_early(request_id, getattr(params, "n", 1)):
                collector = RequestOutputCollector(params.output_kind, request_id)
                collector.put(vllm_frontend.aborted_output(request_id, prompt, params))
                return collector
            return await super().add_request(request_id, prompt, params, *args, **kwargs)

        def get_num_unfinished_requests(self) -> int:
            return int(super().get_num_unfinished_requests()) + self._early.count

        async def _ended_early(self, request_id: str, samples: int) -> bool:
            """Wait until the model can be asked. Whether the request was aborted before.

            Raises what ended it, or that the model takes no more: vLLM counts it itself once it is here no longer.
            """
            if hasattr(self, "check_admission"):  # 0.32
                self.check_admission(samples, request_id)
            tasks = asyncio.ensure_future(self.get_supported_tasks())
            tasks.add_done_callback(lambda done: done.cancelled() or done.exception())
            with self._early.entered(request_id, samples) as ended:
                try:
                    await asyncio.wait({tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    tasks.cancel()
                if not ended.done():
                    tasks.result()
                    return False
            ended.result()
            return True

        async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
            ids = [request_id] if isinstance(request_id, str) else list(request_id)
            self._early.abort(ids, internal=internal)
            await super().abort(ids, internal)

    return EarlyLLM
