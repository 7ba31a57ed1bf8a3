"""The event loop of a model is closed under it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from steercap.errors import WrongEventLoop
from steercap.testing import tiny_checkpoint
from support.faults.base import LONG, SHORT, Fault, Outcome, prompts, told
from support.rows import TINY_ENGINE


async def inject(_folder: Path) -> list[Outcome]:
    """Use and close a model whose loop was closed while it ran requests."""
    from steercap.model import SteerModel

    model: Any = SteerModel(tiny_checkpoint("qwen3"), **TINY_ENGINE)
    handle = await asyncio.to_thread(asyncio.run, _left(model))
    found = [
        await told(who, ask, time.monotonic(), WrongEventLoop, "closed")
        for who, ask in {"generate": model.generate([3, 4], SHORT), "a handle's fetch": handle.fetch()}.items()
    ]
    began = time.monotonic()
    await model.aclose()
    return [*found, Outcome("closing the model from another loop", "closed", time.monotonic() - began)]


async def _left(model: Any) -> Any:
    await model.start()
    _, handle = await model.generate(prompts(1)[0], SHORT, capture_layers=[0])
    model.running = asyncio.ensure_future(model.generate(prompts(4), LONG))
    await asyncio.sleep(0.1)
    return handle


MEMBER = Fault(
    title="the event loop closed",
    how="the loop that a model was started in ends while requests run; the model is used, and closed, in another",
    must="`WrongEventLoop` that says the loop was closed; closing works from any loop",
    inject=inject,
)
