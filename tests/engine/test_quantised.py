"""Quantised models: what is captured and edited of them is what transformers computes from what their codes stand for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from conftest import opened
from safetensors.torch import load_file
from support.agreement import captured, sites_of, steps_agree
from support.quantised import KINDS, quantised_checkpoint, quantised_reference, unfit, unquantised_checkpoint
from support.rows import TINY_ENGINE, steps, within_16, worst

from steercap import CaptureHandle, SteerModel
from steercap.architectures.sites import SITES
from steercap.testing import Parity, Reference

MODULES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def here(kind: str) -> object:
    """A kind, left out where vLLM cannot run it, with the reason."""
    reason = unfit(kind)
    return pytest.param(kind, marks=pytest.mark.skipif(bool(reason), reason=reason))


@pytest.fixture(scope="module", params=[here(kind) for kind in KINDS])
async def served(request) -> AsyncIterator[tuple[str, SteerModel, Reference]]:
    """One kind: its name, its engine with all sites armed, and transformers on what its codes stand for."""
    kind = request.param
    arguments = {**TINY_ENGINE, "dtype": "bfloat16", **KINDS[kind].engine}
    async with opened(quantised_checkpoint(kind), sites="all", **arguments) as model:
        yield kind, model, quantised_reference(kind)


async def test_rows_and_edits_are_those_of_transformers(served, record_property) -> None:
    """Whatever the format, at every site that the family has; the proof at start has passed."""
    kind, model, reference = served
    assert model.verified
    family = model.serving.opened().family
    assert set(sites_of(model)) == {name for name, site in SITES.items() if family and site.known(family)}
    for name, same in (await steps_agree(model, reference, KINDS[kind].least)).items():
        record_property(f"{kind} {name}", f"1-cos {1 - same.cosine:.1e}")


async def test_rows_are_16_bits(served) -> None:
    """What is captured are the activations that modules are given and give, not codes."""
    _, model, _ = served
    (handle,) = await captured(model, (9,), 3)
    assert {rows.dtype for rows in handle.captures.values()} == {torch.bfloat16}


async def test_another_model_is_told_apart(served, record_property) -> None:
    """A reference with one module that gives other rows is found, whichever it is; one on the weights that were
    quantised, from which 8 bits differ by less than 16 bits allow, is several times as far away.
    """
    kind, model, reference = served
    handles = await captured(model, (40,), 7)
    for module in MODULES:
        wrong = reference.layers[2].get_submodule(module)
        hook = wrong.register_forward_hook(lambda _module, _args, output: output.roll(1, -1))
        with pytest.raises(AssertionError, match="beyond cosine"):
            within_16(_steps(handles, reference), KINDS[kind].least)
        hook.remove()
    site = "z" if kind == "fp8_kv" else "attn_out"
    right, before = (1 - _steps(handles, one)[f"{site} prompt"].cosine for one in (reference, _unquantised(kind)))
    record_property(f"{kind} {site}", f"1-cos {right:.1e}, on what was quantised {before:.1e}")
    assert before > 3 * right


def _steps(handles: Sequence[CaptureHandle], reference: Reference) -> dict[str, Parity]:
    return worst(steps(handle, reference) for handle in handles)


def _unquantised(kind: str) -> Reference:
    """transformers on the weights that were quantised, which rounds what else the engine rounds."""
    plain = unquantised_checkpoint(kind)
    if not KINDS[kind].config:
        return Reference(plain)
    reference, weights = quantised_reference(kind), load_file(plain / "model.safetensors")
    for name, parameter in reference.model.named_parameters():
        parameter.data = weights[name.replace(".linear.", ".")].float()
    return reference
