"""Comparing what was captured with what transformers computes, and the settings of the engines that tests start."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

from steercap.captures.handle import CaptureHandle
from steercap.core.chat import TEXT
from steercap.core.spec import Point
from steercap.steering.spec import SteeringSpec
from steercap.testing.reference import PERFECT, Parity, Reference, compare_rows

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Where the stream itself is read.
STREAM: Final = ("embed", "resid_pre", "resid_mid", "resid_post")
ALL_SITES: Final = ("resid_pre", "resid_post", "attn_out", "mlp_out")

#: float32 against transformers on the same tokens: the bounds of docs/mechanisms/proof.md.
MIN_COSINE: Final = 0.99999
MAX_ERROR: Final = 1e-4
#: Of one layer or step in 16 bits, which keep 3 digits.
MIN_COSINE_16: Final = 0.999

GREEDY: Final[dict[str, Any]] = {"temperature": 0.0, "ignore_eos": True}

#: Tenths of a second that an engine may take to let go of requests that were aborted, on a busy machine.
PATIENCE: Final = 100

TINY_ENGINE: Final[dict[str, Any]] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20,
}

#: Chunks every long prompt (64 tokens a step), runs 16 requests at once, and has so little KV memory that some are
#: preempted: 1,024 tokens of a tiny model in float32.
CRAMPED: Final[dict[str, Any]] = {
    **TINY_ENGINE,
    "block_size": 32,
    "kv_cache_memory_bytes": 2 << 20,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
}


def random_prompt(length: int, seed: int, vocabulary: int = 250) -> list[int]:
    """Token ids that no other seed gives."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    return ids


def parity(
    handle: CaptureHandle,
    reference: Reference,
    steering: SteeringSpec | None = None,
    *,
    by_layer: bool = False,
    media: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Parity]:
    """The worst row of each site, prompt and generated rows apart, e.g. `resid_post prompt`.

    With `by_layer` the reference's layers get the captured `resid_pre` as their input, and their feed-forward blocks the
    captured `mlp_in` where there is one, so each block is compared by itself.
    `media` is what transformers' model takes besides the tokens, such as a picture.
    """
    ids = inputs_of(handle)
    inputs, given = {}, {}
    if by_layer:
        inputs = {
            layer: handle.captures[layer, "resid_pre"].to(reference.model.dtype) for layer in handle.captures.layers
        }
        given = {point: handle.captures[point] for point in handle.points if point.site == "mlp_in"}
    prompt_len = len(handle.prompt_token_ids)
    known = reference.rows(
        ids, handle.points, inputs, given=given, steering=steering, prompt_len=prompt_len, media=media
    )
    assert handle.token_ids.tolist() == [ids[position] for position in handle.positions.tolist()]
    selected = {point: rows[handle.positions] for point, rows in known.items()}
    return _reduced(handle, selected) if handle.receipt.reduce else by_part(handle, selected)


def steps(handle: CaptureHandle, reference: Reference, steering: SteeringSpec | None = None) -> dict[str, Parity]:
    """The worst row of each site as for `parity`, each step from site to site by itself: once a row has been compared,
    the captured one takes the place of the reference's own.

    A module that rounds its inputs to 8 bits makes a step of what is an epsilon before it, so what can be known of them
    is given to the last bit: also the stream before it was rounded to the captured row.

    Args:
        handle: all rows at all sites of a model of the Llama kind.
        reference: transformers, in float32.
        steering: the edits that were made.
    """
    rows = {point: handle.captures[point].flatten(1).float() for point in handle.points}
    stream = {layer: _unrounded(handle, layer) for layer in handle.captures.layers}
    given = {point: kept for point, kept in rows.items() if point.site not in STREAM}
    for layer, wide in stream.items():  # what the first norm reads is wide, what goes on is rounded
        given[Point(layer, "attn_out")] = given[Point(layer, "attn_out")] + rows[Point(layer, "resid_pre")] - wide
    prompt_len = len(handle.prompt_token_ids)
    known = reference.rows(
        inputs_of(handle), handle.points, stream, given=given, steering=steering, prompt_len=prompt_len
    )
    return by_part(handle, known)


def _unrounded(handle: CaptureHandle, layer: int) -> torch.Tensor:
    """The stream before a layer, float32 [tokens, hidden]: the sum that was rounded, where nothing edited it."""
    rounded = handle.captures[layer, "resid_pre"]
    if layer == 0:
        return rounded.float()
    before, attention, feed_forward = (
        handle.captures[layer - 1, site].float() for site in ("resid_pre", "attn_out", "mlp_out")
    )
    wide = (before + attention).to(rounded.dtype).float() + feed_forward
    return torch.where(wide.to(rounded.dtype) == rounded, wide, rounded.float())


def _reduced(handle: CaptureHandle, known: dict[Point, torch.Tensor]) -> dict[str, Parity]:
    """The worst reduced row of each site."""
    reduce: Any = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "last": lambda rows, _: rows[-1]}
    how = handle.receipt.reduce
    found: dict[str, Parity] = {}
    for point, rows in known.items():
        name = f"{point.site} {how}"
        same = compare_rows(handle.captures[point].flatten(1), reduce[how](rows.double(), 0)[None])
        found[name] = found.get(name, PERFECT).worse(same)
    return found


def by_part(handle: CaptureHandle, known: dict[Point, torch.Tensor]) -> dict[str, Parity]:
    """The worst row of each site against known rows of the same positions: those of the prompt's text, of its pictures
    (or of what it has else), and generated ones, apart.
    """
    prompt = handle.positions < len(handle.prompt_token_ids)
    parts = {"prompt": prompt & torch.from_numpy(handle.token_types == TEXT), "generated": ~prompt}
    parts |= {kind: torch.from_numpy(handle.token_types == kind) for kind in {span.kind for span in handle.media}}
    found: dict[str, Parity] = {}
    for point in handle.points:
        for part, chosen in parts.items():
            if chosen.any():
                name = f"{point.site} {part}"
                same = compare_rows(handle.captures[point].flatten(1)[chosen], known[point].flatten(1)[chosen])
                found[name] = found.get(name, PERFECT).worse(same)
    return found


def inputs_of(handle: CaptureHandle) -> list[int]:
    """The tokens the model read: prompt and generated, without the last."""
    return [*handle.prompt_token_ids, *handle.output_token_ids][:-1]


def worst(found: Iterable[dict[str, Parity]]) -> dict[str, Parity]:
    """The worst of several."""
    total: dict[str, Parity] = {}
    for one in found:
        for name, same in one.items():
            total[name] = total.get(name, PERFECT).worse(same)
    return total


def flattened(handles: Any) -> list[CaptureHandle]:
    """Handles out of nested lists."""
    return (
        [handles]
        if isinstance(handles, CaptureHandle)
        else [handle for group in handles for handle in flattened(group)]
    )


def points(layers: Iterable[int], *sites: str) -> tuple[Point, ...]:
    """Points of all `layers` and `sites`."""
    return tuple(Point(layer, site) for layer in layers for site in sites)


async def settled(model: SteerModel) -> tuple[int, int, int]:
    """Handles held, bytes claimed and bytes in use once what was given back has been freed."""
    held = (1, 1, 1)
    for _ in range(PATIENCE):  # aborted requests leave the engine, then the client hears of them, then gives back
        gc.collect()  # handles that died in a cycle
        await asyncio.sleep(0.1)
        stats = await model.stats()
        held = stats.handles_held, stats.capture_bytes_claimed, stats.capture_bytes_in_use
        if held == (0, 0, 0):
            break
    return held


def counter(model: SteerModel, name: str) -> float:
    """A counter of one engine of vLLM's, by its attribute: the registry forgets an engine when another starts."""
    manager: Any = model.engine.logger_manager
    loggers = [part for one in manager.stat_loggers for part in (one, getattr(one, "spec_decoding_prom", None))]
    (found,) = (one for one in loggers if hasattr(one, name))
    samples = [sample for child in getattr(found, name).values() for one in child.collect() for sample in one.samples]
    return float(sum(sample.value for sample in samples if sample.name.endswith("_total")))


def hold(handles: Any, reference: Reference, specs: Sequence[SteeringSpec | None] | None = None) -> dict[str, Parity]:
    """Assert the float32 bounds for the worst row of all handles, each steered by its own spec."""
    given = flattened(handles)
    known = [None] * len(given) if specs is None else specs
    return within(worst(parity(handle, reference, spec) for handle, spec in zip(given, known, strict=True)))


def within(found: dict[str, Parity]) -> dict[str, Parity]:
    """Assert the float32 bounds for the worst rows found."""
    beyond = {name: same for name, same in found.items() if not (same.cosine > MIN_COSINE and same.error < MAX_ERROR)}
    assert not beyond, f"beyond cosine {MIN_COSINE} or error {MAX_ERROR}: {beyond}"
    return found


def within_16(found: dict[str, Parity], least: float = MIN_COSINE_16) -> dict[str, Parity]:
    """Assert the bound of 16 bits, or another, for the worst rows found, layer by layer or step by step."""
    beyond = {name: same for name, same in found.items() if not same.cosine > least}
    assert not beyond, f"beyond cosine {least}: {beyond}"
    return found
