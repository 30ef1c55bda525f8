from . import bridge_config  # noqa: F401
