"""vLLM's communicator of ranks on CPU, which looks for shared memory where there is none."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class GlooCommunicator(CpuCommunicator):
    """Never through shared memory."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False
