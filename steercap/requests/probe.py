"""Start-up probe: short requests that capture and edit every armed point before the first user request.

It runs once, when the engine starts. A compiled artifact without taps, a layer that is never called, a model that skips
its modules, an edit that a compiler removes as dead code: all would produce plausible texts, but no rows or no
steering. The equations that the rows must satisfy are in `equations`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from steercap.architectures.families.derived import FIELDS, NEEDS, PROVED, dropped
from steercap.architectures.sites import SITES
from steercap.captures.fetching import fetch_all
from steercap.captures.pooled import Encoded, probing
from steercap.core.messages import Owner, Wanted
from steercap.core.names import is_module
from steercap.core.plan import CapturePlan, Plan
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range, Tokens
from steercap.errors import InvalidSetting, ModelNotProved, SteeringNotApplied, TapsNotInstalled, UnsupportedModel
from steercap.requests.call_types import Generation
from steercap.requests.equations import (
    ATTENTION,
    EQUATION_SITES,
    STREAMS,
    Claim,
    computed,
    edited,
    lens_claim,
    of_norms,
    of_projections,
    of_rows,
    pools,
    relative,
    worst,
)
from steercap.requests.job import run_all, run_job
from steercap.requests.preparing import prepare
from steercap.steering.edits.add import Add
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.engine.engine import Engine
    from steercap.engine.fetching import Delivery

#: Number of prompt tokens and of generated tokens: a prefill pass, then a decode pass.
_PROMPT, _GENERATED = 3, 2
#: Number of most probable tokens whose logits are compared.
_COMPARED = 20


@dataclass(frozen=True)
class _Probed:
    """Result of one request of the probe.

    Args:
        rows: captured rows of each point, [n, *shape of the point].
        output: vLLM's output, or an `Encoded`.
    """

    rows: Mapping[Point, torch.Tensor]
    output: Any


async def probe(engine: Engine) -> tuple[Claim, ...]:
    """Check that every armed tap fires in prefill and decode, reads the right tensor, and edits the model's output.

    Returns:
        The claims that hold, with their errors.

    Raises:
        InvalidSetting: `max_model_len` is shorter than the probe's sequence.
        TapsNotInstalled: a tap did not fire, read only zeros, or its edit had no effect.
        ModelNotProved: a claim does not hold: rows are not of the points that they are named after.
        UnsupportedModel: derived sites are not proved; see `Engine.drop` and `_overflowed`.
    """
    generated = 0 if engine.vllm.pools else _GENERATED
    if (longest := engine.vllm.max_model_len) < _PROMPT + generated:
        raise InvalidSetting(
            f"max_model_len={longest} has no room for the start-up probe, which reads {_PROMPT} tokens and generates "
            f"{generated}; give max_model_len={_PROMPT + generated} or more"
        )
    claims: list[Claim] = []
    for number in range(engine.engines):  # each is a process, a compiled artifact and taps of its own
        clean, strange = await _probe_reading(engine, number)
        if strange is None:
            claims += _proved(
                engine,
                [*of_rows(engine, clean.rows), *[claim async for claim in of_projections(engine, number, clean.rows)]],
            )
            claims += _require(engine, [claim async for claim in of_norms(engine, number, clean.rows)])
            claims += _require(engine, await _lens(engine, number, clean))
            claims += await _probe_editing(engine, number, clean)
        else:
            _overflowed(engine, clean, *strange)
    return tuple(claims)


def _proved(engine: Engine, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims on rows without edits that `_require` accepts; drop derived sites that no claim is about."""
    found = _require(engine, claims)
    if engine.family.derived:
        held = {site for claim in found for site in claim.sites}
        bare = PROVED & {point.site for point in engine.armed} - held
        if any(point.site in NEEDS["z"] and point.layer not in engine.attention for point in engine.armed):
            bare |= set(NEEDS["z"])  # claims of other layers say nothing of one whose rule is unknown
        engine.drop(dropped(bare), "no equation of the checks at start contains it")
    return [claim for claim in found if _armed(engine, claim)]


def _armed(engine: Engine, claim: Claim) -> bool:
    return {point.site for point in engine.armed} >= set(claim.sites)


def _overflowed(engine: Engine, clean: _Probed, position: int, index: int) -> None:
    """Warn that the probe's row at a position and point index is not finite, as 16-bit rows can be.

    Raises:
        TapsNotInstalled: the stream's last row, computed from that row, is finite, so the model had another row there.
        UnsupportedModel: the family was derived, so that nothing but the proof says what its rows are.
    """
    point = engine.vllm.points[index]
    named = f"the row of position {position} of the start-up probe at {point} holds NaN or infinity"
    if bool(clean.rows[engine.end][position].isfinite().all()):
        raise TapsNotInstalled(f"{named}, but the last row of the residual stream, which depends on it, is finite")
    if engine.family.derived:
        raise UnsupportedModel(
            f"{named}, so that nothing proves what was derived of layers of {', '.join(engine.loaded.code)}; use a "
            "dtype with a greater range, such as dtype='bfloat16'"
        )
    warnings.warn(
        f"{named}, so neither rows nor edits could be tested there; look at its rows with "
        "CaptureSpec(allow_nonfinite=True)",
        stacklevel=3,
    )


def _require(engine: Engine, claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims after checking that each holds; derived sites with a failed claim are dropped first.

    Raises:
        ModelNotProved: a claim does not hold.
        UnsupportedModel: see `Engine.drop`.
    """
    found = list(claims)
    if engine.family.derived:
        for claim in found:
            if not claim.holds and claim.sites and set(claim.sites) <= FIELDS.keys():
                engine.drop(dropped(claim.sites), str(claim))
        found = [claim for claim in found if _armed(engine, claim)]
    if (wrong := worst(found)) is not None:
        kinds = ", ".join(engine.loaded.code)
        raise ModelNotProved(f"rows of these layers, {kinds}, are not what steercap takes them for. {wrong}")
    return found


async def _probe_reading(engine: Engine, number: int) -> tuple[_Probed, tuple[int, int] | None]:
    """Run one request that captures every armed point, on data-parallel engine `number`.

    Returns:
        The result, and the position and point index of the first non-finite row, or None.
    """
    prompt = await engine.vllm.render({"prompt_token_ids": list(range(1, _PROMPT + 1))})
    rows = _PROMPT if engine.vllm.pools else _PROMPT + _GENERATED - 1
    capture = _all_rows(tuple(engine.armed.values()))
    plan = Plan(engine.new_key(), _PROMPT, limit=rows, capture=capture)
    reservation = await engine.admit(engine.pages_needed(capture, rows), call=probe, engine=number)
    params: Any
    if engine.vllm.pools:
        params = await engine.vllm.pooling(await probing(engine))
        await engine.vllm.checked(prompt, params, {})
    else:
        params = engine.vllm.sampling({**_greedy(engine, _GENERATED), "ignore_eos": True})
    try:
        outputs = [output async for output in engine.generate(prompt, params, plan, reservation=reservation)]
        (delivery,) = await engine.collect([Wanted(Owner(plan.key, 0), rows)])
    finally:
        engine.abandon(plan, reservation)
    _check(engine, delivery)
    strange = min(
        (captured_rows.nonfinite for captured_rows in delivery.shares if captured_rows.nonfinite), default=None
    )
    joined = {engine.vllm.points[index]: delivery.joined(shards) for index, shards in delivery.shards.items()}
    return _Probed({point: _tensor(rows) for point, rows in joined.items()}, outputs[-1]), strange


def _tensor(rows: object) -> torch.Tensor:
    assert isinstance(rows, torch.Tensor), "the probe keeps rows bit for bit"
    return rows


def _greedy(engine: Engine, tokens: int) -> dict[str, float]:
    most = engine.vllm.max_logprobs
    return {"max_tokens": tokens, "temperature": 0.0, "logprobs": _COMPARED if most < 0 else min(_COMPARED, most)}


def _all_rows(indices: tuple[int, ...]) -> CapturePlan:
    return CapturePlan(indices, (Range(0, None),), reduce=None, coding=RAW)


def _check(engine: Engine, delivery: Delivery) -> None:
    if delivery.failure:
        raise TapsNotInstalled(f"the start-up probe failed: {delivery.failure}; this engine would capture wrong rows")
    armed = engine.vllm.points
    seen: set[int] = set()
    for point, shards in delivery.shards.items():
        if not all(isinstance(values, torch.Tensor) and values.any() for values in shards):
            raise TapsNotInstalled(
                f"the start-up probe read only zeros at {armed[point]}: either the block's weights are zero, or the "
                "tap is in the wrong place, and the probe cannot tell which; leave that site or layer out by "
                "SteerModel(sites=) or SteerModel(layers=)"
            )
        seen.add(point)
    missing = [str(armed[point]) for point in engine.armed.values() if point not in seen]
    if missing:
        raise TapsNotInstalled(f"the start-up probe got no rows of {', '.join(missing)}")


async def _lens(engine: Engine, number: int, probed: _Probed, edit: Point | None = None) -> list[Claim]:
    """Return claims that the logit lens on the last rows, before and behind the final norm, gives the reported logits.

    There is one claim for each sampled token.

    Args:
        engine: engine of the model.
        number: index of the data-parallel engine.
        probed: result of a request.
        edit: the point that was edited, None without; rows before that point are not compared.
    """
    last, behind = _ends(engine)
    claims = []
    for point in (last, behind) if edit in {None, last} else (behind,):
        if point not in probed.rows:
            continue
        named = f"at {point}" + (f", with an edit at {edit}" if edit else "")
        if engine.vllm.pools:
            claims += await _pooled(engine, number, probed, point, named)
            continue
        said = probed.output.outputs[0].logprobs or ()
        for row, reported in zip(probed.rows[point][_PROMPT - 1 :][: len(said)], said, strict=True):
            found = await engine.unembed(row[None], list(reported), number, normed=point == behind)
            logits = torch.frombuffer(bytearray(found.logits), dtype=torch.float32).tolist()
            size = max(abs(found.least[0]), abs(found.most[0]))
            log = [one.logprob for one in reported.values()]
            edges = {"most": found.most[0], "spread": found.spread[0], "total": found.total[0], "size": size}
            claims.append(lens_claim(named, log, logits, **edges, dtype=row.dtype))
    return claims


async def _pooled(engine: Engine, number: int, probed: _Probed, point: Point, named: str) -> list[Claim]:
    """Return the claim that rows, passed through the model's own norm and pooler, give the engine's pooled outputs.

    There is none for models that do not pool each token by itself. `named` describes the rows, for its name.
    """
    said = _values_of(probed.output)
    assert said is not None
    if said.shape[:1] != (_PROMPT,) or said.dim() != 2:
        return []
    found = []
    for row in probed.rows[point][:_PROMPT]:
        made = await engine.unembed(row[None], None, number, normed=point.site == "final_norm")
        found.append(torch.frombuffer(bytearray(made.logits), dtype=torch.float32))
    return [pools(named, said, torch.stack(found), probed.rows[point].dtype)]


def _ends(engine: Engine) -> tuple[Point, Point]:
    """Return the two points whose rows yield logits: the end of the residual stream, and behind the final norm."""
    return engine.end, Point(engine.vllm.num_layers - 1, "final_norm")


async def _probe_editing(engine: Engine, number: int, clean: _Probed) -> list[Claim]:
    """Add a random vector at each point in turn: the output must change, and the rows by exactly that vector.

    The vector's elements have the rows' magnitude. With random weights, rows can be too small to affect the stream; if
    the output did not change, the request is repeated with elements of about 1. Claims that hold are returned.
    """
    generator = torch.Generator().manual_seed(0)
    vectors, sizes = {}, {}
    for point, schema in engine.schemas.items():
        if schema.writable:
            # The size is that of whole rows, which a rank that has a part of each cannot know.
            sizes[point] = float(clean.rows[point].flatten(1).norm(dim=1).mean()) / schema.width**0.5
            vectors[point] = torch.randn(schema.width, generator=generator)

    def add(point: Point, scale: float) -> Add:
        # Adding the same vector to every key leaves the softmax over them unchanged.
        tokens: Tokens = 0 if SITES[point.site].per_key_head else "all"
        return Add(vectors[point], scale, layer=point.layer, site=point.site, tokens=tokens)

    edits = {point: add(point, sizes[point]) for point in vectors}
    silent, claims = await _try(engine, number, edits, clean)
    loud = {point: add(point, 1.0) for point in silent if sizes[point] < 1}
    if loud:
        again, more = await _try(engine, number, loud, clean)
        silent, claims = [point for point in silent if point not in loud] + again, claims + more
    claims = _require(engine, claims)
    if engine.family.derived and (lost := {point.site for point in silent} & FIELDS.keys()):
        engine.drop(dropped(lost), "an edit of it did not change the model's output")
        silent = [point for point in silent if point in engine.armed]
    if silent:
        raise TapsNotInstalled(
            f"the start-up probe changed the rows at {', '.join(map(str, silent))}, and the model's output did not "
            "change; the tap there reads, but what it writes is lost"
        )
    for end, probed in await _run(engine, number, [(end, edits[end]) for end in _ends(engine) if end in edits]):
        claims += _require(engine, await _lens(engine, number, probed, end))
    return claims


async def _try(
    engine: Engine, number: int, edits: Mapping[Point, Add], clean: _Probed
) -> tuple[list[Point], list[Claim]]:
    """Run each edit in its own request, many at once; repeat an edit alone where batching blurs the rows or the output.

    Returns:
        The points whose edit, made alone if need be, leaves the model's output unchanged, and the claims on the rows of
        the requests that run at once.
    """
    (_, plain), *others = await _run(engine, number, [(None, None), *edits.items()])
    claims: list[Claim] = []
    shown: set[Point] = set()
    dtype = clean.rows[engine.end].dtype
    for point, probed in others:
        if point is not None:
            before, added = clean.rows[point][:_PROMPT], _added(edits[point])
            grows = edited(point, before, probed.rows[point], added, dtype, alone=False)
            if grows.holds and grows.error > computed(dtype):
                ((_, single),) = await _run(engine, number, [(point, edits[point])])
                grows = edited(point, before, single.rows[point], added, dtype, alone=True)
            projections = [claim async for claim in of_projections(engine, number, probed.rows, point)]
            claims += [grows, *projections]
            shown |= {point} if projections else set()
            if not is_module(point.site):  # on which side of a sum's terms it lies is not known
                claims += of_rows(engine, probed.rows, (point, added))
    moved = {point: _moved(probed, plain) for point, probed in others if point}
    unmoved = [point for point in moved if moved[point] == 0]
    close = {point for point in moved if 0 < moved[point] <= computed(dtype)} - shown
    doubtful = [
        point
        for point, probed in others
        if point in close and not _shown(engine, probed.rows, point, _added(edits[point]))
    ]
    if doubtful:  # by rounding alone, outputs at other places in a batch are so far apart
        ((_, plain),) = await _run(engine, number, [(None, None)])
        for point in doubtful:
            ((_, single),) = await _run(engine, number, [(point, edits[point])])
            unmoved += [point] if _moved(single, plain) == 0 else []
    return unmoved, claims


def _shown(engine: Engine, rows: Mapping[Point, torch.Tensor], point: Point, added: torch.Tensor) -> bool:
    """Return whether rows of the pass of an edit show that what follows its point read the edited row.

    They do if an equation does not hold of them with the added vectors taken out of that row alone.
    """
    before = rows[point] - added.view_as(rows[point])
    return any(not claim.holds for claim in of_rows(engine, {**rows, point: before.to(rows[point].dtype)}))


def _added(edit: Add) -> torch.Tensor:
    """Return the vectors that an edit adds to the rows of the prompt: [tokens, width]."""
    assert isinstance(edit.vector, torch.Tensor), "an edit keeps its vector as a tensor"
    added = torch.zeros(_PROMPT, edit.vector.numel())
    added[: 1 if SITES[edit.site].per_key_head else None] = edit.scale * edit.vector
    return added


async def _run(
    engine: Engine, number: int, wanted: Sequence[tuple[Point | None, Add | None]]
) -> list[tuple[Point | None, _Probed]]:
    """Run requests with one edit each (None for no edit); return rows around each edited point, and the outputs."""
    prompt = {"prompt_token_ids": list(range(1, _PROMPT + 1))}
    options = {"data_parallel_rank": number} if engine.engines > 1 else {}

    whole = object()

    async def jobs(batch: Sequence[tuple[Point | None, Add | None]]) -> AsyncIterator[Coroutine[Any, Any, Generation]]:
        for point, edit in batch:
            spec = None if edit is None else SteeringSpec([edit])
            params = await probing(engine) if engine.vllm.pools else _greedy(engine, 1)
            asked = prompt, params, None, spec
            job = await prepare(engine, *asked, options=options, encoding=engine.vllm.pools, reading=engine.vllm.pools)
            if job.plan is not None and point is not None:
                near = _neighbours(engine, point)
                capture = _all_rows(tuple(sorted(engine.armed[one] for one in near)))
                plan = structs.replace(job.plan, capture=capture)
                job = replace(job, plan=plan, points=near, hands_over=True)
            yield run_job(job, whole)

    most = max(engine.pages_needed(_all_rows(tuple(engine.armed.values())), _PROMPT), 1)
    together = max(1, min(engine.settings.steering_slots, engine.admission.budget.pages // most))
    found: list[tuple[Point | None, _Probed]] = []
    try:
        for first in range(0, len(wanted), together):
            some = wanted[first : first + together]
            done = await run_all(jobs(some), set())
            found += [(point, await _fetched(one)) for (point, _), one in zip(some, done, strict=True)]
    except SteeringNotApplied as error:
        raise TapsNotInstalled(f"the start-up probe failed: {error}; this engine would not steer correctly") from error
    return found


async def _fetched(done: Generation) -> _Probed:
    """Return a request's output and rows; its handle is released."""
    if not done.handles:
        return _Probed({}, done.output)
    (handle,) = done.handles
    await fetch_all([handle.lifecycle])
    rows = {point: handle.captures[point] for point in handle.points}
    handle.release()
    return _Probed(rows, done.output)


def _values_of(output: Any) -> torch.Tensor | None:
    """Return a pooling model's output tensor; None for the output of a model that generates."""
    if isinstance(output, Encoded):
        return output.data
    found: torch.Tensor | None = None if isinstance(output.outputs, list) else output.outputs.data
    return found


def _neighbours(engine: Engine, point: Point) -> tuple[Point, ...]:
    """Return the armed points near a point: itself, the stream of its layer and the next, and its layer's attention."""
    sites = (*EQUATION_SITES, *STREAMS, "embed", "final_norm")
    stream = {Point(layer, site) for layer in (point.layer, point.layer + 1) for site in sites}
    near = stream | {Point(point.layer, site) for site in ATTENTION} | {point}
    return tuple(one for one in engine.armed if one in near)


def _moved(probed: _Probed, plain: _Probed) -> float:
    """Return the difference of two outputs for the same prompt, 0 only if they are equal.

    It is the greatest of log probabilities of the next token, among tokens that both report (infinite if there are
    none), or the distance of pooled values, relative to their size.
    """
    pooled, other = _values_of(probed.output), _values_of(plain.output)
    if pooled is not None and other is not None:
        return relative([pooled[None].double()], [other[None].double()])
    ours, theirs = _reported(probed), _reported(plain)
    if ours == theirs:
        return 0.0
    apart = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    return max(apart) or math.inf if apart else math.inf


def _reported(probed: _Probed) -> dict[int, float]:
    """Return the log probabilities of the most probable next tokens, by id."""
    logprobs = probed.output.outputs[0].logprobs or [{}]
    return {token: value.logprob for token, value in logprobs[0].items()}
