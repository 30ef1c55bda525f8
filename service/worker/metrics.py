"""What the worker does, as Prometheus metrics: counted as it is told, measured as it stands when somebody asks.

Labels take aliases, tiers, modes and other words of ours, never what a producer wrote.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from schemas.contexts import Tier
from schemas.objectives import Objective
from schemas.results import Result
from schemas.status import TERMINAL, UNREADY, Presence, QueueInfo, Status
from service.ports import Settlement, SourceState, Watcher
from service.worker.series import Counters, Histograms

UNKNOWN = "unknown"
"""The model of a request that names none of ours."""
OTHERS = "(others)"
"""All tenants that the quotas do not name."""
STATES = ("starting", "loading", "serving", "paused", "draining", "unhealthy", "disconnected")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_SWITCH_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120)


@dataclass(frozen=True)
class Standing:
    """The worker as it stands, for the gauges."""

    presence: Presence
    held: int = 0
    """Requests in this worker's hands."""
    active_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each model has been active."""
    switching_s: float = 0.0
    serving_s: float = 0.0
    """Seconds in which the active model had something to do."""
    stalled_s: float = 0.0
    objectives: Mapping[str, Mapping[str, Objective]] = field(default_factory=dict)
    """By model and class."""
    source: SourceState = field(default_factory=SourceState)
    throttled: int = 0
    """Of the requests in its hands, those that wait for their tenants' quotas."""
    throttled_moved: int = 0
    """How many were moved to wait for that in the topic ``throttled``."""


class Metrics(Watcher):
    """A registry of its own, so that there may be several workers in one process.

    ``tenants`` gives those that are told apart: the ones that the quotas name.
    """

    def __init__(self, tenants: Callable[[], Collection[str]] = tuple) -> None:
        self._tenants = tenants
        disable_created_metrics()  # type: ignore[no-untyped-call]  # as many series again, for nobody
        self.registry = CollectorRegistry()
        self._gauges: _Gauges | None = None
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counters:
            return Counters(f"gearshift_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histograms:
            return Histograms(f"gearshift_{name}", text, labels, bounds=buckets, registry=self.registry)

        begun = Gauge("gearshift_start_time_seconds", "When the start of the engine began.", registry=self.registry)
        begun.set_to_current_time()
        self._requests = counter("requests", "Requests settled, by model and outcome.", "model", "outcome")
        self._failures = counter("request_failures", "Requests that failed, by their class.", "model", "failure")
        self._dead = counter("dead_letters", "Requests kept as dead letters, by their class.", "failure")
        self._repeats = counter("request_repeats", "Runs that ended without a result.", "model", "why")
        self._attempts = histogram(
            "request_attempts", "Runs that a settled request had.", "model", buckets=(1, 2, 3, 5)
        )
        self._lost = counter(
            "requests_lost", "Requests given up to another worker, or by callers before they ran.", "model"
        )
        self._tokens = counter("tokens", "Tokens of settled requests, by their usage.", "model", "kind")
        self._tenant_tokens = counter(
            "tenant_tokens", "Tokens of settled requests, by tenant that the quotas name.", "tenant", "kind"
        )
        text = "How long settled requests ran on the device, by tenant that the quotas name."
        self._tenant_running = counter("tenant_running_seconds", text, "tenant")
        self._latency = histogram("request_latency_seconds", "From the request's record until its result.", "model")
        phased = ("model", "phase")
        self._phases = histogram("request_phase_seconds", "The same by phase, of the requests that had it.", *phased)
        self._freezes = histogram("request_freeze_seconds", "Stays of a running request in an inactive model.", "model")
        self._objectives = counter(
            "objectives",
            "Requests by whether they met their objective, and why not.",
            *("model", "class", "met", "missed_by"),
        )
        self._control = counter("control_events", "Control events answered, by kind and state.", "kind", "state")
        ways = ("from_model", "to_model", "tier", "mode")
        self._switches = counter("switches", "Switches done; tier: where the model was found.", *ways)
        self._switch_failures = counter("switch_failures", "Switches that did not happen.", "to_model")
        self._switch_kept = counter("switch_requests", "Requests that switches froze or aborted.", "from_model", "fate")
        buckets = _SWITCH_SECONDS
        self._switch = histogram("switch_seconds", "A switch, asked until done.", "tier", "mode", buckets=buckets)
        self._stall = histogram("switch_stall_seconds", "Its part without a step.", "tier", "mode", buckets=buckets)
        self._switch_phases = histogram("switch_phase_seconds", "Its phases.", "tier", "phase", buckets=buckets)

    # --- what is told ---

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:
        """How a request ended is committed."""
        model, result, usage = alias or UNKNOWN, settlement.result, settlement.usage or {}
        self._requests.count(model, str(result.outcome))
        failure = UNKNOWN if result.failure is None else str(result.failure)
        if result.outcome == "failed":
            self._failures.count(model, failure)
        if settlement.dead is not None:
            self._dead.count(failure)
        self._attempts.observe(result.attempt.n, model)
        self._latency.observe(result.timing.latency_s, model)
        for phase, seconds in phases(result, publish_s).items():
            if seconds:
                self._phases.observe(seconds, model, phase)
        for freeze in result.timing.freezes:
            self._freezes.observe(freeze.seconds, model)
        if (reached := result.objective) is not None:
            met = "true" if reached.met else "false"
            self._objectives.count(model, reached.request_class, met, reached.missed_by or "")
        tenant = usage["tenant"] if usage.get("tenant") in self._tenants() else OTHERS
        for kind, tokens in (("prompt", "prompt_tokens"), ("completion", "generated_tokens")):
            self._tokens.count(model, kind, by=usage.get(tokens, 0))
            self._tenant_tokens.count(tenant, kind, by=usage.get(tokens, 0))
        self._tenant_running.count(tenant, by=usage.get("running_s", 0.0))

    def repeated(self, alias: str, *, why: str) -> None:
        """A run is to be repeated."""
        self._repeats.count(alias, why)

    def lost(self, alias: str) -> None:
        """A request has gone."""
        self._lost.count(alias or UNKNOWN)

    def status(self, status: Status) -> None:
        """A control event is answered, or a switch has ended."""
        if status.state not in TERMINAL:
            return
        if status.control_id is not None:
            self._control.count(status.kind, status.state.value)
        if status.kind != "switch":
            return
        if status.state in {"failed", "rolled_back"}:
            self._switch_failures.count(status.model or UNKNOWN)
        report = status.switch
        if report is None or status.state != "completed":
            return
        left, tier, mode = report.from_model or UNKNOWN, report.tier_found.value, report.mode.value
        self._switches.count(left, report.to_model, tier, mode)
        self._switch.observe(report.ms / 1e3, tier, mode)
        self._stall.observe(report.stall_ms / 1e3, tier, mode)
        self._switch_kept.count(left, "kept", by=report.kept)
        self._switch_kept.count(left, "aborted", by=report.aborted)
        for phase, ms in report.phases_ms.items():
            self._switch_phases.observe(ms / 1e3, tier, phase)

    # --- what stands ---

    def watch(self, standing: Callable[[], Standing]) -> None:
        """Measure the worker whenever the metrics are asked for; said again, another one in its place."""
        if self._gauges is not None:
            self.registry.unregister(self._gauges)
        self._gauges = _Gauges(standing)
        self.registry.register(self._gauges)

    def watch_engine(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        """Show the engine's own metrics too, with the alias as a label."""
        self.registry.register(_Labelled(registries))

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


def phases(result: Result, publish_s: float) -> dict[str, float]:
    """Where a request's time went, in seconds. Pure."""
    timing = result.timing
    found = dict(timing.waited_for)
    found["publish"] = publish_s
    if result.attempt.n and timing.first_token_s is not None:
        running = timing.latency_s - timing.waited_s
        found["first_token"] = timing.first_token_s - timing.frozen_first_s
        found["frozen"] = timing.frozen_s
        found["decode"] = max(0.0, running - found["first_token"] - timing.frozen_s)
    return found


class _Gauges:
    """A collector that reads the worker when it is asked."""

    def __init__(self, standing: Callable[[], Standing]) -> None:
        self._standing = standing

    def collect(self) -> Iterator[Metric]:
        standing = self._standing()
        yield from _queues(standing.presence)
        yield from _contexts(standing.presence)
        yield from _times(standing)
        yield from _bus(standing)


def _family(kind: type[Metric], name: str, text: str, labels: Iterable[str], values: Iterable[tuple]) -> Metric:  # type: ignore[type-arg]
    family = kind(f"gearshift_{name}", text, labels=tuple(labels))  # type: ignore[call-arg]
    for *words, value in values:
        family.add_metric(words, value)  # type: ignore[attr-defined]
    return family


def _queues(presence: Presence) -> Iterator[Metric]:
    queues = ({info.alias: QueueInfo() for info in presence.contexts} | presence.queues).items()
    model = ("model",)
    gauge = GaugeMetricFamily
    yield _family(gauge, "queue_requests", "Requests waiting.", model, ((a, q.waiting) for a, q in queues))
    yield _family(gauge, "queue_tokens", "Tokens they are taken for.", model, ((a, q.tokens) for a, q in queues))
    yield _family(gauge, "queue_oldest_seconds", "The longest wait.", model, ((a, q.oldest_s) for a, q in queues))
    yield _family(gauge, "running_requests", "Given to the engine.", model, ((a, q.running) for a, q in queues))


def _contexts(presence: Presence) -> Iterator[Metric]:
    contexts = presence.contexts
    gauge = GaugeMetricFamily
    yield _family(gauge, "model_active", "1 for the active model.", ["model"], ((c.alias, c.active) for c in contexts))
    tiers = ((c.alias, tier.value, c.tier is tier) for c in contexts for tier in Tier)
    yield _family(gauge, "context_tier", "1 for the tier a model is on.", ["model", "tier"], tiers)
    sizes = (
        (c.alias, kind, value)
        for c in contexts
        for kind, value in (("weights", c.weights_bytes), ("kv", c.kv_bytes), ("host", c.host_bytes))
    )
    yield _family(gauge, "context_bytes", "Memory that a model's context takes.", ["model", "kind"], sizes)
    stalls = ((c.alias, phase, seconds) for c in contexts for phase, seconds in c.stall_s.items())
    text = "The longest wait of another model's steps for what was last done to a model beside them."
    yield _family(gauge, "context_stall_seconds", text, ["model", "phase"], stalls)
    borrowed = ((c.alias, c.kv_borrowed_bytes) for c in contexts)
    text = "KV memory of other models that a model had when it was last left."
    yield _family(gauge, "context_kv_borrowed_bytes", text, ["model"], borrowed)
    waits = ((c.alias, c.kv_wait_s) for c in contexts)
    text = "The longest wait of a step for KV memory that other models had, when its model last ran."
    yield _family(gauge, "context_kv_wait_seconds", text, ["model"], waits)
    loras = ((c.alias, len(c.loras)) for c in contexts)
    yield _family(gauge, "loras", "LoRA adapters loaded.", ["model"], loras)


def _times(standing: Standing) -> Iterator[Metric]:
    active = standing.active_s.items()
    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield _family(counter, "model_active_seconds", "Time that a model has been active.", ["model"], active)
    yield _family(counter, "switching_seconds", "Time in which no model ran.", [], [(standing.switching_s,)])
    yield _family(counter, "serving_seconds", "Time in which the active model had work.", [], [(standing.serving_s,)])
    yield _family(gauge, "stalled_seconds", "Work is there and nothing moves.", [], [(standing.stalled_s,)])
    presence = standing.presence
    ready = standing.source.joined and presence.state not in UNREADY
    yield _family(gauge, "worker_ready", "1 where requests may be sent to.", [], [(ready,)])
    loading_s = 0.0 if presence.loading is None else presence.at - presence.loading.since
    yield _family(gauge, "loading_seconds", "For how long a model has been loading; 0: none is.", [], [(loading_s,)])
    shares = (
        (alias, name, objective.share)
        for alias, classes in standing.objectives.items()
        for name, objective in classes.items()
    )
    text = "How many of its requests are to meet its objective."
    yield _family(gauge, "objective_share", text, ["model", "class"], shares)
    states = ((state, standing.presence.state == state) for state in STATES)
    yield _family(gauge, "worker_state", "1 for the worker's state.", ["state"], states)
    yield _family(gauge, "build_info", "The version that runs.", ["version"], [(standing.presence.version, 1)])


def _bus(standing: Standing) -> Iterator[Metric]:
    counter, gauge, source = CounterMetricFamily, GaugeMetricFamily, standing.source
    yield _family(gauge, "held_requests", "Requests in this worker's hands.", [], [(standing.held,)])
    text = "Requests that wait until their tenant may have more."
    yield _family(gauge, "throttled_requests", text, [], [(standing.throttled,)])
    text = "Requests moved to the topic throttled, where they wait for that without holding up others."
    yield _family(counter, "throttled_requests_moved", text, [], [(standing.throttled_moved,)])
    partitions = ((topic, len(owned)) for topic, owned in standing.presence.partitions.items())
    yield _family(gauge, "partitions", "Partitions assigned to this worker.", ["topic"], partitions)
    yield _family(counter, "rebalances", "Assignments that the group has made.", [], [(source.rebalances,)])
    yield _family(gauge, "lag_requests", "Assigned and not read yet.", ["topic"], source.lag.items())
    yield _family(gauge, "lag_tokens", "About how many tokens these are.", ["topic"], source.lag_tokens.items())
    text = "For how long somebody's open transaction has hidden what lies behind it."
    seconds = dict.fromkeys(standing.presence.partitions, 0.0) | dict(source.transaction_open_s)
    yield _family(gauge, "transaction_open_seconds", text, ["topic"], seconds.items())
    yield _family(counter, "requests_overtaken", "Requests that retention took unread.", [], [(source.overtaken,)])
    yield _family(counter, "records_unreadable", "Records that can't be decoded.", [], [(source.unreadable,)])
    yield _family(counter, "offsets_forgotten", "Partitions whose offsets had expired.", [], [(source.forgotten,)])


class _Labelled:
    """Several registries as one, each sample with its alias."""

    def __init__(self, registries: Callable[[], Mapping[str, CollectorRegistry]]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for alias, registry in self._registries().items():
            for family in registry.collect():
                known = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [_with_alias(sample, alias) for sample in family.samples]
        yield from found.values()


def _with_alias(sample: Sample, alias: str) -> Sample:
    return sample._replace(labels={**sample.labels, "alias": alias})
