"""The proof at start refuses layers that are read wrongly, each by the equation that should see it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import opened
from support.agreement import rows_agree
from support.rows import TINY_ENGINE

from steercap import errors
from steercap.architectures.families import FAMILIES
from steercap.testing import Reference, tiny_checkpoint

INVENTED = Path(__file__).parent.parent / "invented"
WRONG = Path(__file__).parent.parent / "wrong_families"
STREAM = ("resid_pre", "resid_post")
EVERY = ("attn_in", "attn_out", "k", "mlp_in", "mlp_out", "neurons", "q", "v", "z")
ADDED = (*STREAM, "attn_out", "mlp_out")

#: What is wrong, of which model, where it is read, and what must see it.
MISTAKES = {
    "a parallel block's stream counted twice": (
        "cohere residual_output=1 residual_input=residual",
        "cohere",
        ("resid_post",),
        r"the lens closes .*: off by",
    ),
    "the residual forgotten": (
        "qwen3 residual_output=None residual_input=",
        "qwen3",
        ("resid_post",),
        r"the lens closes at resid_post\[3\]: off by",
    ),
    "the residual forgotten where layers begin": (
        "qwen3 residual_input=",
        "qwen3",
        STREAM,
        r"resid_pre\[\d\] is resid_post\[\d\]: off by",
    ),
    "a multiplier ignored": (
        "granite factor=one",
        "granite",
        ADDED,
        r"is resid_pre \+ \(attn_out \+ mlp_out\): off by",
    ),
    "another projection's input taken for what heads give": (
        "qwen3 attn_proj=mlp.down_proj",
        "qwen3",
        ("z", "attn_out"),
        r"attn_out\[\d\] is what is projected of z\[\d\]: off by",
    ),
    "heads of another shape than they are computed of": (
        "qwen3 attn_proj=mlp.down_proj",
        "qwen3",
        ("q", "k", "v", "z"),
        r"z\[\d\] is the values, weighed by attention, where queries, values and z are \(4, 32\), \(2, 32\) and \(8, 32\)",
    ),
    "a gate forgotten": (
        "afmoe gated=",
        "afmoe",
        ("q", "k", "v", "z"),
        r"z\[\d\] is the values, weighed by attention: off by",
    ),
    "another projection's input taken for neurons": (
        "qwen3 mlp_proj=self_attn.o_proj",
        "qwen3",
        ("neurons", "mlp_out"),
        r"mlp_out\[\d\] is what is projected of neurons\[\d\]: off by",
    ),
    "the norm's output taken for what a layer of one block adds": (
        "mamba2 attn_out=norm",
        "mamba2",
        ("attn_out",),
        r"resid_post\[3\] is resid_pre \+ attn_out: off by",
    ),
    "the norm's input taken for what a block adds": (
        "gemma2 attn_out=self_attn",
        "gemma2",
        ADDED,
        r"is resid_pre \+ \(attn_out \+ mlp_out\): off by",
    ),
    "half of what is added to the heads' outputs projected": (
        "taps weak z",
        "qwen3",
        ("z", "attn_out"),
        r"attn_out\[\d\] is what is projected of z\[\d\], with an edit there: off by",
    ),
    "half of what is added to neurons projected": (
        "taps weak neurons",
        "qwen3",
        ("neurons", "mlp_out"),
        r"mlp_out\[\d\] is what is projected of neurons\[\d\], with an edit there: off by",
    ),
}


@pytest.fixture
def spoiled(monkeypatch) -> Iterator[object]:
    """Makes a family wrong here and in the workers."""
    monkeypatch.syspath_prepend(str(WRONG))
    FAMILIES["qwen3"]
    before = dict(FAMILIES._members)

    def spoil(said: str) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(WRONG), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("WRONG_FAMILY", said)
        if not said.startswith("taps"):  # which workers alone attach
            from families import spoil as really

            really(said)

    yield spoil
    FAMILIES._members = before
    sys.modules.pop("families", None)


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_layers_that_are_read_wrongly_are_refused(mistake, spoiled) -> None:
    """Every row is finite, every tap fires once a pass, every edit has an effect; and yet the rows are not the stream."""
    family, checkpoint, sites, reason = MISTAKES[mistake]
    spoiled(family)
    with pytest.raises(errors.ModelNotProved, match=reason):
        async with opened(tiny_checkpoint(checkpoint), sites=sites, **TINY_ENGINE):
            pass


async def test_unknown_layers_are_derived_and_the_rule_that_closes_is_taken(spoiled, record_property) -> None:
    """Cohere's layer takes a residual and returns it unchanged beside the whole stream: hidden + residual does not close,
    hidden alone does. Its other sites are derived, and are transformers' rows; no module reads a stream between blocks.
    """
    path = tiny_checkpoint("cohere")
    reference = Reference(path)  # by the family, as long as it is there
    spoiled("cohere")
    async with opened(path, sites="all", **TINY_ENGINE) as model:
        assert {point.site for point in model.points} == {*EVERY, "embed", "resid_pre", "resid_post", "final_norm"}
        assert model.serving.opened().family.derived
        assert set(model.refused) == {"resid_mid"}
        for name, same in (await rows_agree(model, reference)).items():
            record_property(f"derived {name}", f"1-cos {1 - same.cosine:.1e}, error {same.error:.1e}")
    with pytest.raises(
        errors.UnsupportedModel, match=r"no resid_mid in layers of commandr\.CohereDecoderLayer; resid_mid: "
    ):
        async with opened(path, sites=("resid_post", "resid_mid"), **TINY_ENGINE):
            pass


#: Sites that layers of `tests/invented` lack.
LACKING = {"OneNorm": {"resid_mid"}, "Sandwiched": set(), "HalfFed": {"mlp_out", "mlp_in", "neurons"}}


@pytest.mark.extended
@pytest.mark.parametrize("name", LACKING)
async def test_layers_of_others_are_served_or_refused_without_a_line_of_code(name, tmp_path, monkeypatch) -> None:
    """Models that a plug-in registers: blocks side by side, norms around blocks, half of a block added."""
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [f"{name}ForCausalLM"]}))
    monkeypatch.syspath_prepend(str(INVENTED))
    monkeypatch.setenv("PYTHONPATH", str(INVENTED), prepend=os.pathsep)
    async with opened(folder, sites="all", **TINY_ENGINE) as model:
        sites = {*EVERY, "resid_mid", "embed", "resid_pre", "resid_post", "final_norm"}
        assert {point.site for point in model.points} == sites - LACKING[name]
        assert set(model.refused) == LACKING[name]
        assert not model.verified


@pytest.mark.usefixtures("two_workers")
async def test_parts_of_sums_are_refused() -> None:
    """Command's blocks leave their outputs as parts of sums on the ranks of a tensor-parallel group, and the layer adds
    them up: the first rank's part is not what the block adds. The stream is whole.
    """
    path, arguments = tiny_checkpoint("cohere"), {**TINY_ENGINE, "tensor_parallel_size": 2}
    with pytest.raises(errors.ModelNotProved, match=r"resid_post\[3\] is resid_pre \+ \(attn_out \+ mlp_out\)"):
        async with opened(path, sites=("attn_out",), layers=[1], **arguments):
            pass
