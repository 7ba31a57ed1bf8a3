"""From texts to directions: a model reads them, its workers reduce each text to one row, a method does the rest."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from jaxtyping import Float

from steercap.core.spec import CaptureSpec, Layers, Reduction
from steercap.core.tokens import Tokens, TokenSelection
from steercap.errors import InvalidSpec
from steercap.prompts import listed, templated
from steercap.vectors.directions import DirectionSet, Provenance
from steercap.vectors.layers import LayerVectors
from steercap.vectors.methods import METHODS

if TYPE_CHECKING:
    from steercap.model import SteerModel

#: Texts of one call, and calls under way: enough to fill vLLM's batch, few enough that their rows need little room.
CALL_TEXTS: Final = 64
CALLS: Final = 4


class Exchange(NamedTuple):
    """A prompt and what was answered; its rows are those of the answer.

    Args:
        prompt: a str, token ids, or a conversation of {"role", "content"} dicts, put through the chat template.
        response: a str, or the token ids that were generated.
    """

    prompt: Any
    response: str | Sequence[int]


#: What rows are read of: text, token ids, or an exchange.
Text: TypeAlias = "str | Sequence[int] | Exchange"


@dataclass(frozen=True, eq=False)
class Rows:
    """One row a text and layer.

    Args:
        values: float32 [texts, layers, hidden].
        layers: the layers.
        prompts: SHA-256 of the token ids of each text.
        bytes_moved: what came from the workers.
    """

    values: Float[torch.Tensor, "texts layers hidden"]
    layers: tuple[int, ...]
    prompts: tuple[bytes, ...]
    bytes_moved: int


@dataclass(frozen=True, eq=False)
class Contrast:
    """Rows of texts that show something, and of texts that do not.

    Args:
        positive, negative: float32 [texts, layers, hidden].
        positive_groups, negative_groups: what each text belongs to, such as its question: texts of one group are held
            out together, and are paired, in their order, for methods that compare pairs.
    """

    positive: Float[torch.Tensor, "p layers hidden"]
    negative: Float[torch.Tensor, "n layers hidden"]
    positive_groups: Sequence[Hashable]
    negative_groups: Sequence[Hashable]

    def __post_init__(self) -> None:
        for kind in ("positive", "negative"):
            rows, groups = getattr(self, kind), getattr(self, f"{kind}_groups")
            if rows.dim() != 3 or len(rows) != len(groups) or not len(rows):
                raise InvalidSpec(
                    f"Contrast: {kind} rows {tuple(rows.shape)} in {len(groups)} groups; expected "
                    "[texts, layers, hidden], one text at least, and a group for each"
                )

    def split(self, held_out: float, seed: int) -> tuple[Contrast, Contrast | None]:
        """Texts to find a direction with, and texts to try it on: whole groups, drawn by the seed.

        Args:
            held_out: share of the groups that both kinds have, in [0, 1); 0 holds none out.
            seed: of the draw.

        Raises:
            InvalidSpec: too few groups for both parts.
        """
        if not 0 <= held_out < 1:
            raise InvalidSpec(f"held_out={held_out!r}; give a share of the groups, from 0 to less than 1")
        if not held_out:
            return self, None
        common = [group for group in dict.fromkeys(self.positive_groups) if group in set(self.negative_groups)]
        count = max(1, round(held_out * len(common)))
        if len(common) < 2:
            raise InvalidSpec(
                f"{len(common)} groups have texts of both kinds; to hold some out there must be 2 or more"
            )
        out = set(random.Random(seed).sample(common, min(count, len(common) - 1)))  # noqa: S311 -- a split, no secret
        return self._where(lambda group: group not in out), self._where(lambda group: group in out)

    def pairs(self) -> Contrast:
        """Texts that have one of the other kind in their group, in the same order in both kinds."""
        places: list[tuple[int, int]] = []
        waiting: dict[Hashable, list[int]] = {}
        for place, group in enumerate(self.negative_groups):
            waiting.setdefault(group, []).append(place)
        for place, group in enumerate(self.positive_groups):
            if waiting.get(group):
                places.append((place, waiting[group].pop(0)))
        if not places:
            raise InvalidSpec("no group has texts of both kinds, so there are no pairs to compare")
        ours, theirs = zip(*places, strict=True)
        return self._at(ours, theirs)

    def _where(self, wanted: Any) -> Contrast:
        return self._at(
            [place for place, group in enumerate(self.positive_groups) if wanted(group)],
            [place for place, group in enumerate(self.negative_groups) if wanted(group)],
        )

    def _at(self, ours: Sequence[int], theirs: Sequence[int]) -> Contrast:
        return Contrast(
            self.positive[list(ours)],
            self.negative[list(theirs)],
            [self.positive_groups[place] for place in ours],
            [self.negative_groups[place] for place in theirs],
        )


async def extract(
    model: SteerModel,
    positive: Sequence[Text],
    negative: Sequence[Text],
    *,
    name: str,
    method: str = "difference",
    layers: Layers = "all",
    site: str = "resid_post",
    tokens: Tokens | TokenSelection = "all",
    reduce: Reduction | None = "mean",
    groups: Sequence[Hashable] | None = None,
    negative_groups: Sequence[Hashable] | None = None,
    held_out: float = 0.25,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> DirectionSet:
    """Find the direction in which texts that show something differ from texts that do not.

    Args:
        model: an open model.
        positive, negative: str, token ids, or `Exchange(prompt, response)`, whose rows are the response's.
        name: what the direction means.
        method: "difference" of means, "pca" of paired differences, or a logistic "probe"; see `METHODS`.
        layers, site: where.
        tokens: which tokens' rows of a text that is no Exchange.
        reduce: how a text's rows become one, in the workers: one row a text and layer is moved. None moves all of
            them and takes their mean here.
        groups: what each positive text belongs to, such as its question; by default its place in the list. Groups are
            held out, and paired, whole.
        negative_groups: the same of the negative texts; `groups` by default.
        held_out: share of the groups that the direction is not made from, but tried on: `provenance.auc`.
        seed: of the split, and of methods that draw.
        progress: told how many texts have been read, as more are.

    Returns:
        A set of one direction: added once, it carries the mean of the negative texts to that of the positive ones,
        along itself.

    Raises:
        InvalidSpec: no texts, or too few to hold any out.
        UnknownName: a method that does not exist.
        The errors of `SteerModel.generate`.
    """
    _ = METHODS[method]
    ours = tuple(groups) if groups is not None else tuple(range(len(positive)))
    if negative_groups is not None:
        theirs = tuple(negative_groups)
    else:
        theirs = ours if groups is not None else tuple(range(len(negative)))
    rows = await mean_rows(
        model, [*positive, *negative], layers=layers, site=site, tokens=tokens, reduce=reduce, progress=progress
    )
    contrast = Contrast(rows.values[: len(positive)], rows.values[len(positive) :], ours, theirs)
    found = directions_of(name, contrast, rows.layers, method=method, site=site, held_out=held_out, seed=seed)
    exchanged = all(isinstance(text, Exchange) for text in (*positive, *negative))
    return labelled(
        found,
        model,
        prompts={name: digest_of(rows.prompts)},
        tokens="response" if exchanged else str(TokenSelection.parse(tokens)),
        reduce=reduce or "mean",
    )


async def mean_rows(
    model: SteerModel,
    texts: Sequence[Text],
    *,
    layers: Layers = "all",
    site: str = "resid_post",
    tokens: Tokens | TokenSelection = "all",
    reduce: Reduction | None = "mean",
    progress: Callable[[int], None] | None = None,
) -> Rows:
    """Have the model read texts, and bring one row a text and layer here.

    Args:
        model, layers, site, tokens, reduce, progress: as for `extract`.
        texts: what is read, at full batch.

    Raises:
        InvalidSpec: no texts.
        The errors of `SteerModel.generate`.
    """
    if not texts:
        raise InvalidSpec("no texts to read; give one at least")
    asked = [_asked(model.tokenizer, text, TokenSelection.parse(tokens)) for text in texts]
    running = asyncio.Semaphore(CALLS)
    finished = 0

    async def read(part: Sequence[tuple[list[int], TokenSelection]]) -> tuple[torch.Tensor, int]:
        nonlocal finished
        async with running:
            specs = [CaptureSpec(layers=layers, sites=site, tokens=wanted, reduce=reduce) for _, wanted in part]
            _, handles = await model.generate(
                [{"prompt_token_ids": ids} for ids, _ in part],
                {"max_tokens": 1, "temperature": 0.0},
                capture=specs,
                steering=None,
            )
            await model.fetch_captures_batch(handles)
            moved = sum(rows.nbytes for handle in handles for rows in handle.captures.values())
            finished += len(part)
            if progress is not None:
                progress(finished)
            return torch.stack([_row(handle.captures) for handle in handles]), moved

    async with asyncio.TaskGroup() as group:
        parts = [asked[first : first + CALL_TEXTS] for first in range(0, len(asked), CALL_TEXTS)]
        tasks = [group.create_task(read(part)) for part in parts]
    found = CaptureSpec(layers=layers, sites=site).points(model.num_layers)
    return Rows(
        torch.cat([task.result()[0] for task in tasks]),
        tuple(point.layer for point in found),
        tuple(_digest(ids) for ids, _ in asked),
        sum(task.result()[1] for task in tasks),
    )


def directions_of(
    name: str,
    contrast: Contrast,
    layers: Sequence[int],
    *,
    method: str = "difference",
    site: str = "resid_post",
    held_out: float = 0.25,
    seed: int = 0,
) -> DirectionSet:
    """A direction from rows, and how well it tells rows apart that it was not made from.

    Args:
        name: what the direction means.
        contrast: the rows.
        layers: what their second axis is.
        method, site, held_out, seed: as for `extract`.

    Raises:
        UnknownName: a method that does not exist.
        InvalidSpec: too few groups to hold any out, or no pairs for a method that needs them.
        InvalidVector: rows that are NaN or inf.
    """
    how = METHODS[method]
    seen, unseen = contrast.split(held_out, seed)
    used = seen.pairs() if how.paired else seen
    vectors = {
        layer: how.direction(used.positive[:, at].double(), used.negative[:, at].double(), seed)
        for at, layer in enumerate(layers)
    }
    found = LayerVectors(vectors, name=name, site=site)
    every = torch.cat([contrast.positive, contrast.negative]).double()
    norms = every.norm(dim=-1).mean(0).tolist()
    provenance = Provenance(
        method=method,
        seed=seed,
        rows={name: (len(used.positive), len(used.negative))},
        held_out={name: (len(unseen.positive), len(unseen.negative)) if unseen else (0, 0)},
        auc={name: separability(found, unseen, layers)} if unseen else {},
        row_norms=dict(zip(layers, norms, strict=True)),
    )
    return DirectionSet({name: found}, provenance)


def separability(vectors: LayerVectors, contrast: Contrast, layers: Sequence[int]) -> dict[int, float]:
    """Area under the ROC curve of the rows' projections on each layer's vector: 1 tells all apart, 0.5 is chance.

    Args:
        vectors: one for each of `layers` at least.
        contrast: rows that the vectors were not made from.
        layers: what the second axis of the rows is.
    """
    from sklearn.metrics import roc_auc_score

    kinds = [1] * len(contrast.positive) + [0] * len(contrast.negative)
    rows = torch.cat([contrast.positive, contrast.negative]).double()
    return {
        layer: float(roc_auc_score(kinds, (rows[:, at] @ vectors[layer].double()).numpy()))
        for at, layer in enumerate(layers)
    }


def labelled(found: DirectionSet, model: SteerModel, **known: Any) -> DirectionSet:
    """Directions that say which model they are of, and what else is known of their origin.

    Args:
        found: as `directions_of` gives them.
        model: whose rows they were made from.
        known: further fields of `Provenance`.
    """
    config = model.engine.model_config
    known |= {"revision": config.revision or "", "dtype": str(config.dtype).removeprefix("torch.")}
    vectors = {
        name: LayerVectors(one.vectors, name=name, model=model_name(model.model), site=one.site)
        for name, one in found.items()
    }
    provenance = {field: getattr(found.provenance, field) for field in Provenance.__dataclass_fields__}
    return DirectionSet(vectors, Provenance(**{**provenance, **known}))


def model_name(model: str) -> str:
    """What a model is called wherever it lies: the name on the hub, or that of its folder."""
    return Path(model).name if Path(model).is_dir() else model


def digest_of(prompts: Sequence[bytes]) -> str:
    """SHA-256 over the digests of texts, in hexadecimal."""
    return hashlib.sha256(b"".join(prompts)).hexdigest()


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).digest()


def _asked(tokenizer: Any, text: Text, selection: TokenSelection) -> tuple[list[int], TokenSelection]:
    """What the model reads of a text, and which of its rows are wanted."""
    if not isinstance(text, Exchange):
        return _ids(tokenizer, text, special=True), selection
    prompt = _prompt_ids(tokenizer, text.prompt)
    response = _ids(tokenizer, text.response, special=False)
    if not response:
        raise InvalidSpec(f"{text!r} has an empty response, which has no rows")
    return prompt + response, TokenSelection.parse(slice(len(prompt), None))


def _prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        return templated(tokenizer, prompt, {}, spans=False)[0]
    return _ids(tokenizer, prompt, special=True)


def _ids(tokenizer: Any, text: Any, *, special: bool) -> list[int]:
    if isinstance(text, str):
        return list(tokenizer.encode(text, add_special_tokens=special))
    if not len(text):
        return []
    _, (prompt,) = listed(list(text))
    return list(prompt["prompt_token_ids"])


def _row(captures: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """One row a layer: float32 [layers, hidden]."""
    return torch.stack([rows.float().mean(0) for rows in captures.values()])
