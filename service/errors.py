"""Every error this service raises on purpose. Whether trying again can help is an attribute, not a guess."""

import difflib
from collections.abc import Iterable


class GearshiftError(Exception):
    """Base of all errors raised on purpose."""

    retriable = False
    exit_code = 1


class ConfigError(GearshiftError):
    """Settings or models.yaml say something that can't be; the message names file, alias and key."""

    exit_code = 2


class BrokerUnavailable(GearshiftError):
    """No broker answers, or it answers that it won't."""

    retriable = True


class TopicError(GearshiftError):
    """A topic is missing, or is not as it must be, and may not be created."""


class Fenced(GearshiftError):
    """Another owner has this partition's transactional id: what is unpublished here is the other's to do."""


class Stalled(GearshiftError):
    """Work is there, and nothing moves."""


class SwitchFailed(GearshiftError, RuntimeError):
    """A switch did not happen; the previous model is active and serves. ``__cause__`` says why."""


class EngineDied(GearshiftError):
    """The engine core or a worker process is gone; nothing runs until a new process starts."""


class HandedBack(GearshiftError):
    """The engine gave a request back as not started, under memory pressure; it may be run again."""

    retriable = True


class UnknownModel(GearshiftError):
    """No alias and no LoRA of this name."""


class LoraRefused(GearshiftError):
    """An adapter that can't be loaded: not below ``lora_root``, not an adapter, or its model takes none."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or an empty string: `` (did you mean 'qwen'?)``."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
