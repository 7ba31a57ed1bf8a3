"""`steercap.stack`: one row of each handle at each layer, or an error."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from handles import a_handle

from steercap import SAE, Point, errors, stack
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.core.receipt import Receipt
from steercap.core.schema import Coding, PointSchema
from steercap.kernels.codecs import ENCODINGS
from steercap.kernels.codecs.coded import CodedRows
from steercap.saes.encoder import Encoder


def test_the_last_prompt_token_is_the_default() -> None:
    """[prompt, layer, hidden], of prompts of any length; generated tokens do not count."""
    found = stack([a_handle(), a_handle(prompt=(1,)), a_handle(prompt=range(6), output=())])
    assert found.shape == (3, 2, 2)
    assert found[..., 0].tolist() == [[2, 102], [0, 100], [5, 105]]
    assert torch.equal(found[..., 0], found[..., 1])


@pytest.mark.parametrize(("tokens", "row"), [(0, 0), (-1, 2), (-3, 0), (3, 3), (slice(3, None), 3), ([1, 1], 1)])
def test_a_token_is_chosen_as_in_a_capture(tokens, row) -> None:
    """Every selection of one token; negative ones count from the end of the prompt."""
    assert stack([a_handle()], tokens)[0, :, 0].tolist() == [row, 100 + row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_kept(dtype) -> None:
    """Rows are not converted."""
    assert stack([a_handle(dtype=dtype)] * 2).dtype == dtype


def test_layers_are_ascending_and_may_be_chosen() -> None:
    """As in `CaptureSpec(layers=)`; handles may then hold others beside them."""
    handles = [a_handle((0, 1, 3)), a_handle((1, 2, 3))]
    assert stack(handles, layers=[-1, 1])[:, :, 0].tolist() == [[102, 302]] * 2
    with pytest.raises(errors.InvalidRequest, match=r"differ in their layers.*\[0, 1, 3\].*handle 1.*layers="):
        stack(handles)
    with pytest.raises(errors.LayerOutOfRange, match=r"layers \[2\] were not captured"):
        stack(handles, layers=2)
    with pytest.raises(errors.LayerOutOfRange):
        stack(handles, layers=[0])


def test_layers_of_two_widths_are_no_tensor() -> None:
    """As `k` of Gemma 4; those of one width are."""
    handle = a_handle((0, 1, 2, 3))
    rows = {point: found.repeat(1, 2) if point.layer == 2 else found for point, found in handle.captures.items()}
    handle.lifecycle = Lifecycle("r", found=Found(Captures(rows, 4), handle.receipt))
    with pytest.raises(errors.InvalidRequest, match=r"\[2\] at layers 0, 1, 3, \[4\] at layers 2; give layers="):
        stack([handle])
    assert stack([handle], layers=[0, 3]).shape == (1, 2, 2)


def test_heads_of_two_numbers_are_no_tensor() -> None:
    """Though each head is as wide."""
    two, four = (a_handle((1,)) for _ in range(2))
    for handle, heads in ((two, 2), (four, 4)):
        rows = {point: torch.randn(4, heads, 8) for point in handle.captures}
        handle.lifecycle = Lifecycle("r", found=Found(Captures(rows, 4), handle.receipt))
    with pytest.raises(errors.InvalidRequest, match=r"differ in their width and dtype: \(\(2, 8\).*\(4, 8\)"):
        stack([two, four])


def test_features_are_no_rows() -> None:
    """Of an SAE as wide as the stream; nor features of which another number was kept."""
    rows = torch.randn(4, 8)
    point = Point(1, "resid_post")
    sae = SAE(Encoder(torch.randn(8, 8), torch.zeros(8)), torch.randn(8, 8), torch.zeros(8), point, point, "standard")
    kinds = []
    for coding in (Coding("features", 3), Coding("features", 2), Coding("full8")):
        handle, schema, codec = a_handle((1,)), PointSchema((8,), "float32"), ENCODINGS[coding.encoding]
        if coding.encoding == "features":
            found = sae.strongest(rows, k=coding.k)
            parts = {"indices": found.ids, "q": found.values, "active": found.active, "rest": found.rest}
        else:
            parts = codec.parts(codec.encode(rows, schema, coding, None), schema, coding)
        coded = {point: CodedRows(coding, schema, parts) for point in handle.captures}
        handle.lifecycle = Lifecycle("r", found=Found(Captures(coded, 4), handle.receipt))
        kinds.append(handle)
    for one, other in combinations(kinds, 2):
        with pytest.raises(errors.InvalidRequest, match="differ in their width and dtype"):
            stack([one, other])
    assert stack([kinds[0]] * 2).shape[0] == 2


def test_a_reduction_is_its_one_row() -> None:
    """And has no tokens to choose among."""
    handles = [a_handle(reduce="mean"), a_handle(reduce="mean", prompt=(1, 2))]
    assert stack(handles)[..., 0].tolist() == [[0, 100], [0, 100]]
    with pytest.raises(errors.InvalidSelection, match="leave tokens= out"):
        stack(handles, "last_prompt")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"dtype": torch.bfloat16}, "width and dtype.*bfloat16"),
        ({"reduce": "mean"}, "reduction"),
        ({"directions": ("joy",)}, "directions"),
        ({"model": "n"}, "model"),
    ],
)
def test_handles_that_differ_are_refused(other, says) -> None:
    """No tensor of two kinds of rows."""
    with pytest.raises(errors.InvalidRequest, match=f"differ in their {says}"):
        stack([a_handle(), a_handle(**other)])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("all", "selects 4 tokens of handle 0"),
        ("generated", "handle 1"),
        (7, "outside the sequence"),
        ("last", "known"),
    ],
)
def test_a_choice_of_other_than_one_token_is_refused(tokens, says) -> None:
    """Several tokens, none, or one beyond the end."""
    with pytest.raises(errors.InvalidSelection, match=says):
        stack([a_handle(), a_handle(output=(1, 2, 3))], tokens)


def test_a_row_that_was_not_captured_is_refused() -> None:
    """A capture of some tokens does not stand in for another token."""
    handle = a_handle()
    two = Receipt(handle.points, handle.receipt.positions[:2], handle.receipt.token_ids[:2], 4, None)
    handle.lifecycle = Lifecycle("r", found=Found(handle.captures, two))
    assert stack([handle], 1)[0, 0, 0] == 1
    with pytest.raises(errors.InvalidSelection, match="no row of position 2"):
        stack([handle])


@pytest.mark.parametrize("handles", [[], None, [None], [[a_handle()]], a_handle()])
def test_what_is_no_list_of_handles_is_refused(handles) -> None:
    """Nested lists are of n > 1, and None of prompts of which nothing was kept."""
    with pytest.raises(errors.InvalidRequest, match="stack"):
        stack(handles)


def test_what_was_not_fetched_is_refused() -> None:
    """As by reading `captures`."""
    handle = a_handle()
    handle.lifecycle = Lifecycle("r")
    with pytest.raises(errors.CaptureNotFetched):
        stack([handle])
