"""What vLLM's routers say outside of a pass, and which of them are not asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.laguna.configuration_laguna import LagunaConfig
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulatorRouter
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.transformers.moe import TransformersMoERunner

from steercap.adapters.modules import choosing
from steercap.architectures.families.base import Family
from steercap.core.messages import Choose, Chosen, NotCapturing
from steercap.errors import InvalidRequest
from steercap.worker.install import checked, chosen

FAMILY = Family(router="gate")
LOGITS = torch.tensor([[0.0, 4.0, 1.0, 2.0], [3.0, -1.0, 2.5, 0.0]])
CPU = torch.device("cpu")


class Gate(nn.Module):
    """What is read of vLLM's linear layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.params_dtype, self.out_dtype = dtype, None


class Sizes:
    """What is read of vLLM's configuration of experts."""

    hidden_dim = 16


def a_layer(router=None, *, kind=MoERunner, shared=False, factor=1.0, gate=torch.float32, runners=1) -> nn.Module:
    """A layer with vLLM's own runner of experts, which has none of them."""
    layer = nn.Module()
    layer.gate = Gate(gate)
    for number in range(runners):
        runner = kind.__new__(kind)
        nn.Module.__init__(runner)
        runner.router = router or CPURouter(2, 4)
        runner.moe_config, runner.routed_scaling_factor = Sizes(), factor
        runner._shared_experts = nn.Identity() if shared else None
        setattr(layer, f"experts{number}", runner)
    return layer


def choice(layer: nn.Module, logits=LOGITS, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """What layer 5 chooses."""
    found = choosing({5: layer}, FAMILY, dtype)(5, logits)
    assert found is not None
    return checked(*found, logits.shape[1])


def test_a_router_chooses_by_logits() -> None:
    """The two greatest, and a softmax of these two."""
    ids, weights = choice(a_layer())
    assert ids.sort(dim=1).values.tolist() == [[1, 3], [0, 2]]
    assert weights.sum(dim=1).allclose(torch.ones(2))
    assert weights.gather(1, ids.argsort(dim=1))[1].allclose(torch.tensor([3.0, 2.5]).softmax(0))
    assert choosing({5: a_layer()}, FAMILY, torch.float32)(4, LOGITS) is None


@pytest.mark.parametrize(
    ("dtype", "shared", "total"),
    [(torch.float32, True, 2.5), (torch.bfloat16, True, 2.5), (torch.float16, False, 2.5), (torch.float16, True, 1.0)],
)
def test_a_factor_behind_the_router_is_in_the_weights(dtype, shared, total) -> None:
    """Unless float16 has shared experts divided by it instead."""
    _, weights = choice(a_layer(factor=2.5, shared=shared), dtype=dtype)
    assert weights.dtype == torch.float32
    assert weights.sum(dim=1).allclose(torch.full((2,), total))


def test_logits_are_given_in_the_dtype_of_the_gate() -> None:
    """A router may round as it computes; and rows that are no numbers of that dtype are not the gate's."""
    rounded = LOGITS + 0.3125
    _, weights = choice(a_layer(gate=torch.bfloat16), rounded)
    assert torch.equal(weights.bfloat16().float(), weights)
    assert not torch.equal(choice(a_layer(), rounded)[1], weights)
    with pytest.raises(InvalidRequest, match=r"logits are torch.bfloat16, which cannot hold these rows exactly"):
        choice(a_layer(gate=torch.bfloat16), LOGITS + 1e-4)


def test_logits_are_rounded_where_the_block_rounds_them() -> None:
    """Param 2's gate gives float32, and its block hands experts the model's dtype: two logits that differ become one."""
    near = torch.tensor([[1.0, 1.001, 0.0, 0.5]])
    for rounded, wanted in ((False, (1.001, 1.0)), (True, (1.0, 1.0))):
        choose = choosing({5: a_layer()}, Family(router="gate", router_rounded=rounded), torch.bfloat16)
        ids, weights = choose(5, near)
        assert set(ids[0].tolist()) == {0, 1}
        assert weights[0].sort().values.allclose(torch.tensor(wanted).softmax(0).sort().values, atol=1e-5)


def test_logits_are_squashed_where_the_block_squashes_them() -> None:
    """Laguna's block may bound them behind the gate, which flattens the weights of its experts."""
    layer = a_layer()
    layer.mlp = nn.Module()
    layer.mlp.gate = layer.gate
    for cap in (0.0, 2.0):
        layer.mlp.config = LagunaConfig(moe_router_logit_softcapping=cap)
        ids, weights = choosing({5: layer}, Family(router="mlp.gate"), torch.float32)(5, LOGITS)
        bounded = torch.tanh(LOGITS / cap) * cap if cap else LOGITS
        assert weights.allclose(bounded.gather(1, ids).softmax(1))


def test_shared_experts_that_a_router_names_are_left_out() -> None:
    """vLLM may run them in one kernel with the others, behind these and with ids of their own."""

    def routed(hidden_states, gating_output, topk, **_):
        best = gating_output.softmax(1).topk(topk, dim=1)
        one = torch.ones(len(hidden_states), 1)
        return torch.cat([best.values, one], 1), torch.cat([best.indices, 4 * one.int()], 1)

    ids, _ = choice(a_layer(CPURouter(2, 4, custom_routing_function=routed)))
    assert ids.tolist() == [[1, 3], [0, 2]]


def by_hidden(hidden_states, gating_output, topk, **_):
    """Weights that hang on more than logits."""
    best = gating_output.topk(topk, dim=1)
    return best.values * hidden_states.mean(dim=1, keepdim=True), best.indices


SIMULATED = RoutingSimulatorRouter(2, 4)
NOTHING = ZeroExpertRouter(2, 4, torch.zeros(4), 3, "identity")
BY_TOKEN = CPURouter(2, 4, scoring_func="sqrtsoftplus", hash_indices_table=torch.zeros(9, 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (a_layer(runners=0), "one of vLLM's routers in a Module, found 0"),
        (a_layer(runners=2), "one of vLLM's routers in a Module, found 2"),
        (a_layer(SIMULATED), "a RoutingSimulatorRouter, is not one"),
        (a_layer(NOTHING), "a ZeroExpertRouter, is not one"),
        (a_layer(FusedTopKRouter(2, 4)), "a FusedTopKRouter, is not one .* on cpu"),
        (a_layer(BY_TOKEN), "chooses by the token"),
        (a_layer(kind=TransformersMoERunner), "chosen by a module of transformers"),
        (a_layer(CPURouter(2, 4, custom_routing_function=by_hidden)), "by more than logits"),
    ],
)
def test_what_logits_do_not_say_is_refused(layer, says) -> None:
    with pytest.raises(InvalidRequest, match=says):
        choice(layer)


def test_a_runner_that_lacks_what_is_needed_is_refused_by_name() -> None:
    layer = a_layer()
    del layer.experts0.routed_scaling_factor
    with pytest.raises(InvalidRequest, match="a layer's experts lacks routed_scaling_factor"):
        choice(layer)


@pytest.mark.parametrize("ids", [[[0, 4]], [[-1, 2]], [[3, 3]]])
def test_experts_that_cannot_be_are_refused(ids) -> None:
    with pytest.raises(InvalidRequest, match="must choose different experts below 4"):
        checked(torch.tensor(ids), torch.ones(1, 2), 4)


def test_a_refusal_is_an_answer() -> None:
    """Other ranks answer too: an exception would desynchronise their replies."""
    asked = Choose(5, LOGITS.numpy().tobytes(), 2, "float32")
    refused = chosen(choosing({5: a_layer(BY_TOKEN)}, FAMILY, torch.float32), asked, CPU)
    assert isinstance(refused, Chosen)
    assert "by the token" in refused.refused
    assert isinstance(chosen(None, asked, CPU), NotCapturing)
    assert isinstance(chosen(choosing({}, FAMILY, torch.float32), asked, CPU), NotCapturing)
    found = chosen(choosing({5: a_layer()}, FAMILY, torch.float32), asked, CPU)
    assert isinstance(found, Chosen)
    assert (found.refused, len(found.ids), len(found.weights)) == ("", 2 * 2 * 8, 2 * 2 * 4)
