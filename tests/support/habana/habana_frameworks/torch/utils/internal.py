import os


def is_lazy():
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"
