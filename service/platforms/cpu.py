"""CPU, where host and device are one: parked means that the KV cache is given back to the system."""

from pathlib import Path

import psutil

from service.platforms.base import Platform


class CpuPlatform(Platform):
    """vLLM's CPU worker."""

    weights_move = False

    def device_budget(self) -> int:
        return psutil.virtual_memory().available // 2

    def memory_used(self) -> int:
        return resident_bytes("self")


def resident_bytes(pid: int | str) -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
