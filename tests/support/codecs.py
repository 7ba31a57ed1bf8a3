"""Whole engines against themselves: rows in every codec beside the same rows as they are."""

from __future__ import annotations

from typing import Final

import torch
from msgspec import structs

from steercap.captures.handle import CaptureHandle
from steercap.captures.stacking import flat
from steercap.core.schema import Coding
from steercap.core.spec import CaptureSpec, Point
from steercap.kernels.codecs import ENCODINGS, Codec
from steercap.kernels.codecs.coded import CodedRows
from steercap.kernels.codecs.uniform import CALIBRATED
from steercap.lab.directions.extraction import calibrate
from steercap.model import SteerModel
from steercap.steering.spec import SteeringSpec
from support.agreement import sites_of
from support.rows import GREEDY, random_prompt

#: Every codec, with parameters other than the default ones.
CODECS: Final = (
    Coding("full8"),
    Coding("fp8"),
    Coding("int4"),
    Coding("topk8", 5),
    Coding("rp8", 24, 3),
    Coding("rp16", 16),
)
#: Two runs of the same request may differ so much, as a share of the norm of a row: as `MAX_ERROR`.
APART: Final = 1e-4


async def codecs_agree(
    model: SteerModel,
    *,
    lengths: tuple[int, ...] = (1, 7, 40, 133),
    generated: int = 12,
    steering: SteeringSpec | None = None,
) -> dict[str, float]:
    """Requests that differ in nothing but their codec, all in one batch, at every site of the engine.

    Returns:
        By codec, the greatest error of an element as a share of its bound.
    """
    least, sites = min(schema.width for schema in model.points.values()), sites_of(model)
    narrow = [structs.replace(coding, k=min(coding.k, least)) for coding in CODECS]
    asked: list[tuple[Coding, CaptureSpec]] = [(coding, spec_of(coding, sites)) for coding in narrow]
    calibration = await calibrate(model, [random_prompt(60, 90 + number) for number in range(4)], sites=sites)
    asked.append((Coding(CALIBRATED), CaptureSpec(sites=sites, codec="full8", calibration=calibration)))
    together = [CaptureSpec(sites=sites, codec="raw"), *(spec for _, spec in asked)]
    specs, prompts = [], []
    for place, length in enumerate(lengths):
        prompts += [random_prompt(length, 40 + place)] * len(together)
        specs += together
    params = {"max_tokens": generated, **GREEDY}
    _, found = await model.generate(prompts, params, capture=specs, steering=steering)
    handles = flat(found)
    await model.fetch_captures_batch(handles)
    worst: dict[str, float] = {}
    for first in range(0, len(handles), len(together)):
        raw, *others = handles[first : first + len(together)]
        for (coding, _), handle in zip(asked, others, strict=True):
            assert handle.output_token_ids == raw.output_token_ids, coding
            assert handle.receipt.rows == raw.receipt.rows, coding
            share = compare(raw, handle, coding)
            worst[str(coding)] = max(worst.get(str(coding), 0.0), share)
    return {name: round(share, 4) for name, share in worst.items()}


def spec_of(coding: Coding, sites: tuple[str, ...]) -> CaptureSpec:
    """What a user asks for rows in a codec."""
    codec = ENCODINGS[coding.encoding]
    k = coding.k if codec.default_k else None
    return CaptureSpec(sites=sites, codec=coding.encoding, codec_k=k, codec_seed=coding.seed if codec.seeded else None)


def compare(raw: CaptureHandle, coded: CaptureHandle, coding: Coding) -> float:
    """The greatest error of an element as a share of its bound, at all points; at most 1, but for `APART`."""
    assert set(raw.points) == set(coded.coded)
    return max(_share(raw.captures[point].double(), coded, point, coding) for point in raw.points)


def _share(rows: torch.Tensor, handle: CaptureHandle, point: Point, coding: Coding) -> float:
    kept: CodedRows = handle.coded[point]
    assert (kept.coding, len(kept)) == (coding, len(rows))
    codec, wanted = ENCODINGS[coding.encoding], rows
    assert isinstance(codec, Codec)
    if (matrix := codec.matrix(kept.schema.width, coding)) is not None:
        wanted = rows.flatten(1) @ matrix.double().T * coding.k**-0.5
    error = (handle.captures[point].double() - wanted).abs().flatten(1)
    slack = APART * rows.flatten(1).norm(dim=1, keepdim=True)
    if coding.encoding == "topk8":  # of two runs, elements that are almost equal may change places at the edge
        assert kept.nbytes == len(rows) * kept.schema.shards * codec.row_bytes(kept.schema, coding)
    assert (error <= kept.error_bound().flatten(1) + slack).all(), (point, coding)
    return float((error / (kept.error_bound().flatten(1) + slack)).max()) if len(rows) else 0.0


async def coded_rows(model: SteerModel, sites: tuple[str, ...]) -> list[CaptureHandle]:
    """One prompt in every codec, fetched."""
    specs = [spec_of(coding, sites) for coding in CODECS]
    params = {"max_tokens": 6, **GREEDY}
    _, found = await model.generate([random_prompt(30, 77)] * len(specs), params, capture=specs)
    handles = flat(found)
    await model.fetch_captures_batch(handles)
    return handles


def same_codes(mine: list[CaptureHandle], theirs: list[CaptureHandle]) -> float:
    """The share of codes of two engines that are equal, at points that are whole on every worker; others are decoded.

    Codes and scales of rows that differ by rounding differ by a step at most, and rarely.
    """
    equal = total = 0
    for one, other in zip(mine, theirs, strict=True):
        assert one.output_token_ids == other.output_token_ids
        for point, rows in one.coded.items():
            found = other.coded[point]
            if rows.schema.shards == found.schema.shards == 1 and "indices" not in rows.parts:
                torch.testing.assert_close(rows.parts["scale"], found.parts["scale"], rtol=1e-4, atol=1e-7)
                codes = rows.parts["q"].view(torch.uint8), found.parts["q"].view(torch.uint8)
                equal += int((codes[0] == codes[1]).sum())
                total += codes[0].numel()
            off = (one.captures[point].double() - other.captures[point].double()).abs().flatten(1)
            size = one.captures[point].double().flatten(1).norm(dim=1, keepdim=True)
            most = rows.error_bound().flatten(1) + found.error_bound().flatten(1) + APART * size
            assert (off <= most).all(), (point, rows)
    return equal / total
