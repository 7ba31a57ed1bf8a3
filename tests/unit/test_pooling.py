"""Pooling: parameters are checked before anything is sent, and what stands behind a norm is proved."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm import PoolingParams, SamplingParams

from steercap import Encoded, errors
from steercap.adapters.engine import _carry, _require_whole
from steercap.adapters.hooks import carried
from steercap.adapters.parameters import read_pooling, tasks_of, token_head
from steercap.architectures.decoder import decoder_of
from steercap.architectures.families import FAMILIES, family_of, generating
from steercap.core.plan import EXTRA_ARGS_KEY, CapturePlan, Plan
from steercap.core.program import SteeringPlan
from steercap.core.schema import RAW
from steercap.core.spec import Point
from steercap.core.tokens import Range
from steercap.requests.equations import equations, norm_of
from steercap.worker.install import projecting

EMBEDDING = ("embed", "token_embed")


def read(given: Any) -> PoolingParams:
    """As of an embedding model."""
    return read_pooling(given, EMBEDDING, "embed")


def test_parameters_are_vllms_own_and_a_copy() -> None:
    """None is the model's own task; a dict and vLLM's object say the same, NumPy's numbers included."""
    assert read(None).task == "embed"
    given = PoolingParams(task="token_embed", dimensions=4, use_activation=False)
    found = read(given)
    assert found is not given
    assert found == given
    fields = {"task": "token_embed", "dimensions": np.int64(4), "use_activation": np.False_}
    assert read(fields) == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"task": "classify"}, "'classify': this model does 'embed', 'token_embed'"),
        ({"task": "plugin"}, "'plugin': this model does"),
        ({"task": 3}, "task: expected `str"),
        ({"dimensions": 2.5}, "dimensions: expected `int"),
        ({"use_activation": 1}, "use_activation: expected `bool"),
        ({"normalize": True}, "no pooling parameter 'normalize'"),
        ({"dimension": 4}, "did you mean 'dimensions'"),
        ({"extra_kwargs": {}}, "no pooling parameter 'extra_kwargs'"),
        (PoolingParams(extra_kwargs={"compressed_token_type_ids": 2}), "extra_kwargs is vLLM's own"),
        (PoolingParams(requires_token_ids=True), "requires_token_ids is vLLM's own"),
        (
            {"task": "token_embed", "skip_reading_prefix_cache": False},
            "vLLM returns nothing for tokens that it takes from",
        ),
        ([], "give vLLM's PoolingParams, or a dict"),
        ("embed", "give vLLM's PoolingParams, or a dict"),
    ],
)
def test_parameters_that_cannot_be_are_refused(given, says) -> None:
    """By name, in the client."""
    with pytest.raises(errors.InvalidRequest, match=says):
        read(given)


class Config:
    """What `tasks_of` asks of vLLM's."""

    def get_pooling_task(self, tasks: tuple[str, ...]) -> str:
        return tasks[0]


def test_a_model_without_a_task_that_can_be_asked_for_is_refused() -> None:
    """A plug-in reads requests itself."""
    assert tasks_of(("plugin", "token_embed", "embed"), Config()) == (EMBEDDING, "embed")
    with pytest.raises(errors.UnsupportedModel, match="pools for plugin; known: embed"):
        tasks_of(("plugin",), Config())

    class Plugged(Config):
        def get_pooling_task(self, tasks: tuple[str, ...]) -> str:
            raise RuntimeError(f"Unsupported task: 'plugin' Supported tasks: {tasks}")

    with pytest.raises(errors.UnsupportedModel, match="pooler_config cannot be asked for"):
        tasks_of(("embed",), Plugged())


@pytest.mark.parametrize("start", [0, 6])
def test_a_plan_travels_with_its_request(start) -> None:
    """What the client puts into pooling parameters the worker finds; rows of the prompt are not read from the cache."""
    from vllm.v1.core.sched.output import NewRequestData

    plan = Plan("a-1", 7, 7, capture=CapturePlan((0,), (Range(start, None),), reduce=None, coding=RAW))
    params = read(None)
    _carry(plan, params)
    request = NewRequestData("a-1", [1] * 7, [], None, params, ([],), 0, None)
    assert Plan.decode(carried(request)[EXTRA_ARGS_KEY]) == plan
    assert bool(params.skip_reading_prefix_cache) == (start < 6)
    assert carried(NewRequestData("a-2", [1], [], None, read(None), ([],), 0, None)) == {}


@pytest.mark.parametrize(("samples", "held", "alone"), [(1, True, False), (2, False, False), (2, True, True)])
def test_samples_whose_steering_begins_apart_share_no_cache(samples, held, alone) -> None:
    """A sample that is resumed would read what another computed with its steering on, under the salt of both."""
    plan = Plan("a-1", 7, 9, samples=samples, steering=SteeringPlan(0, b"", b"", (), (), held=held))
    params = SamplingParams(max_tokens=2)
    _carry(plan, params)
    assert bool(params.skip_reading_prefix_cache) == alone


def test_what_vllm_aborted_is_no_embedding() -> None:
    """It gives an empty tensor, as if it were one."""
    from vllm.outputs import PoolingOutput, PoolingRequestOutput

    with pytest.raises(errors.EngineFailure, match="aborted"):
        _require_whole(PoolingRequestOutput("a-1", PoolingOutput(torch.empty(0)), [1], 0, finished=True))
    _require_whole(PoolingRequestOutput("a-1", PoolingOutput(torch.ones(2)), [1], 0, finished=True))


def test_an_embedding_is_that_of_a_task_that_embeds() -> None:
    """Probabilities are no embedding."""
    assert Encoded(torch.ones(3), "embed", (1, 2)).embedding.tolist() == [1, 1, 1]
    assert repr(Encoded(torch.ones(3), "embed", (1, 2))) == "Encoded(embed, [3], 2 tokens)"
    with pytest.raises(errors.InvalidRequest, match="'classify' gives no embedding"):
        assert Encoded(torch.ones(3), "classify", (1, 2)).embedding is None


def test_a_pooler_that_gives_nothing_for_a_token_closes_no_proof() -> None:
    """Only heads of tokens are asked."""
    model = nn.Module()
    model.pooler = nn.Identity()
    assert token_head(model) is None


@pytest.mark.parametrize(
    ("pooling", "family"),
    [
        ("Qwen3Model", "qwen3"),
        ("Qwen3ForSequenceClassification", "qwen3"),
        ("LlamaModel", "llama"),
        ("MistralModel", "mistral"),
        ("Gemma3TextModel", "gemma3"),
        ("Qwen2ForProcessRewardModel", "qwen2"),
        ("BertModel", "bert"),
        ("XLMRobertaForSequenceClassification", "bert"),
        ("ModernBertForTokenClassification", "modernbert"),
    ],
)
def test_an_architecture_that_pools_has_the_layers_of_one_that_generates(pooling, family) -> None:
    """Which sites it has is known before it is loaded."""
    assert family_of((pooling, generating(pooling))) is FAMILIES[family]
    assert generating("Qwen3ForCausalLM") == "Qwen3ForCausalLM"


# Norms behind sums


class Block(nn.Module):
    """The norms of BERT's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.Module(), nn.Module()
        self.attention.output = nn.Module()
        self.attention.output.LayerNorm, self.output.LayerNorm = nn.LayerNorm(8), nn.LayerNorm(8)
        for norm in (self.attention.output.LayerNorm, self.output.LayerNorm):
            nn.init.normal_(norm.weight)


def test_the_norms_of_sums_are_the_models_own() -> None:
    """Each site's rows go through its own norm; those of another layer through none here."""
    block = Block()
    project = projecting({3: block}, FAMILIES["bert"], shard=0)
    rows = torch.randn(5, 8)
    with torch.inference_mode():
        for site, norm in (("resid_mid", block.attention.output.LayerNorm), ("mlp_out", block.output.LayerNorm)):
            assert torch.equal(project(3, site, rows), norm(rows))
    assert project(2, "mlp_out", rows) is None


def test_the_norm_of_another_sum_does_not_hold() -> None:
    """Without the block's output, or scaled where a norm alone would hide it."""
    end, rows, added = Point(1, "resid_post"), torch.randn(5, 8), torch.randn(5, 8)
    norm = nn.LayerNorm(8)
    with torch.inference_mode():
        assert norm_of(end, "sum", norm(rows + added), norm(rows + added)).holds
        assert not norm_of(end, "sum", norm(rows + added), norm(rows)).holds
        assert not norm_of(end, "sum", norm(rows + added), norm(rows + 2 * added)).holds
    assert not norm_of(end, "sum", torch.full((5, 8), math.nan), rows).holds


def test_a_normed_sum_is_none_of_the_stream() -> None:
    """Of such layers the sum before the first norm is claimed, and the end of a layer is still the next one's input."""
    rows = {Point(layer, site): torch.randn(5, 8) for layer in (0, 1) for site in ("resid_pre", "attn_out", "mlp_out")}
    for layer in (0, 1):
        rows[Point(layer, "resid_mid")] = rows[Point(layer, "resid_pre")] + rows[Point(layer, "attn_out")]
        rows[Point(layer, "resid_post")] = torch.randn(5, 8)
    rows[Point(1, "resid_pre")] = rows[Point(0, "resid_post")].clone()
    rows[Point(1, "resid_mid")] = rows[Point(1, "resid_pre")] + rows[Point(1, "attn_out")]
    claims = list(equations(rows, 1.0, normed=True))
    assert {str(claim.name) for claim in claims} == {
        "resid_mid[0] is resid_pre + attn_out",
        "resid_mid[1] is resid_pre + attn_out",
        "resid_pre[1] is resid_post[0]",
    }
    assert all(claim.holds for claim in claims)


# Where layers are


def test_what_holds_nothing_but_the_layers_stands_for_what_holds_it() -> None:
    """An encoder's list may lie in a module of its own, and its norm beside that."""
    model = nn.Module()
    model.encoder, model.final_norm = nn.Module(), nn.LayerNorm(8)
    model.encoder.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    found = decoder_of(model, 3, range(3))
    assert found.parent is model
    assert found.path == "encoder.layers"
