"""Reading requests as a member of the group, and settling each exactly once."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

import structlog
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError

from schemas.base import Origin, Record
from schemas.progress import Progress
from service.consumer.asked_once import AskedOnce
from service.consumer.assignor import Placement
from service.consumer.committed import CommittedLedgers
from service.consumer.encoding import settle_in_turn
from service.consumer.in_flight import BYTES_PER_TOKEN, InFlight, Limits
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.liveness import Liveness
from service.consumer.membership import leave, new_member
from service.consumer.outage import Outage
from service.consumer.parked import ParkedScan, scanning_consumer
from service.consumer.partitions import OwnedPartitions
from service.consumer.polling import Polling
from service.consumer.progress_topic import PartitionProgress, ProgressTopic
from service.consumer.rates import Rates
from service.consumer.transactions import PartitionTransactions
from service.consumer.writer import LedgerWriter
from service.errors import BrokerUnavailable
from service.kafka.calls import Calls
from service.kafka.connection import answers, close_consumer, start
from service.kafka.reply_topics import ReplyTopics
from service.kafka.topics import ensure_topics
from service.ports import Holdings, Moved, Received, Say, Settled, SourceState
from service.settings import Settings, read_keys

log = structlog.get_logger(__name__)

_REVOKED_FLUSH_S = 2.0
_CLOSING_FLUSH_S = 5.0
_AT_ONCE = 32
"""Partitions that are fenced or committed to at the same time, of the hundreds that a worker may have."""
_STRAYS_AGAIN_S = 60.0
_MARK_DELAY_S = 0.05
"""A start mark waits this long for a settlement that takes it along."""


class RequestConsumer(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Requests in, settlements out: the ports RequestSource and Settlements. Opened with ``async with``.

    It is the member of the group; ``OwnedPartitions`` has the writers, ``Polling`` the positions, ``Liveness`` what
    has not moved. ``holdings`` is what it tells the group of itself, so that it is given what it has the models for.
    With ``calls`` the topic of durable calls is read, too, each call once however often it was asked.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        aliases: Collection[str],
        holdings: Callable[[], Holdings] = Holdings,
        calls: Calls | None = None,
    ) -> None:
        worker = settings.worker
        self._settings = settings
        self._keys = read_keys(settings.worker.pool_key_file, "pool_key_file")
        self._aliases = tuple(aliases)
        self._ledgers_topic = LedgersTopic(settings=settings)
        self._progress_topic = ProgressTopic(settings=settings)
        self._replies = ReplyTopics(kafka=settings.kafka, topics=settings.topics)
        self._committed = CommittedLedgers(settings=settings, ledgers_topic=self._ledgers_topic)
        self._rates = Rates()
        self._load: Callable[[str, float], float] = _requests_alone
        self._assignor = Placement(alias_of=settings.topics.alias_of, holdings=holdings, loads=self._loads)
        self._consumer = new_member(settings, self._assignor)
        in_flight = InFlight(
            Limits(requests=worker.max_waiting, bytes=worker.max_waiting_bytes, tokens=worker.max_waiting_tokens)
        )
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        writers: dict[TopicPartition, LedgerWriter] = {}
        self._polling = Polling(
            consumer=self._consumer,
            writers=writers,
            in_flight=in_flight,
            committed=self._committed,
            shared_topics=settings.topics.for_all,
            rates=self._rates,
        )
        self._owned = OwnedPartitions(
            writers=writers, open_writer=self._open_writer, in_flight=in_flight, acquired=self._polling.acquired
        )
        self._asked_once: AskedOnce | None = None
        if calls is not None:
            self._asked_once = AskedOnce(calls=calls, pass_over=self._owned.pass_over, wake=self._polling.wake)
        self._liveness = Liveness(
            consumer=self._consumer, owned=self._owned, polling=self._polling, in_flight=in_flight
        )
        self._outage = Outage(answers=partial(answers, settings.kafka), stuck_s=lambda: self._liveness.stuck()[1])
        self._parked_scan = ParkedScan(
            open_consumer=partial(scanning_consumer, settings.kafka),
            parked=self._polling.parked,
            deliver=self._polling.pick,
        )
        self._strays_known = False
        self._hand_over: Callable[[], None] = lambda: None
        self._background: tuple[asyncio.Task[None], ...] = ()
        self._generation = -1
        self._rebalances = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._committed.open()
            await start(self._consumer)
        except (KafkaError, OSError, BrokerUnavailable) as error:
            await self._committed.close()
            await close_consumer(self._consumer)
            raise BrokerUnavailable(f"no broker at {self._settings.kafka.bootstrap_servers}: {error}") from error
        self._background = (
            asyncio.create_task(self._parked_scan.run(), name="parked scan"),
            asyncio.create_task(self._outage.run(), name="outage"),
            asyncio.create_task(self._find_strays_later(), name="strays"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._polling.stop()
        for task in self._background:
            task.cancel()
        await self._owned.flush(within_s=_CLOSING_FLUSH_S)
        await self._owned.close()
        await leave(self._consumer)
        await asyncio.wait(self._background)
        self._polling.close()
        await self._committed.close()

    # --- the port RequestSource ---

    async def receive(self) -> Received:
        """The next deliveries, and the origins of work that is another worker's now. Never cancel it.

        The first call joins the group, with what ``serve_only`` and ``holdings`` say by then.
        What was lost was lost before the deliveries: an origin in both is to be aborted, and begun anew.
        Raises Stalled, PositionLost, BrokerUnavailable, and whatever ended a writer.
        """
        if self._owned.failure is not None:
            raise self._owned.failure
        if not self._consumer.subscription():
            await self._find_strays()
            self._subscribe()
        for task in self._background:
            if task.done():
                task.result()
        deliveries = await self._polling.turn()
        self._liveness.look()
        unreadable, lost = self._polling.take_unreadable(), self._owned.take_lost()
        if self._asked_once is not None:
            deliveries = self._asked_once.sift(deliveries, lost)
        return Received(deliveries=deliveries, lost=lost, unreadable=unreadable)

    def serve_only(self, aliases: Collection[str] | None) -> None:
        """Read the per-model topics of these aliases only (None: of all). The shared topic is always read.

        So are those of models that nobody has, whose requests are to be told so.
        """
        read = None if aliases is None else {*map(self._settings.topics.for_alias, aliases), *self._assignor.strays}
        self._polling.serve_only(read)
        self._assignor.serves = None if aliases is None else frozenset(aliases)

    def hold_back(self, partitions: Collection[tuple[str, int]]) -> None:
        """Read these partitions no further until this is called without them."""
        self._polling.hold_back(partitions)

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        """Hand parked requests over when they are ``due``, and look at all of them (again) for that."""
        self._parked_scan.look_again(due)

    def before_rebalance(self, hand_over: Callable[[], None]) -> None:
        """Call this before partitions may become another worker's."""
        self._hand_over = hand_over

    def weigh(self, load: Callable[[str, float], float]) -> None:
        """Tell the group a model's requests by this: the seconds of a device per second that they ask for."""
        self._load = load

    def place_anew(self, missed: Mapping[str, float]) -> None:
        """Have the group place everything anew, by what its members say now; one that is alone in it has all."""
        if not self._consumer._subscription.reassignment_in_progress and not self._assignor.alone:
            log.info("placement.asked", missed={alias: round(part, 3) for alias, part in missed.items()})
            self._consumer._coordinator.request_rejoin()

    async def follow(self, aliases: Collection[str]) -> None:
        """Read the topics of these aliases from now on; the group rebalances where that is a change.

        Raises TopicError, BrokerUnavailable.
        """
        if tuple(aliases) != self._aliases:
            await ensure_topics(self._settings, aliases)
            self._aliases = tuple(aliases)
            await self._find_strays()
            self._subscribe()

    async def stop(self) -> None:
        """Read nothing more; partitions stay assigned, so that running work can be settled."""
        self._polling.stop()

    def owned_calls(self) -> frozenset[int]:
        """The partitions of the topic of calls that are ours."""
        return frozenset(self._owned.partitions().get(self._settings.topics.named(self._settings.topics.calls), ()))

    def state(self) -> SourceState:
        """How reading stands."""
        lag = self._liveness.lag()
        sizes = {topic: self._rates.mean(topic) / BYTES_PER_TOKEN for topic in lag}
        stuck, stuck_s = self._liveness.stuck()
        return SourceState(
            joined=self._rebalances > 0,
            rebalances=self._rebalances,
            partitions=self._owned.partitions(),
            lag=lag,
            lag_tokens={topic: round(unread * sizes[topic]) for topic, unread in lag.items()},
            transaction_open_s=self._liveness.transaction_open_s(),
            overtaken=self._polling.overtaken,
            unreadable=self._polling.unreadable,
            forgotten=self._committed.forgotten,
            stuck=stuck,
            stuck_s=self._outage.without(stuck_s),
            full_s=self._outage.without(self._liveness.full_s()),
            away_s=self._outage.away_s,
        )

    # --- the port Settlements ---

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        """Mark a run as started; one that is alone waits until that is committed. False: it is not ours to run."""
        return await self._owned.started(origin, alone=alone)

    def engine_died(self, culprit: Origin | None) -> None:
        """The engine died, and this worker did not: ``culprit`` had it to itself, and no other run had."""
        self._owned.engine_died(culprit)

    def withdraw(self, origin: Origin) -> None:
        """Take a start mark back."""
        self._owned.withdraw(origin)

    def keep(self, origin: Origin, say: Say) -> None:
        """Keep what a run has said, for whoever owns its partition next; it is asked when that is written."""
        self._owned.keep(origin, say)

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        """What a session had come to when this part of it was asked for, by whoever answered the parts before."""
        return self._owned.session(origin, name, part)

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        """Keep what a session has come to, in the transaction that settles this part of it."""
        self._owned.keep_session(origin, progress)

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        """Publish ``settlement`` in the first form that the broker takes, and finish ``origin``, both or none.

        Returns that form; None: another worker's to do. Raises RecordRefused for a request that can't be moved,
        Stalled for a result of which the broker takes nothing.
        """
        commit = partial(self._owned.settle, origin, hurry=not isinstance(settlement, Moved))
        return await settle_in_turn(origin, settlement, self._settings.topics, commit, self._replies, keys=self._keys)

    async def flush(self) -> None:
        """Commit everything that waits, attempt marks too; with brokers that do not answer, not for ever."""
        await self._owned.flush(within_s=_CLOSING_FLUSH_S)

    # --- what the group says; aiokafka calls these between two generations ---

    async def on_partitions_revoked(self, _revoked: Iterable[TopicPartition]) -> None:
        """Commit what is finished; work goes on until the new assignment says what is lost.

        What will be lost does not die of that, so no run is blamed for ending now; its new owner goes on with it.
        """
        self._hand_over()
        for writer in self._owned.writers.values():
            writer.leave_marks_out()
        await self._owned.flush(within_s=_REVOKED_FLUSH_S)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Pause everything, give up what did not come back, take over what is new."""
        if self._closed:
            return  # the group's last word to one that leaves: what it would begin now would fence the next owners
        try:
            self._reassign(set(assigned))
        except Exception as error:  # aiokafka would only log it
            log.exception("bus.assignment_failed")
            self._owned.failure = error

    def _reassign(self, assigned: set[TopicPartition]) -> None:
        generation = self._consumer._coordinator.generation
        missed = generation != self._generation + 1
        self._generation = self._assignor.generation = generation
        self._rebalances += 1
        self._rates.own(assigned)
        self._polling.assigned(assigned)
        self._owned.reassign(assigned, missed=missed)
        self._polling.wake()  # what is lost is to be told at once
        log.info("bus.assigned", generation=generation, partitions=len(assigned))

    # --- inside ---

    def _loads(self) -> dict[str, float]:
        """What requests ask for here, by topic of a model."""
        per_s = self._rates.per_s(self._liveness.lag())
        models = {topic: alias for topic in per_s if (alias := self._settings.topics.alias_of(topic)) is not None}
        return {topic: self._load(alias, per_s[topic]) for topic, alias in models.items()}

    async def _find_strays(self) -> None:
        """Of models that were removed, requests are left in their topics, and producers may write more."""
        topics = self._settings.topics
        try:
            known, self._strays_known = await self._committed.topics(), True
        except BrokerUnavailable as error:
            log.warning("bus.strays_unknown", reason=str(error), again_s=_STRAYS_AGAIN_S)
            known, self._strays_known = frozenset(), False
        own = {*map(topics.for_alias, self._aliases)}
        models = {name for name in known | self._consumer.subscription() if topics.alias_of(name) is not None}
        self._assignor.strays = frozenset(models - own)
        self.serve_only(self._assignor.serves)

    async def _find_strays_later(self) -> None:
        """As long as nobody could say which there are."""
        while True:
            await asyncio.sleep(_STRAYS_AGAIN_S)
            if self._consumer.subscription() and not self._strays_known:
                before = self._assignor.strays
                await self._find_strays()
                if self._assignor.strays != before:
                    self._subscribe()

    def _subscribe(self) -> None:
        topics = self._settings.topics
        shared = (topics.requests, topics.throttled)
        names = [*map(topics.named, shared), *map(topics.for_alias, self._aliases), *self._assignor.strays]
        if self._asked_once is not None:
            names.append(topics.named(topics.calls))
        self._consumer.subscribe(names, listener=self)

    def _open_writer(
        self, partition: TopicPartition, acquired: Callable[[LedgerWriter, frozenset[int]], None]
    ) -> LedgerWriter:
        worker = self._settings.worker
        return LedgerWriter(
            partition=partition,
            transactions=PartitionTransactions(
                settings=self._settings,
                partition=partition,
                ledgers_topic=self._ledgers_topic,
                at_once=self._at_once,
                hanging=self._committed.hanging,
            ),
            read_ledger=partial(self._committed.ledger, partition),
            progress=PartitionProgress(self._progress_topic, partition, most=self._settings.topics.max_message_bytes),
            acquired=acquired,
            fenced=self._consumer._coordinator.request_rejoin,
            pause_s=worker.group_commit_s,
            mark_delay_s=_MARK_DELAY_S,
            max_record_bytes=self._settings.topics.max_message_bytes,
        )


def _requests_alone(_alias: str, requests_per_s: float) -> float:
    """What a model asks for where nobody knows what its requests take."""
    return requests_per_s
