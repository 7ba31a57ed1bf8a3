"""What a block makes of rows, by the modules of its layer: whole, or each rank's part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steercap.architectures.families.base import Family
from steercap.architectures.sites.base import part_of
from steercap.core.messages import NotCapturing, Project, ProjectedRows
from steercap.worker.install import projected, projecting

WIDTH, HIDDEN = 12, 8
CPU = torch.device("cpu")


class Part(nn.Module):
    """A linear module of one rank, as vLLM writes it: it gives a pair, and takes its own part of a row."""

    def __init__(self, whole: nn.Linear, rank: int, ranks: int) -> None:
        super().__init__()
        self.input_size, self.input_size_per_partition = WIDTH, WIDTH // ranks
        self.weight = whole.weight.chunk(ranks, dim=1)[rank]

    def forward(self, rows):
        return rows @ self.weight.T, None


def layer_of(rank: int = 0, ranks: int = 1) -> nn.Module:
    """A layer whose attention has a norm behind it, and whose feed-forward block has none."""
    torch.manual_seed(3)
    layer, whole = nn.Module(), {"o_proj": nn.Linear(WIDTH, HIDDEN, bias=False), "down_proj": nn.Linear(WIDTH, HIDDEN)}
    for block, projection in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        setattr(layer, block, nn.Module())
        setattr(getattr(layer, block), projection, Part(whole[projection].requires_grad_(False), rank, ranks))
    layer.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
    layer.whole = whole
    return layer


def asked(project, site: str, rows: torch.Tensor, layer: int = 5) -> torch.Tensor:
    question = Project(layer, site, rows.numpy().tobytes(), len(rows), "float32")
    answer = projected(project, question, CPU)
    assert isinstance(answer, ProjectedRows)
    return torch.frombuffer(bytearray(answer.rows), dtype=torch.float32).view(len(rows), -1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_project_their_parts_of_rows(ranks) -> None:
    """What they give adds up to the whole, where no norm follows."""
    rows = torch.randn(4, WIDTH)
    parts = []
    for rank in range(ranks):
        layer = layer_of(rank, ranks)
        parts.append(asked(projecting({5: layer}, Family(), rank), "neurons", rows))
    assert torch.allclose(sum(parts), rows @ layer.whole["down_proj"].weight.T, atol=1e-6)


def test_a_norm_behind_a_block_is_part_of_it() -> None:
    rows, layer = torch.randn(4, WIDTH), layer_of()
    plain = rows @ layer.whole["o_proj"].weight.T
    assert torch.allclose(asked(projecting({5: layer}, Family(), 0), "z", rows), plain, atol=1e-6)
    behind = asked(projecting({5: layer}, Family(attn_out="norm"), 0), "z", rows)
    assert torch.allclose(behind, layer.norm(plain), atol=1e-6)
    other = asked(projecting({5: layer}, Family(attn_out="mlp"), 0), "z", rows)  # another block, whose rows are others
    assert torch.allclose(other, plain, atol=1e-6)
    itself = asked(projecting({5: layer}, Family(attn_out="self_attn.o_proj"), 0), "z", rows)
    assert torch.equal(itself, asked(projecting({5: layer}, Family(), 0), "z", rows))


def test_taps_do_not_see_what_is_projected() -> None:
    """They would take the rows for those of a request that the last pass has computed."""
    layer, seen = layer_of(), []
    layer.self_attn.o_proj.register_forward_pre_hook(lambda *_: seen.append("z"))
    layer.norm.register_forward_hook(lambda *_: seen.append("attn_out"))
    asked(projecting({5: layer}, Family(attn_out="norm"), 0), "z", torch.randn(1, WIDTH))
    assert seen == []


def test_a_stage_without_the_layer_says_nothing() -> None:
    question = Project(4, "z", torch.randn(1, WIDTH).numpy().tobytes(), 1, "float32")
    for project in (None, projecting({5: layer_of()}, Family(), 0)):
        assert isinstance(projected(project, question, CPU), NotCapturing)


def test_the_part_of_a_module_behind_an_adapter_is_that_of_the_module_itself() -> None:
    """vLLM's LoRA layer calls a rank's part its input's size: rows of half the heads would pass for whole ones."""
    from vllm.lora.layers.row_parallel_linear import RowParallelLinearWithLoRA

    linear = layer_of(rank=1, ranks=2).mlp.down_proj
    adapted = RowParallelLinearWithLoRA.__new__(RowParallelLinearWithLoRA)
    nn.Module.__init__(adapted)
    adapted.base_layer, adapted.input_size = linear, linear.input_size_per_partition  # as its constructor sets them
    assert part_of(linear) == part_of(adapted) == (WIDTH, 2)
    assert part_of(layer_of().mlp.down_proj) == (WIDTH, 1)
