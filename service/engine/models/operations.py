"""Operations of vLLM's own engine classes, passed on to the engine of one model.

They pass on whatever they are given, so that a parameter that vLLM gains is there without a change here; their
signature is vLLM's own with ``model`` added, read when somebody asks for it.
"""

import inspect
from collections.abc import Callable
from typing import Any

_BEFORE_PROMPT_TEXT = 8
"""No fewer parameters come before ``prompt_text`` where it can be given by position."""


class Operation:
    """A method that calls vLLM's method of the same name on a model's engine, ``self.context(model)``.

    ``model`` (keyword only) is an alias; None means the active model, decided when the call is made.
    """

    def __init__(self, meaning: str, *, source: Callable[[], type]) -> None:
        self.__doc__ = meaning
        self._source = source
        self.__name__ = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = f"{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Bound(self, instance)

    def __call__(self, instance: Any, /, *args: Any, model: str | None = None, **kwargs: Any) -> Any:
        return getattr(instance.context(model), self.__name__)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        theirs = inspect.signature(getattr(self._source(), self.__name__))
        parameters = list(theirs.parameters.values())
        at = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
        parameters.insert(
            at, inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
        )
        return theirs.replace(parameters=parameters)


class RequestOperation(Operation):
    """One that makes a request. Raises ValueError for a ``prompt_text`` beside a prompt that has its own."""

    def __call__(self, instance: Any, /, *args: Any, model: str | None = None, **kwargs: Any) -> Any:
        if "prompt_text" in kwargs or len(args) > _BEFORE_PROMPT_TEXT:
            given = inspect.signature(_Bound(self, instance)).bind(*args, **kwargs).arguments
            if given.get("prompt_text") is not None and not _is_engine_request(given["prompt"]):
                raise ValueError("prompt_text says the text of a prompt that is an EngineCoreRequest, and of no other")
        return super().__call__(instance, *args, model=model, **kwargs)


def _is_engine_request(prompt: Any) -> bool:
    from vllm.v1.engine import EngineCoreRequest

    return isinstance(prompt, EngineCoreRequest)


class _Bound:
    """An operation of one engine."""

    def __init__(self, operation: Operation, instance: Any) -> None:
        self.__func__ = operation
        self.__self__ = instance
        self.__name__ = operation.__name__
        self.__doc__ = operation.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        whole = self.__func__.__signature__
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Shown:
    """A property of the active model's engine."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else getattr(instance.context(), self._name)
