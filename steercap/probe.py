"""The start-up probe: one short request that captures everything, before the first user does.

Number 4 in the life of a request, once for all requests. A compiled artifact without taps, a layer that is
never called, a model that skips its modules: all would give plausible texts and no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steercap.core.messages import Owner, Wanted
from steercap.core.plan import CapturePlan
from steercap.core.tokens import Range
from steercap.errors import TapsNotInstalled

if TYPE_CHECKING:
    from steercap.engine import Delivery, Engine

#: Prompt tokens and generated tokens: a prefill pass, then a decode pass.
_PROMPT, _GENERATED = 3, 2


async def probe(engine: Engine) -> None:
    """See that every armed tap fires, in prefill and in decode.

    Raises:
        TapsNotInstalled: a tap did not fire, or what it read cannot be a row.
    """
    prompt = await engine.vllm.render(list(range(1, _PROMPT + 1)))
    rows = _PROMPT + _GENERATED - 1
    plan = CapturePlan(
        key=engine.new_key(),
        points=tuple(engine.armed.values()),
        ranges=(Range(0, None),),
        prompt_len=_PROMPT,
        limit=rows,
        reduce=None,
        codec="raw",
        samples=1,
    )
    ticket = await engine.admit(engine.pages_needed(plan, rows), call=probe)
    params = engine.vllm.sampling({"max_tokens": _GENERATED, "min_tokens": _GENERATED, "temperature": 0.0})
    try:
        async for _ in engine.generate(prompt, params, plan):
            pass
        (delivery,) = await engine.collect([Wanted(Owner(plan.key, 0), rows)])
    finally:
        engine.abandon(plan, ticket)
    _check(engine, delivery)


def _check(engine: Engine, delivery: Delivery) -> None:
    if delivery.failure:
        raise TapsNotInstalled(
            f"the start-up probe failed: {delivery.failure}; this engine would capture nothing right"
        )
    armed = engine.vllm.points
    seen: set[int] = set()
    for parcel, rows in zip(delivery.parcels, delivery.rows, strict=True):
        for point, values in zip(parcel.points, rows, strict=True):
            if not values.any():
                raise TapsNotInstalled(f"the start-up probe read nothing but zeros at {armed[point]}")
            seen.add(point)
    missing = [str(armed[point]) for point in engine.armed.values() if point not in seen]
    if missing:
        raise TapsNotInstalled(f"the start-up probe got no rows of {', '.join(missing)}")
