"""What became of a request, told to everyone who is to know: the bus, the metrics, the request's trace."""

import time
from dataclasses import replace

import structlog

from schemas.base import Record
from schemas.requests import Refusal
from service.errors import RecordRefused
from service.ports import Answer, Moved, Settlements, Watcher
from service.worker import settlements as made
from service.worker.jobs import Job
from service.worker.tracing import Tracing

log = structlog.get_logger(__name__)


class Publisher:
    """Settles jobs and refusals. Raises Stalled where the bus takes no result at all."""

    def __init__(self, *, settlements: Settlements, watcher: Watcher, tracing: Tracing, worker: str) -> None:
        self._settlements = settlements
        self._watcher = watcher
        self._tracing = tracing
        self._worker = worker

    async def settle(self, job: Job, partial: Answer | None = None) -> None:
        """Publish a job's end, in the transaction that finishes its request, unless that is another worker's now."""
        settlement = made.settlement(job, worker=self._worker, partial=partial)
        if trace := self._tracing.headers(job):
            settlement = replace(settlement, trace=trace)
        ready = time.monotonic()
        settled = await self._settlements.settle(job.origin, settlement)
        took = time.monotonic() - ready
        if settled is None:
            self._tracing.dropped(job)
        else:
            self._watcher.settled(settled, alias=job.alias, publish_s=took)
            self._tracing.published(job, settlement.result, took_s=took)

    async def refuse(self, refusal: Refusal, record: Record) -> None:
        """Answer a record that is no valid request. What it says of it is for who asked: it may quote a header."""
        log.info("request.refused", request_id=refusal.id, failure=refusal.failure.value, param=refusal.error.param)
        ready = time.monotonic()
        settled = await self._settlements.settle(record.origin, made.refused(refusal, record, worker=self._worker))
        if settled is not None:
            took = time.monotonic() - ready
            self._watcher.settled(settled, alias="", publish_s=took)

    async def move(self, job: Job, topic: str, key: bytes | None) -> bool:
        """Send a job's request to another topic; False: the bus won't have it there."""
        try:
            await self._settlements.settle(job.origin, Moved(job.record, job.request, topic, job.deaths, key))
        except RecordRefused as refused:
            log.warning("request.not_moved", reason=str(refused), request_id=job.request.id)
            return False
        self._tracing.dropped(job)
        return True

    def dropped(self, job: Job) -> None:
        """A job ends without a result of ours."""
        self._tracing.dropped(job)

    def lost(self, job: Job) -> None:
        """A job is another worker's now, or nobody wants it any more."""
        log.info("request.lost", request_id=job.request.id, origin=str(job.origin))
        self._watcher.lost(job.alias)

    def repeated(self, job: Job, *, why: str) -> None:
        """A run ended without a result, and there will be another."""
        self._watcher.repeated(job.alias, why=why)
