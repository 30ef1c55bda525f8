from . import metrics  # noqa: F401


def wrap_in_hpu_graph(module, *_, **__):
    return module


def synchronize(*_, **__): ...
