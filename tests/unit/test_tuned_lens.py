"""Tuned lenses from files as the package tuned-lens writes them, against its formula; damaged ones; edited rows."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from keepers import PLAN, TOKENS, Keeper
from safetensors.torch import save_file
from torch import nn

from steercap import Point
from steercap.captures import TunedLens
from steercap.captures.checks import Expected
from steercap.captures.lifecycle import Source
from steercap.core.messages import Owner
from steercap.errors import InvalidFile, InvalidRequest

LAYERS, WIDTH = 3, 8
CONFIG = {"base_model_name_or_path": "some/model", "d_model": WIDTH, "num_hidden_layers": LAYERS, "bias": True}


def folder(path: Path, *, safe: bool = False, **changes: object) -> tuple[Path, nn.ModuleList]:
    torch.manual_seed(0)
    translators = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    (path / "config.json").write_text(json.dumps({**CONFIG, "lens_type": "linear_tuned_lens", **changes}))
    state = translators.state_dict()
    save_file(state, path / "params.safetensors") if safe else torch.save(state, path / "params.pt")
    return path, translators


@pytest.mark.parametrize("safe", [False, True])
def test_a_row_is_moved_by_the_translator_of_the_layer_that_reads_it(tmp_path, safe) -> None:
    """tuned-lens: `h + translator[i](h)` of hidden_states[i]; the model's last ones are what they are."""
    path, translators = folder(tmp_path, safe=safe)
    lens = TunedLens.load(path)
    assert (len(lens), lens.model, lens.width) == (LAYERS, "some/model", WIDTH)
    rows = torch.randn(5, WIDTH)
    places = {Point(0, "embed"): 0, Point(1, "resid_pre"): 1, Point(0, "resid_post"): 1, Point(1, "resid_post"): 2}
    for point, index in places.items():
        known = rows + translators[index](rows)
        assert torch.allclose(lens.translate(rows, point), known, atol=1e-6), point
        with torch.autocast("cpu", dtype=torch.bfloat16):  # of float32 whatever the process has set
            assert torch.allclose(lens.translate(rows, point), known, atol=1e-6), point
    assert torch.equal(lens.translate(rows, Point(LAYERS - 1, "resid_post")), rows)


@pytest.mark.parametrize("point", [Point(1, "final_norm"), Point(1, "resid_mid"), Point(7, "resid_pre")])
def test_rows_of_other_places_are_refused(tmp_path, point) -> None:
    lens = TunedLens.load(folder(tmp_path)[0])
    with pytest.raises(InvalidRequest, match="tuned lens"):
        lens.translate(torch.randn(2, WIDTH), point)
    with pytest.raises(InvalidRequest, match="width 9"):
        lens.translate(torch.randn(2, 9), Point(0, "resid_pre"))


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("said", [True, None, False])
def test_a_bias_is_zero_only_where_the_configuration_says_that_there_is_none(tmp_path, safe, said) -> None:
    """A file that lacks what its configuration promises is refused, with the names of file and tensor."""
    path, translators = folder(tmp_path, safe=safe)
    config = {**CONFIG, "bias": said}
    if said is None:  # the package's own default is a bias
        del config["bias"]
    (path / "config.json").write_text(json.dumps(config))
    state = translators.state_dict()
    del state["1.bias"]
    file = path / ("params.safetensors" if safe else "params.pt")
    save_file(state, file) if safe else torch.save(state, file)
    if said is not False:
        with pytest.raises(InvalidFile, match=rf"{file.name}: 1\.bias is no tensor"):
            TunedLens.load(path)
        return
    rows = torch.randn(5, WIDTH)
    known = rows + rows @ translators[1].weight.T
    assert torch.allclose(TunedLens.load(path).translate(rows, Point(1, "resid_pre")), known, atol=1e-6)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemError('unpickled')",))


def test_what_is_no_tuned_lens_is_refused(tmp_path) -> None:
    """A file is read as tensors or not at all."""
    with pytest.raises(InvalidFile, match=r"config\.json does not describe"):
        TunedLens.load(tmp_path)
    path, _ = folder(tmp_path, lens_type="another")
    with pytest.raises(InvalidFile, match="lens_type='another'"):
        TunedLens.load(path)
    path, _ = folder(tmp_path, d_model=WIDTH + 1)
    with pytest.raises(InvalidFile, match=r"0\.weight is \[8, 8\], and must be finite, \[9, 9\]"):
        TunedLens.load(path)
    path, _ = folder(tmp_path, num_hidden_layers=LAYERS + 1)
    with pytest.raises(InvalidFile, match=r"3\.weight is no tensor"):
        TunedLens.load(path)
    path, translators = folder(tmp_path)
    translators[1].weight.data[0, 0] = torch.nan
    torch.save(translators.state_dict(), path / "params.pt")
    with pytest.raises(InvalidFile, match=r"1\.weight .* must be finite"):
        TunedLens.load(path)
    torch.save({"0.weight": Evil()}, path / "params.pt")
    with pytest.raises(InvalidFile, match=r"params\.pt"):
        TunedLens.load(path)
    (path / "params.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidFile, match=r"params\.pt"):
        TunedLens.load(path)
    (path / "params.pt").unlink()
    with pytest.raises(InvalidFile, match=r"neither params\.safetensors nor params\.pt"):
        TunedLens.load(path)


@pytest.mark.parametrize(
    ("edited", "captured", "before", "says"),
    [
        ("resid_post", "resid_post", False, ""),
        ("resid_post", "resid_post", True, r"resid_post\[2\] are from before their edits"),
        ("resid_post", "final_norm", True, ""),
        ("final_norm", "final_norm", False, ""),
        ("final_norm", "final_norm", True, r"final_norm\[2\] are from before their edits"),
        ("final_norm", "resid_post", False, r"the request edits final_norm\[2\]"),
    ],
)
def test_the_model_s_own_prediction_is_of_rows_as_they_were_edited(edited, captured, before, says) -> None:
    """Not of those from before their edits, nor of those before a norm that is edited."""
    keeper: Any = Keeper()
    plan = msgspec.structs.replace(PLAN, capture=msgspec.structs.replace(PLAN.capture, before_edits=before))
    point, reservation = Point(2, captured), SimpleNamespace()
    expected = Expected("r", plan, (point,), TOKENS)
    source = Source(keeper, Owner("r", 0), reservation, expected, edited=frozenset({Point(2, edited)}))
    with pytest.raises(InvalidRequest, match=says) if says else nullcontext():
        source.require_own(point, Point(2, "final_norm"))
