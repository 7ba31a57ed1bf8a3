"""A device's memory runs out."""

from __future__ import annotations

import time
from pathlib import Path

from steercap.errors import SteercapError
from support.faults.base import Fault, Outcome, opened, said, text_and_rows


def missing() -> str:
    """It needs a device with memory of its own."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU"


async def inject(_folder: Path) -> list[Outcome]:
    """Start an engine with more memory for rows than there is, and one where another process has taken nearly all."""
    import torch

    device = {"kv_cache_memory_bytes": 256 << 20}
    found = [
        await _refused(
            "an engine with `device_ring_bytes` of 1 TiB", "device_ring_bytes", device_ring_bytes=1 << 40, **device
        )
    ]
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (64 << 20), dtype=torch.uint8, device="cuda")
    found.append(await _refused("an engine where 64 MiB of the device are free", "memory", **device))
    del taken
    torch.cuda.empty_cache()
    async with opened(**device) as model:
        await text_and_rows(model)
    return [*found, Outcome("an engine afterwards", "answers")]


async def _refused(who: str, says: str, **arguments: object) -> Outcome:
    began = time.monotonic()
    try:
        async with opened(**arguments):
            raise AssertionError(f"{who} started")
    except SteercapError as error:
        assert says in str(error).lower(), repr(error)
        return Outcome(who, said(error), time.monotonic() - began)


MEMBER = Fault(
    title="device memory full",
    how="`device_ring_bytes` beyond the device; a start while another process holds all but 64 MiB of it",
    must="an error of steercap's that names memory, and `device_ring_bytes` if it was that; nothing is left, on the device "
    "either: the next engine starts",
    inject=inject,
    missing=missing,
)
