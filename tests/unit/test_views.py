"""Views wrap long texts, show white space, and say what a layer would say next."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from typing import Any

import matplotlib.image
import msgspec
import pytest
import torch
from handles import a_handle
from keepers import PLAN, Keeper
from rich.cells import cell_len
from rich.console import Console
from transformers import AutoTokenizer

from steercap import SAE, errors
from steercap.captures.checks import Expected
from steercap.captures.lifecycle import Source
from steercap.captures.rows import Captures, Found
from steercap.core.messages import Owner
from steercap.core.prompts import drawn, shortened, visible
from steercap.core.spec import Point
from steercap.lab.mechanism.views import (
    LogitAttribution,
    LogitLens,
    TokenHeatmap,
    Unembedding,
    logit_attribution,
    logit_lens,
)
from steercap.testing import Reference, tiny_checkpoint
from steercap.testing.saes import RandomSAE

IDS = [72, 101, 32, 10, 9, 33]


def printed(view, width=80) -> list[str]:
    """What a terminal of some width shows, without colours."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(view)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("\r\n", "␍↵"),
        ("\u00a0", "⍽"),
        ("\u3000", "␣"),
        ("", "∅"),
        ("\x1b", "�"),
    ],
)
def test_white_space_is_seen(text, shown) -> None:
    """Each kind has its sign, in every view."""
    assert visible(text) == shown
    assert drawn("$x$") == r"\$x\$"
    assert shortened(" abcdef", 4) == "·ab…"
    html = TokenHeatmap([text or "", "x"], [1.0, 2.0])._repr_html_()
    assert shown.replace("↵", "↵<br>") in html


def test_a_long_heat_map_wraps_between_tokens() -> None:
    """In a terminal no token is cut, and in HTML the browser may break before each."""
    tokens = [f" token{number}" for number in range(60)]
    view = TokenHeatmap(tokens, torch.randn(60), title="title")
    for width in (30, 80, 200):
        lines = [line for line in printed(view, width) if "token" in line]
        assert all(cell_len(line) <= width for line in lines)
        assert [word for line in lines for word in line.replace("·", " ").split()] == [t.strip() for t in tokens]
        assert len(lines) < 60 * 9 / (width - 8) + 1
    assert view._repr_html_().count("<wbr>") == 60
    assert "".join(printed(TokenHeatmap(["x" * 50], [1.0]), 20)[:3]) == "x" * 50


def test_a_long_picture_has_several_lines(tmp_path) -> None:
    """A picture grows downwards: 400 tokens are no wider than 48."""
    sizes = [
        matplotlib.image.imread(
            TokenHeatmap([" word"] * count, torch.linspace(-1, 1, 2 * count).reshape(-1, 2), ("a", "b")).plot(
                tmp_path / "x.png"
            )
        ).shape
        for count in (48, 400)
    ]
    assert abs(sizes[1][1] - sizes[0][1]) < 10
    assert sizes[1][0] > 4 * sizes[0][0]
    with pytest.raises(errors.InvalidRequest, match="do not fit one picture"):
        TokenHeatmap(["x"] * 9601, torch.zeros(9601)).plot(tmp_path / "y.png")


@pytest.fixture(scope="module")
def lensed():
    """A handle with the rows of a tiny model, and the logits that model has for them."""
    reference = Reference(tiny_checkpoint("qwen3"))
    points = [Point(layer, site) for layer in range(4) for site in ("resid_post", "mlp_out")]
    handle = a_handle(range(4), prompt=IDS, output=(), model=str(tiny_checkpoint("qwen3")))
    handle.points = tuple(points)
    handle.lifecycle.found = Found(Captures(reference.rows(IDS, points), 4), handle.receipt)
    with torch.inference_mode():
        return handle, reference.model(torch.tensor([IDS]), use_cache=False).logits[0].softmax(-1)


def test_the_lens_of_the_last_layer_is_the_model(lensed) -> None:
    """Tokens and probabilities, most probable first; those of earlier layers are others."""
    handle, known = lensed
    lens = logit_lens(handle, tiny_checkpoint("qwen3"), top=3)
    assert (lens.layers, lens.positions, lens.token_ids.shape) == ((0, 1, 2, 3), tuple(range(6)), (4, 6, 3))
    expected = known.topk(3, -1)
    assert torch.equal(lens.token_ids[-1], expected.indices)
    assert torch.allclose(lens.probabilities[-1], expected.values, atol=1e-5)
    assert not torch.equal(lens.token_ids[0], expected.indices)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3"))
    assert lens.words[3][5][0] == tokenizer.decode([int(lens.token_ids[3, 5, 0])])
    again = logit_lens(handle, tiny_checkpoint("qwen3"), top=3, unembedding=Unembedding.load(tiny_checkpoint("qwen3")))
    assert torch.equal(again.token_ids, lens.token_ids)


def test_a_lens_is_shown_everywhere(lensed, tmp_path) -> None:
    """HTML, terminal and picture hold every layer and token; wide ones wrap; text is escaped."""
    lens = logit_lens(lensed[0], tiny_checkpoint("qwen3"))
    html = lens._repr_html_()
    assert html.count("<td") == 4 * 6
    for width in (40, 200):
        lines = printed(lens, width)
        assert all(cell_len(line) <= width for line in lines)
        assert sum(line.split()[:1] == ["3"] for line in lines) == (2 if width == 40 else 1)
    long = LogitLens(
        lens.layers,
        lens.read * 10,
        tuple(range(60)),
        lens.token_ids.repeat(1, 10, 1),
        lens.probabilities.repeat(1, 10, 1),
        tuple(words * 10 for words in lens.words),
        "<script>",
    )
    assert "<script>" not in long._repr_html_()
    wide, high = (matplotlib.image.imread(one.plot(tmp_path / "x.png")).shape for one in (lens, long))
    assert high[1] < 3 * wide[1]
    assert high[0] > 3 * wide[0]


def test_a_lens_needs_rows_of_the_stream(lensed) -> None:
    """Projections, reductions, blocks and other widths are refused."""
    handle, _ = lensed
    path = tiny_checkpoint("qwen3")
    for arguments, says in (
        ({"site": "mlp_out"}, "residual stream"),
        ({"site": "resid_pre"}, "no row of 'resid_pre'"),
        ({"top": 0}, "top=0"),
        ({"top": True}, "top=True"),
        ({"top": 513}, "to 512"),
    ):
        with pytest.raises(errors.InvalidRequest, match=says):
            logit_lens(handle, path, **arguments)
    for other, says in (
        (a_handle(reduce="mean"), "the mean"),
        (a_handle(directions=("joy",)), "projections"),
        (a_handle(model=str(path)), "width 2"),
    ):
        with pytest.raises(errors.InvalidRequest, match=says):
            logit_lens(other, path)
    with pytest.raises(errors.ModelNotLoaded, match="no configuration"):
        logit_lens(handle, "/no/such")
    with pytest.raises(errors.ModelNotLoaded, match="no tokenizer"):
        logit_lens(handle, "/no/such", unembedding=Unembedding.load(path))


def test_rows_of_another_model_are_warned_of(lensed) -> None:
    """Rows of one model say nothing by the unembedding of another; copies of one model have one name."""
    handle, path = lensed[0], tiny_checkpoint("qwen3")
    other = a_handle(range(4), prompt=IDS, output=(), model="Qwen/Qwen3-8B-Base")
    other.lifecycle.found = handle.lifecycle.found
    with pytest.warns(UserWarning, match="the handle says that it was made for model 'Qwen/Qwen3-8B-Base'"):
        logit_lens(other, path)
    other.model = f"/elsewhere/{path.name}"
    logit_lens(other, path)


@pytest.mark.parametrize("view", ["logit_lens", "logit_attribution"])
@pytest.mark.parametrize(
    "case",  # the edited point, `before_edits`, and the error
    [
        (Point(3, "resid_post"), True, r"resid_post\[3\] are from before their edits"),
        (Point(3, "final_norm"), False, r"the request edits final_norm\[3\]"),
        (Point(0, "resid_post"), True, r"resid_post\[0\] are from before their edits"),
        (Point(3, "resid_post"), False, ""),
        (Point(0, "mlp_out"), True, ""),
    ],
)
def test_rows_that_the_model_did_not_predict_from_are_refused(view, case, lensed, tmp_path) -> None:
    """As by `handle.lens()`, where the handle knows of its edits; an SAE's features are of edited rows, too."""
    (edited, before, says), path = case, tiny_checkpoint("qwen3")
    handle = a_handle(range(4), prompt=IDS, output=(), model=str(path))
    handle.lifecycle.found = lensed[0].lifecycle.found
    plan = msgspec.structs.replace(PLAN, capture=msgspec.structs.replace(PLAN.capture, before_edits=before))
    keeper: Any = Keeper()
    expected = Expected("r", plan, handle.points, IDS)
    handle.lifecycle.source = Source(keeper, Owner("r", 0), None, expected, edited=frozenset({edited}))
    sae = SAE.load(RandomSAE("standard", 128, 64).write(tmp_path), input=(0, "resid_post"))
    refused = says and (view == "logit_attribution" or edited.layer == 3)  # the lens of earlier rows is no prediction
    with pytest.raises(errors.InvalidRequest, match=f"{view}: .*{says}") if refused else nullcontext():
        logit_lens(handle, path) if view == "logit_lens" else logit_attribution(handle, path, sae, token=65)
    handle.lifecycle.source = None


@pytest.mark.parametrize("zeros", [0, 7, 1000])
def test_values_at_the_centre_do_not_hide_others(zeros) -> None:
    """Most activations of a feature are 0, and an outlier is one among those that are not."""
    values = [300.0, *[3.0] * 5, *[0.0] * zeros]
    assert TokenHeatmap(["x"] * len(values), values).limit == 3
    assert TokenHeatmap(["x"] * 3, [0.0, 0.0, 7.0]).limit == 7
    assert TokenHeatmap(["x"], [0.0]).limit == 0


def test_a_logit_is_told_as_a_sum_of_all_its_terms() -> None:
    """The numbers of a line, those after the colon of a feature and of each name, add up to the logit."""
    one = [torch.tensor([value]) for value in (0.25, 0.5, 0.75, 4.0, 7.0)]
    ids, values = torch.tensor([[7, -1]]), torch.tensor([[1.5, 0.0]])
    found = LogitAttribution(
        torch.tensor([3]), ("a",), torch.tensor([5]), ("b",), ids, values, values, *one, torch.tensor([True])
    )
    logit, terms = str(found).split("→")[1].split("=")
    assert float(logit.split()[-1]) == sum(float(term) for term in re.findall(r"[+-]\d+\.\d+", terms)) == 7.0


def test_a_heat_map_tells_positions() -> None:
    """Those of the tokens, where they are given; one for each."""
    for given, known in (((), ["0", "1"]), ([5, 9], ["5", "9"])):
        shown = TokenHeatmap(["a", "b"], [1.0, 2.0], positions=given)._repr_html_()
        assert re.findall(r'title="(\d+): ', shown) == known
    with pytest.raises(errors.InvalidRequest, match="1 positions for 2 tokens"):
        TokenHeatmap(["a", "b"], [1.0, 2.0], positions=[5])
