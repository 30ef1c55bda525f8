"""Constraints of answers (regex, JSON schema, grammar) are tried in a process that may be lost.

vLLM parses a constraint on the loop that calls it, and compiles it in the engine core, with no end to either's time or
memory. Here both are done before, as vLLM does them, in a process of their own: the system ends it where it takes more
processor time than it may, and gives it no more memory than that. The processes are forked from one that has the
models' tokenizers, so that a trial costs two forks and what the constraint itself costs: its own, and that of a process
which waits for it and says how it ended. What a busy machine or somebody else ended says nothing of a constraint.
"""

import ctypes
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import cloudpickle
import structlog

from service.engine.processes.fork_server import server
from service.engine.system.environment import environment_of

log = structlog.get_logger(__name__)

PARSE_S = 1.0
"""Processor time for parsing: for as long, the loop that carries heartbeats waits for vLLM when it does it again."""
WAIT_S = 60.0
"""How long a trial may take in all: on a machine that is busier than that, it can't be made."""
LOAD_S = 120.0
"""How long the process of the trials may take to start and to load what a model needs."""
_LOAD, _TRY = b"l", b"t"
_PLUGINS = "VLLM_PLUGINS"
_PR_SET_PDEATHSIG = 1
_TOOK_TOO_MUCH = 1
_BY_OTHERS = {-signal.SIGKILL, -signal.SIGALRM, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""How a trial ends that is no verdict: the system had too little memory, the time was over, or it was stopped."""


class Verdict(StrEnum):
    """What came of a trial: where it went beyond its limits, or that vLLM takes it, or refuses it, within them."""

    FIT = "fit"
    PARSING = "parsing"
    COMPILING = "compiling"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one constraint may take."""

    cpu_s: float
    memory_bytes: int
    wait_s: float = WAIT_S


class Trials:
    """The process that trials are forked from: started when it is first needed, and again where it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configs: dict[str, Any] = {}
        self._started: _Started | None = None

    def add(self, model: str, config: Any) -> None:
        """``config`` is vLLM's, of a model whose constraints may be tried from now on. Waits for no trial."""
        self._configs[model] = config

    def remove(self, model: str) -> None:
        """No constraints of this model are tried any more. Waits for no trial."""
        self._configs.pop(model, None)

    def judge(self, model: str, constraint: Any, limits: Limits) -> Verdict:
        """Try vLLM's StructuredOutputsParams. Blocks as long as that takes.

        Raises RuntimeError where that can't be done now: of the constraint that says nothing.
        """
        with self._lock:
            started = self._ready(model)
            answers = started.ask(_TRY)
        with answers:
            answers.settimeout(limits.wait_s)
            with suppress(BrokenPipeError, ConnectionResetError):  # it ended sooner: the answer says how
                answers.sendall(pickle.dumps((model, constraint, limits)))
                answers.shutdown(socket.SHUT_WR)
            return _heard(answers)

    def close(self) -> None:
        """End the process, and with it trials that are not done."""
        with self._lock:
            if self._started is not None:
                self._started.end()
                self._started = None

    def _ready(self, model: str) -> "_Started":
        if self._started is not None and not self._started.process.is_alive():
            log.warning("engine.trials_died", code=self._started.process.exitcode)
            self._started.end()
            self._started = None
        if self._started is None:
            self._started = _Started()
        try:
            self._started.load(model, dict(self._configs))
        except OSError as error:  # it may hang: the next one gets a new process
            self._started.end()
            self._started = None
            raise RuntimeError(f"no constraint of {model} can be tried now: {error}") from error
        return self._started


class _Started:
    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        with ExitStack() as lent:
            context = lent.enter_context(server.lent())
            ours, theirs = socket.socketpair()
            self._ours = lent.enter_context(ours)
            self._ours.settimeout(WAIT_S)
            with theirs:
                if context is None:  # a new interpreter, in which no platform's plugin may open the device
                    with environment_of({_PLUGINS: ""}):
                        self.process = _start(multiprocessing.get_context("spawn"), theirs)
                else:
                    self.process = _start(context, theirs)
            self._lent = lent.pop_all()

    def load(self, model: str, configs: dict[str, Any]) -> None:
        """Have what this model's config asks for there, and nothing of models that are not among ``configs``."""
        for gone in self._loaded.keys() - configs.keys():
            del self._loaded[gone]
            self._tell(gone, None)
        if model not in configs:
            raise RuntimeError(f"no constraint of {model} can be tried: it was removed")
        if self._loaded.get(model) is not configs[model]:
            self._tell(model, configs[model])
            self._loaded[model] = configs[model]

    def _tell(self, model: str, config: Any) -> None:
        with self.ask(_LOAD) as answers:
            answers.settimeout(LOAD_S)
            answers.sendall(pickle.dumps((model, cloudpickle.dumps(config))))
            answers.shutdown(socket.SHUT_WR)
            if (said := _all_of(answers)) != b"loaded":
                raise RuntimeError(f"no constraint of {model} can be tried: {said.decode() or 'the process ended'}")

    def ask(self, what: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._ours, [what], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RuntimeError(f"no constraint can be tried: {error}") from error
        return ours

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._lent.close()


def _start(context: Any, end: socket.socket) -> Any:
    process = context.Process(target=_serve, args=(end,), name="gearshift-trials", daemon=True)
    process.start()
    return process


def _heard(answers: socket.socket) -> Verdict:
    """How a trial ended: what it said that it was at, and after that its exit status."""
    try:
        *stages, code = _all_of(answers).decode().split()
        ended = int(code)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"the constraint can't be tried now: {error}") from error
    if not stages or ended in _BY_OTHERS:
        raise RuntimeError(f"the constraint can't be tried now: its trial ended with {ended}")
    return Verdict(stages[-1]) if ended else Verdict.FIT


def _all_of(end: socket.socket) -> bytes:
    pieces = []
    while piece := end.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


# --- in the process of the trials ---------------------------------------------------------------------------------


def _serve(end: socket.socket) -> None:
    """Load tokenizers and fork trials until the other side has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the frontend
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for trials
    here = os.getpid()
    models: dict[str, _Model] = {}
    while True:
        what, fds, _, _ = socket.recv_fds(end, 1, 1)
        if not what:
            return
        with socket.socket(fileno=fds[0]) as answers:
            if what == _LOAD:
                with suppress(OSError):
                    answers.sendall(_loaded(models, *pickle.loads(_all_of(answers))))  # noqa: S301 - our own pipe
            elif os.fork() == 0:
                with _nothing_after():
                    end.close()
                    _watch(models, answers, here)


def _loaded(models: "dict[str, _Model]", name: str, config: bytes) -> bytes:
    """Make what one model needs; of one without a config nothing is kept."""
    try:
        models.pop(name, None)
        if (loaded := cloudpickle.loads(config)) is not None:
            models[name] = _Model(loaded)
    except Exception as error:
        return repr(error).encode()
    return b"loaded"


class _Model:
    """What vLLM's core has of a model to compile constraints with."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        self.config = config
        self.manager = StructuredOutputManager(config)
        self.xgrammar: Any = None
        if config.structured_outputs_config.backend in {"auto", "xgrammar"}:
            vocabulary = config.model_config.get_vocab_size()
            self.xgrammar = XgrammarBackend(config, tokenizer=self.manager.tokenizer, vocab_size=vocabulary)

    def parse(self, constraint: Any) -> Any:
        """A request as the core gets it. Raises what vLLM raises."""
        from types import SimpleNamespace

        from vllm.sampling_params import SamplingParams
        from vllm.v1.structured_output.request import StructuredOutputRequest

        params = SamplingParams(structured_outputs=constraint)
        params._validate_structured_outputs(
            self.config.model_config, self.config.structured_outputs_config, self.manager.tokenizer
        )
        structured = StructuredOutputRequest(params=constraint)
        return SimpleNamespace(sampling_params=params, structured_output_request=structured, request_id="trial")

    def compile(self, request: Any) -> None:
        """With each backend that the core may have: it keeps the one that its first request chose, for all of them."""
        self.manager._use_async_grammar_compilation = False
        backends = [self.xgrammar]
        if self.xgrammar is not None and request.sampling_params.structured_outputs._backend != "xgrammar":
            backends.append(None)  # made as it was chosen
        for self.manager.backend in backends:
            self.manager.grammar_init(request)
            grammar = request.structured_output_request.grammar
            if not isinstance(grammar, Exception):
                grammar.fill_bitmask(self.manager.backend.allocate_token_bitmask(1), 0)
            elif _exhausted(grammar):
                raise grammar


@contextmanager
def _nothing_after() -> Iterator[None]:
    """A forked process leaves with this block: whatever comes after it is its parent's."""
    code = _TOOK_TOO_MUCH
    try:
        yield
        code = 0
    finally:
        os._exit(code)


def _watch(models: dict[str, _Model], answers: socket.socket, parent: int) -> None:
    """Fork the trial, and say how it ended: nobody but its parent gets to know."""
    _end_with(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    here = os.getpid()
    trial = os.fork()
    if trial == 0:
        with _nothing_after():
            _end_with(here)
            _try(models, answers)
    _, status = os.waitpid(trial, 0)
    _say(answers, str(os.waitstatus_to_exitcode(status)))


def _end_with(parent: int) -> None:
    """The system ends this process when its parent, the process ``parent``, has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before that
        os._exit(1)


def _try(models: dict[str, _Model], answers: socket.socket) -> None:
    """Say what this process is at. It ends as it should where the constraint is fit, or is for vLLM to refuse."""
    name, constraint, limits = pickle.loads(_all_of(answers))  # noqa: S301 - our own pipe
    _be_silent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wait_s)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this goes first
    most = _data_bytes() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        _say(answers, Verdict.PARSING)
        _end_after(PARSE_S)
        request = models[name].parse(constraint)
        _say(answers, Verdict.COMPILING)
        _end_after(limits.cpu_s)
        models[name].compile(request)
    except Exception as error:
        if _exhausted(error):
            raise


def _be_silent() -> None:
    """What libraries say of a constraint quotes it, and it is part of a prompt."""
    logging.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_after(cpu_s: float) -> None:
    """The system ends this process when it has taken so much more processor time, whatever it is at."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _say(answers: socket.socket, word: str) -> None:
    answers.sendall(f"{word} ".encode())


def _exhausted(error: BaseException) -> bool:
    """Whether memory was short, in Python or in a library written in C++, or the depth of calls; vLLM wraps errors."""
    here = isinstance(error, MemoryError | RecursionError) or "bad_alloc" in str(error)
    cause = error.__cause__ or error.__context__
    return here or (cause is not None and _exhausted(cause))


def _data_bytes() -> int:
    """What this process has of the memory that RLIMIT_DATA counts."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmData"].split()[0]) * 1024
