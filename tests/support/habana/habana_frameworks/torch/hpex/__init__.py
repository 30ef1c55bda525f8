from . import kernels, normalization  # noqa: F401
