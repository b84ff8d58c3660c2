"""The CPU as a platform of SGLang; loaded by SGLang alone, through `plugin.platform`."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain torch everywhere: no kernel package is needed."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to copy to."""
        return False

    def get_default_attention_backend(self) -> str:
        """The backend written in torch."""
        return "torch_native"

    if not hasattr(SRTPlatform, "get_kv_pool_cls"):  # before 0.5.21 or so every platform has these

        def get_mha_kv_pool_cls(self) -> Any:
            """SGLang's own pool."""
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> Any:
            """SGLang's own allocator."""
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator
