"""What differs between devices. Nothing outside this package asks which device it runs on."""

import functools

from service.platforms.base import Platform


@functools.cache
def current() -> Platform:
    """The platform of this process: vLLM's own answer, in our terms."""
    from vllm.platforms import current_platform

    if current_platform.device_type == "hpu":
        from service.platforms.hpu import HpuPlatform

        return HpuPlatform()
    if current_platform.is_cuda_alike():
        from service.platforms.cuda import CudaPlatform

        return CudaPlatform()
    from service.platforms.cpu import CpuPlatform

    return CpuPlatform()
