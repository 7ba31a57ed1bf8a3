"""vLLM's platform for CPU, with a resource of Ray's."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """Workers take what Ray counts as a GPU, and use gloo between them."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "ray_on_cpu.communicator.GlooCommunicator"
