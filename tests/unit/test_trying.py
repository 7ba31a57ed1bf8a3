"""Layers tried both ways: effects and perplexities against NumPy, on a model whose replies are known."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from steercap.cli.tables import best_tried, replies_of, tried_document, tried_layers
from steercap.core.spec import Point
from steercap.errors import InvalidSpec, LayerOutOfRange, UnknownName
from steercap.lab.studies.trying import BROKEN, Tried, TriedLayers, candidates, try_layers
from steercap.steering import DirectionSet, LayerVectors, Provenance

WIDTH, LAYERS = 6, range(10)
EMBEDDING = np.random.default_rng(0).standard_normal((50, WIDTH)).astype(np.float32)
#: Surprise of each token to the unsteered model, in nats.
COSTS = np.linspace(0.5, 4, 50)
#: Tokens of the replies: unsteered; by layer and sign.
PLAIN = (3, 4, 5, 6)


class Known:
    """A model that replies by a table, and whose row of a text is the mean embedding of the selected tokens."""

    max_model_len = 64

    def __init__(self, replies: dict[tuple[int, float], tuple[int, ...]], plain: tuple[int, ...] = PLAIN) -> None:
        self.replies, self.plain, self.asked = replies, plain, list[Any]()
        self.origin = {"revision": "", "dtype": "float32"}

    async def run(self, prompt: Any, sampling: Any, *, steering: Any) -> Any:
        """Answer one prompt, or give the log probabilities of many sequences."""
        if isinstance(prompt, list) and "prompt_logprobs" in sampling:
            return [self._read(ids) for ids in prompt]
        (edit,) = steering.flat() if steering else (None,)
        self.asked.append((prompt, edit and edit.layer, edit and edit.scale, edit and str(edit.selection)))
        ids = self.plain if edit is None else self.replies.get((edit.layer, edit.scale), self.plain)
        sample = SimpleNamespace(text=f"reply {ids}", token_ids=ids, finish_reason="length")
        return SimpleNamespace(output=SimpleNamespace(prompt_token_ids=[1, 2], outputs=[sample]), samples=[sample])

    @staticmethod
    def _read(ids: list[int]) -> Any:
        said = [None, *({token: SimpleNamespace(logprob=-COSTS[token])} for token in ids[1:])]
        return SimpleNamespace(output=SimpleNamespace(prompt_logprobs=said))

    async def tokenize(self, text: Any, **_options: Any) -> list[int]:
        """Ids stay as they are."""
        return list(text)

    async def read(self, prompts: Any, *, capture: Any, steering: Any) -> list[Any]:
        """Return handles with one row each."""
        assert steering is None, "texts are read without steering"
        found = []
        for prompt, spec in zip(prompts, capture, strict=True):
            ids = prompt["prompt_token_ids"]
            (layer,) = spec.layers
            row = torch.from_numpy(EMBEDDING[ids[2:]].mean(0, keepdims=True))
            found.append(
                SimpleNamespace(captures={Point(layer, "resid_post"): row}, points=[Point(layer, "resid_post")])
            )
        return found

    async def fetch_captures_batch(self, _handles: Any) -> None:
        """Nothing is left to fetch."""


def direction(name: str = "kind", suggested: int | None = 5) -> DirectionSet:
    vectors = LayerVectors({layer: torch.from_numpy(EMBEDDING[7] - EMBEDDING[8]) for layer in LAYERS}, name=name)
    auc = {layer: 1.0 if layer == suggested else 0.7 for layer in LAYERS}
    known = {} if suggested is None else {"auc": {name: auc}, "held_out": {name: (9, 9)}}
    return DirectionSet({name: vectors}, Provenance(**known))


def along(ids: tuple[int, ...]) -> float:
    """Where a reply lies along the direction, in its lengths."""
    vector = (EMBEDDING[7] - EMBEDDING[8]).astype(np.float64)
    return float(EMBEDDING[list(ids)].astype(np.float64).mean(0) @ vector / (vector @ vector))


def perplexity(ids: tuple[int, ...]) -> float:
    return float(np.exp(COSTS[list(ids)].mean()))


REPLIES = {
    (4, 3.0): (7, 7, 7, 6),
    (4, -3.0): (8, 8, 8, 6),
    (5, 3.0): (7, 4, 5, 6),
    (5, -3.0): (8, 4, 5, 6),
    (8, 3.0): (7, 49, 7, 49, 7, 48),  # far along, and broken
    (8, -3.0): (8, 8, 47, 47, 46, 45),
}


async def test_effects_and_perplexities_are_the_formulas() -> None:
    """Both signs of each layer beside the unsteered reply; the best layer is the furthest apart that is not broken."""
    model = Known(REPLIES)
    prompts = ["One two", "Three four"]
    found = await try_layers(model, direction(), prompts, layers=[8, 4, 5, 4], scale=3)
    assert len(model.asked) == 2 * (1 + 3 * 2)
    assert {asked[3] for asked in model.asked if asked[1] is not None} == {"'generated'"}
    for one in found.replies:
        ids = PLAIN if one.layer is None else REPLIES[one.layer, one.scale]
        assert one.text == f"reply {ids}"
        assert one.effect == pytest.approx(along(ids) - along(PLAIN), abs=1e-5)
        assert one.perplexity == pytest.approx(perplexity(ids))
    for effect in found.effects():
        up, down = REPLIES[effect.layer, 3.0], REPLIES[effect.layer, -3.0]
        assert effect.up == pytest.approx(along(up) - along(PLAIN), abs=1e-5)
        assert effect.apart == pytest.approx(along(up) - along(down), abs=1e-5)
        assert effect.perplexity == pytest.approx(math.sqrt(perplexity(up) * perplexity(down)))
        assert effect.broken == (effect.perplexity > BROKEN * perplexity(PLAIN)) == (effect.layer == 8)
    assert [one.layer for one in found.effects()] == [4, 5, 8]
    assert (found.best, found.read_at, found.prompts) == (4, 5, tuple(prompts))


async def test_an_empty_reply_is_blank_and_counts_for_nothing() -> None:
    """A vector that ends the reply at once has no effect figure, and the layer is not chosen."""
    model = Known({(4, 2.0): (), (4, -2.0): (), (5, 2.0): (7, 7), (5, -2.0): (8, 8)})
    found = await try_layers(model, direction(), ["a"], layers=[4, 5])
    empty = found.effects()[0]
    assert (math.isnan(empty.apart), empty.broken, found.best) == (True, True, 5)
    document = tried_document(found)
    assert document["layers"][0]["apart"] is None
    assert document["replies"][1]["effect"] is None
    silent = await try_layers(Known({}, plain=()), direction(), ["a"], layers=[4])
    assert silent.best is None
    assert "none" in best_tried(silent)


#: Perplexities of a reply that reads well, and of others.
SOUND, UNSOUND = (2.0, 3.0, 5.0), (math.inf, math.nan, 1e200)


def cells_of(found: TriedLayers) -> dict[int, list[str]]:
    """Cells of the table of the layers, by layer."""
    columns = [list(column.cells) for column in tried_layers(found).columns]
    return {int(row[0]): list(row) for row in zip(*columns, strict=True)}


@pytest.mark.parametrize("seed", range(40))
def test_signs_are_paired_by_prompt_and_an_infinite_perplexity_breaks_a_layer(seed) -> None:
    """Against a loop over the prompts: replies without tokens, and with perplexities that are no number."""
    drawn = np.random.default_rng(seed)
    plain = drawn.choice(SOUND, 3)
    replies, wanted = [Tried(number, None, 0.0, "", 0.0, float(cost)) for number, cost in enumerate(plain)], {}
    for layer in (2, 7, 9):
        moved, costs, known, infinite = list[Any](), list[float](), list[float](), False
        for number in range(3):
            pair = np.where(drawn.random(2) < 0.3, math.nan, drawn.normal(size=2))
            cost = np.where(np.isnan(pair), math.nan, drawn.choice((*SOUND, *SOUND, *UNSOUND), 2))
            for way, effect, one in zip((2.0, -2.0), pair, cost, strict=True):
                replies.append(Tried(number, layer, way, "", float(effect), float(one)))
            infinite |= math.inf in cost
            if not np.isnan(pair).any():
                moved, costs, known = [*moved, pair], [*costs, *cost], [*known, plain[number]]
        up, down = np.mean(moved, axis=0) if moved else (math.nan, math.nan)
        perplexity = math.inf if infinite else np.exp(np.log(costs).mean()) if costs else math.nan
        sound = bool(known) and bool(perplexity <= BROKEN * np.exp(np.log(known).mean()))
        wanted[layer] = (up, down, up - down, perplexity, 0.0, not sound, len(moved))
    found = TriedLayers("x", tuple("abc"), 2.0, 2, tuple(replies))
    fit = {layer: one[2] for layer, one in wanted.items() if not one[5] and one[2] > 0}
    assert found.best == max(fit, key=lambda layer: fit[layer], default=None)
    for one in found.effects():
        assert one[1:] == pytest.approx(wanted[one.layer], nan_ok=True)
        note = cells_of(found)[one.layer][-1]
        assert (f"{one.prompts} of 3 prompts" in note) == (one.prompts < 3)
        assert ("high perplexity" in note or "perplexity unknown" in note) == one.broken


async def test_replies_of_infinite_perplexity_are_not_the_best(monkeypatch) -> None:
    """A token that is impossible to the unsteered model breaks the layer furthest apart, and an unsteered reply too."""
    monkeypatch.setitem(globals(), "COSTS", np.where(np.arange(50) == 9, math.inf, COSTS))
    replies = {(4, 2.0): (7, 7, 9), (4, -2.0): (8, 8, 8), (5, 2.0): (7, 4), (5, -2.0): (8, 4)}
    found = await try_layers(Known(replies), direction(), ["a", "b"], layers=[4, 5])
    assert (found.effects()[0].perplexity, found.best) == (math.inf, 5)
    assert cells_of(found)[4][-2:] == ["inf", "high perplexity"]
    unsound = await try_layers(Known(replies, plain=(3, 9)), direction(), ["a"], layers=[5])
    assert unsound.effects()[0].broken, "nothing to compare with"


async def test_candidates_are_few_and_hold_the_suggested_one() -> None:
    """Some of the middle of many layers; all of few."""
    assert candidates(list(range(30)), 15) == [6, 10, 14, 15, 17, 20, 23]
    assert candidates([3], None) == [3]
    assert set(candidates([2, 9], 9)) == {2, 9}
    found = await try_layers(Known({}), direction(suggested=None), ["a"])
    assert {one.layer for one in found.replies} <= {None, *LAYERS}
    assert found.best is None, "nothing moved"


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"prompts": "My day"}, InvalidSpec, "prompts='My day'"),
        ({"prompts": []}, InvalidSpec, "none empty"),
        ({"prompts": ["a", ""]}, InvalidSpec, "none empty"),
        ({"prompts": {"a": 1}}, InvalidSpec, "give a list"),
        ({"scale": 0}, InvalidSpec, "scale=0"),
        ({"scale": -1.5}, InvalidSpec, "scale=-1.5"),
        ({"scale": math.nan}, InvalidSpec, "scale=nan"),
        ({"scale": "two"}, InvalidSpec, "scale='two'"),
        ({"layers": []}, InvalidSpec, "give a list of layers"),
        ({"layers": [1, "two"]}, InvalidSpec, "give a list of layers"),
        ({"layers": [40]}, LayerOutOfRange, "layer 40; 'kind' has layers 0 to 9"),
        ({"name": "kidn"}, UnknownName, "did you mean 'kind'"),
        ({"directions": {"kind": 1}}, InvalidSpec, "give a DirectionSet"),
        ({"directions": direction() | direction("b")}, UnknownName, "name=None"),
        ({"directions": LayerVectors({1: torch.zeros(WIDTH)})}, InvalidSpec, "zero at layer 1"),
    ],
)
async def test_a_wrong_argument_is_told_before_anything_runs(changes, error, said) -> None:
    """Its name, its value, and what is accepted."""
    model = Known({})
    given = {"directions": direction(), "prompts": ["a"], **changes}
    with pytest.raises(error, match=said):
        await try_layers(model, **given)
    assert not model.asked


async def test_the_tables_say_both_signs_and_the_best_layer() -> None:
    """In a terminal and in a notebook; a reply's markup stays text."""
    found = await try_layers(Known(REPLIES), direction(), ["[bold]a"], layers=[4, 8], scale=3)
    console = Console(width=160, record=True, file=io.StringIO())
    for table in (*replies_of(found), tried_layers(found)):
        console.print(table)
    shown = console.export_text()
    assert "'[bold]a'" in shown
    assert "high perplexity" in shown
    assert "best" in shown
    assert "layer 4" in best_tried(found)
    evil = TriedLayers("x", ("a",), 1.0, 4, (Tried(0, None, 0.0, "<b>[red]", math.nan, 2.0),))
    assert "<b>" not in evil._repr_html_()
    assert repr(found) == "TriedLayers('kind', ±3 at layers 4, 8, 1 prompts, best: 4)"


async def test_a_reply_that_repeats_itself_is_not_the_best() -> None:
    """The perplexity of a loop is low, and it can be far along."""
    replies = {**REPLIES, (6, 3.0): (7,) * 12, (6, -3.0): (8,) * 12}
    found = await try_layers(Known(replies), direction(), ["a"], layers=[4, 6], scale=3)
    effects = {one.layer: one for one in found.effects()}
    assert effects[6].broken
    assert effects[6].repeated > 0.6
    assert effects[6].apart > effects[4].apart
    assert effects[6].perplexity < BROKEN * effects[4].perplexity
    assert effects[4].repeated == 0
    assert found.best == 4
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(tried_layers(found))
    assert "repeats itself" in console.export_text()
