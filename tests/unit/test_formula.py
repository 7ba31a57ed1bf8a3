"""The formula of the tap: every kernel against one row and one entry at a time, whatever an entry says.

Entries are drawn here, and not lowered from operations: `test_edits.py` has those. Axes: responses, reads, joined parts,
replacements of whole rows and of some elements, norms kept over several entries, scopes, several configurations in one
pass. Not drawn is what no operation lowers to: a response that is bounded or gated, of what reads nothing; one that is
more than a gain and a bias, of a joined entry; any, of a replacement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formula import formula
from support.specs import vector
from workers import CUDA, batch, device_of, some_runtime, tap

from steercap.core.messages import (
    Call,
    Configure,
    Configured,
    GetSteeringRecord,
    Owner,
    Placed,
    SteeringRecords,
    Vectors,
    Wanted,
    decode_answer,
    encode,
)
from steercap.core.plan import Plan
from steercap.core.program import HOLE, NONE, Blob, Configuration, Entry, Response, SteeringPlan, blob_digest
from steercap.core.tokens import Range

WIDTH, TOKENS, SCOPES, VECTORS = 24, 7, 3, 4
#: Positions at which each replacement puts a row.
PUT = (1, 4)
#: How far rows may be off, as a part of their norm: float32, over as many entries as are drawn.
TOLERANCE = 2e-5

some, numbers = st.sampled_from, st.integers(0, VECTORS - 1)
responses = st.builds(
    Response,
    bias=some([0.0, 0.3]), gain=some([0.0, 0.7, -1.0]), offset=some([0.0, 0.5]), minus=some([0.0, 1.0]),
    low=some([-torch.inf, -0.2]), high=some([torch.inf, 0.4]), floor=some([-torch.inf, 0.0]),
    threshold=some([-torch.inf, 0.1]), relative=st.booleans(),
)  # fmt: skip


@st.composite
def programs(draw) -> tuple[Entry, ...]:
    """Entries of one point; those that keep a norm are neighbours, and each replacement has a scope of its own."""
    found: list[Entry] = []
    norm, replacements = NONE, 0
    for edit in range(draw(st.integers(1, 6))):
        norm = draw(some([NONE, norm, edit]))
        scope, write, response = draw(st.integers(0, SCOPES - 1)), draw(numbers), draw(responses)
        last = found[-1] if found else None
        if draw(st.integers(0, 5)) == 0:
            found.append(Entry(edit, (0,), SCOPES + replacements, VECTORS, replacement=replacements, norm=norm))
            replacements += 1
        elif last is not None and last.read != NONE and draw(st.booleans()):
            response = Response(bias=response.bias, gain=response.gain)
            found.append(Entry(edit, (0,), last.scope, write, draw(numbers), response, joined=True, norm=norm))
        elif draw(st.booleans()):
            found.append(Entry(edit, (0,), scope, write, draw(numbers), response, norm=norm))
        else:
            response = Response(offset=response.offset, relative=response.relative)
            found.append(Entry(edit, (0,), scope, write, response=response, norm=norm))
    return tuple(found)


def ranges(held: Sequence[bool]) -> tuple[Range, ...]:
    """The positions that a scope holds; never none of all."""
    return (*(Range(place, place + 1) for place, one in enumerate(held) if one), Range(TOKENS, TOKENS + 1))


def hold_to_the_formula(kind: str, many: Sequence[Sequence[Entry]], seed: int) -> None:
    """One pass over a sequence for each program, all in one batch."""
    random = np.random.default_rng(seed)
    blobs = [*vector(VECTORS, 1, WIDTH, seed=seed) / WIDTH**0.5, vector(len(PUT), WIDTH, seed=seed + 1)]
    blobs[-1][0, :: 1 + seed % 3] = HOLE  # elements that stay, all of them or some
    places = (*((number,) for number in range(VECTORS)), tuple(range(VECTORS, VECTORS + len(PUT))))
    data = [blob.contiguous().numpy().tobytes() for blob in blobs]
    known = tuple(Blob(blob_digest(one, len(blob)), len(blob)) for one, blob in zip(data, blobs, strict=True))
    runtime = some_runtime(kind, 1, WIDTH, captures=False, slots=len(many), bank_rows=16, entries=8, tokens=64)

    def told(question):
        return decode_answer(runtime.answer(encode(Call((), question))))

    vectors = tuple(Vectors(blob.digest, place, one) for blob, place, one in zip(known, places, data, strict=True))
    assert told(Configure(vectors, ())) == Configured(())
    rows, wanted = vector(len(many), TOKENS, WIDTH, seed=seed + 2), []
    expected = torch.empty(rows.shape, dtype=torch.float64)
    for slot, entries in enumerate(many):
        replacements = sum(entry.replacement != NONE for entry in entries)
        held = random.random((SCOPES + replacements, TOKENS)) < 0.6  # which tokens each scope holds
        held[SCOPES:] = np.isin(np.arange(TOKENS), PUT)
        configuration = Configuration(tuple(entries), known, len(held), replacements)
        assert told(Configure((), (Placed(slot, configuration, places),))) == Configured(())
        steering = SteeringPlan(slot, configuration.digest, b"", tuple(map(ranges, held)), (PUT,) * replacements)
        runtime.register(str(slot), Plan(str(slot), TOKENS, TOKENS + 1, steering=steering).encode(), 0)
        wanted.append(Wanted(Owner(str(slot), 0), TOKENS))
        for token in range(TOKENS):
            scopes = sum(1 << bit for bit in np.flatnonzero(held[:, token]).tolist())
            put = PUT.index(token) if token in PUT else NONE
            expected[slot, token] = formula(rows[slot, token], entries, scopes, blobs, [put] * replacements)
    positions = list(range(TOKENS)) * len(many)
    hidden = rows.flatten(0, 1).clone().to(device_of(kind))
    names = [item.owner.key for item in wanted]
    runtime.begin_step(batch(kind, names, [0] * len(many), [TOKENS] * len(many), positions, positions))
    tap(runtime, hidden, None, 0)
    runtime.end_step()
    settled = told(GetSteeringRecord(tuple(wanted), (True,) * len(wanted)))
    assert isinstance(settled, SteeringRecords)
    assert not any(record.failure for record in settled.records)  # every entry was counted
    found, expected = hidden.cpu().double(), expected.flatten(0, 1)
    size = torch.maximum(expected.norm(dim=-1), rows.flatten(0, 1).double().norm(dim=-1))
    assert ((found - expected).norm(dim=-1) / size).max() < TOLERANCE


# The same examples each time: where a gate opens, a last bit decides, and one run in hundreds would meet one.
@given(st.lists(programs(), min_size=1, max_size=4), st.integers(0, 10_000))
@settings(max_examples=400, deadline=None, derandomize=True)
@pytest.mark.slow
def test_the_host_computes_the_formula(many, seed) -> None:
    """Any entries, several configurations in one pass: PyTorch's fast path gives the rows of the formula."""
    hold_to_the_formula("host", many, seed)


@given(st.lists(programs(), min_size=1, max_size=4), st.integers(0, 10_000))
@settings(max_examples=150 if CUDA else 25, deadline=None, derandomize=True)
@pytest.mark.slow
def test_the_kernel_of_a_device_does_too(many, seed) -> None:
    """The same for the kernel in Triton, on the device or interpreted."""
    hold_to_the_formula("cuda", many, seed)
