"""Extraction of directions from texts, each of which workers reduce to a row per layer; and calibration of codecs."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from jaxtyping import Float

from steercap.concurrency.loops import each_of
from steercap.core.display import brief
from steercap.core.prompts import checked_special, repeating, warn_of_doubled
from steercap.core.protocols import Count, ProgressCallback, ReadingModel, SketchingModel
from steercap.core.spec import CaptureSpec, Layers, Reduction
from steercap.core.tokens import BUT_THE_FIRST, Tokens, TokenSelection
from steercap.core.values import shown
from steercap.errors import InvalidRequest, InvalidSpec
from steercap.files.fingerprint import model_name
from steercap.lab.directions.contrast import Contrast, check_groups, directions_of
from steercap.steering.calibration import Calibration
from steercap.steering.directions import DirectionSet, Provenance
from steercap.steering.layers import LayerVectors

#: Texts per call, and concurrent calls: enough to fill vLLM's batch, few enough that their rows need little memory.
CALL_TEXTS: Final = 64
CALLS: Final = 4


class Exchange(NamedTuple):
    """Prompt and its answer, as one text; `extract` uses only the answer's rows.

    Args:
        prompt: a str, token ids, or a conversation of {"role", "content"} dicts, put through the chat template.
        response: answer: a str, or the token ids that were generated.
    """

    prompt: Any
    response: str | Sequence[int]


#: Text for the model to read: a str, token ids, or an exchange.
Text: TypeAlias = "str | Sequence[int] | Exchange"


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of texts, reduced to one per text and layer.

    Args:
        values: rows, float32 [texts, layers, hidden].
        layers: layer indices along the second axis.
        prompts: SHA-256 of each text's token ids.
        bytes_moved: bytes transferred from the workers.
    """

    values: Float[torch.Tensor, "texts layers hidden"]
    layers: tuple[int, ...]
    prompts: tuple[bytes, ...]
    bytes_moved: int

    __repr__ = brief


async def extract(
    model: ReadingModel,
    positive: Sequence[Text],
    negative: Sequence[Text],
    *,
    name: str,
    method: str = "difference",
    layers: Layers = "all",
    site: str = "resid_post",
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    reduce: Reduction | None = "mean",
    groups: Sequence[Hashable] | None = None,
    negative_groups: Sequence[Hashable] | None = None,
    held_out: float = 0.25,
    seed: int = 0,
    add_special_tokens: bool | None = None,
    progress: ProgressCallback | None = None,
) -> DirectionSet:
    """Compute the direction in which texts that show a property differ from texts that do not.

    Args:
        model: an open model.
        positive, negative: str, token ids, or `Exchange(prompt, response)`, whose rows are the response's.
        name: name of the direction.
        method: "difference" of means, "pca" of paired differences, or a logistic "probe"; see `METHODS`.
        layers, site: layers and site of the rows that are compared.
        tokens: tokens of a text other than an Exchange whose rows are used. By default all but the first, which in most
            models is an attention sink: its row is a hundred times as long as the others and would dominate a mean.
        reduce: reduction of a text's rows to one, in the workers, so that one row per text and layer is sent. None
            sends all rows and averages them here.
        groups: group of each positive text, such as its question; by default its index. The texts of a group are held
            out together, and paired.
        negative_groups: the same for the negative texts; `groups` by default.
        held_out: fraction of the groups to hold out for testing the direction: `provenance.auc`.
        seed: seed of the held-out split, and of methods that draw at random.
        add_special_tokens: argument as for `SteerModel.generate`; False for rendered chats, which have theirs.
        progress: function called with a `Progress` whenever the work advances.

    Returns:
        A set of one direction. Added with scale 1, it moves the mean of the negative texts' rows to the positive ones',
        as far as their difference lies along it.

    Raises:
        InvalidSpec: there are no texts, too few to hold any out, or another number of groups.
        UnknownName: the method does not exist.
        MissingExtra: the method's libraries are not installed.
        The errors of `SteerModel.generate`.
    """
    check_texts(positive, negative)
    ours, theirs = groups_of(positive, negative, groups, negative_groups)
    check_groups(ours, theirs, method=method, held_out=held_out, seed=seed)
    rows = await mean_rows(
        model,
        [*positive, *negative],
        layers=layers,
        site=site,
        tokens=tokens,
        reduce=reduce,
        add_special_tokens=add_special_tokens,
        progress=progress,
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
    model: ReadingModel,
    texts: Sequence[Text],
    *,
    layers: Layers = "all",
    site: str = "resid_post",
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    reduce: Reduction | None = "mean",
    add_special_tokens: bool | None = None,
    progress: ProgressCallback | None = None,
) -> Rows:
    """Read texts with the model, and return one row per text and layer.

    Args:
        model, layers, site, tokens, reduce, add_special_tokens, progress: arguments as for `extract`.
        texts: texts to read.

    Returns:
        Rows, float32 [texts, layers, hidden], in the order of the texts; of `layers`, those that have the site.

    Raises:
        InvalidSpec: there are no texts.
        The errors of `SteerModel.generate`.
    """
    check_texts(texts)
    if not texts:
        raise InvalidSpec("no texts to read; give at least one")
    selection = TokenSelection.parse(tokens)
    asked = await prompts_and_rows(model, texts, selection, checked_special(add_special_tokens))
    count = Count("texts", len(asked), 0, progress)
    captured: set[int] = set()  # of all layers, those that have the site

    async def read(part: Sequence[tuple[list[int], TokenSelection]]) -> tuple[torch.Tensor, int]:
        specs = [
            CaptureSpec(layers=layers, sites=site, tokens=wanted, reduce=reduce, codec="raw") for _, wanted in part
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in part]
        handles = await model.read(prompts, capture=specs, steering=None)
        await model.fetch_captures_batch(handles)
        moved = sum(rows.nbytes for handle in handles for rows in handle.captures.values())
        count.add(len(part))
        captured.update(point.layer for point in handles[0].points)
        return torch.stack([_row(handle.captures) for handle in handles]), moved

    parts = [asked[first : first + CALL_TEXTS] for first in range(0, len(asked), CALL_TEXTS)]
    found = await each_of(parts, read, CALLS)
    return Rows(
        torch.cat([rows for rows, _ in found]),
        tuple(sorted(captured)),
        tuple(sha_of(ids) for ids, _ in asked),
        sum(moved for _, moved in found),
    )


def check_texts(*several: Sequence[Text]) -> None:
    """Check that each argument is a sequence of texts; a single text would be read character by character.

    Raises:
        InvalidSpec: an argument is not a sequence of texts.
    """
    for texts in several:
        if isinstance(texts, (str, bytes, Exchange)) or not isinstance(texts, Sequence):
            raise InvalidSpec(f"texts={shown(texts)}; give several in a list: str, token ids, or Exchange")


def groups_of(
    positive: Sequence[Text],
    negative: Sequence[Text],
    groups: Sequence[Hashable] | None,
    negative_groups: Sequence[Hashable] | None,
) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
    """Return the group of each text of both kinds; arguments as for `extract`.

    Raises:
        InvalidSpec: there are not as many groups as texts.
    """
    ours = tuple(range(len(positive)) if groups is None else groups)
    theirs = tuple(negative_groups if negative_groups is not None else range(len(negative)) if groups is None else ours)
    for what, texts, kinds in (("groups", positive, ours), ("negative_groups", negative, theirs)):
        if len(texts) != len(kinds):
            raise InvalidSpec(f"{what} of {len(kinds)} texts, and there are {len(texts)}; give one for each text")
    return ours, theirs


def labelled(found: DirectionSet, model: ReadingModel, **known: Any) -> DirectionSet:
    """Return directions with model name and provenance filled in: the model's revision and dtype, and `known`.

    Args:
        found: directions returned by `directions_of`.
        model: open model that the rows are of.
        known: further fields of `Provenance`.
    """
    known |= model.origin
    vectors = {
        name: LayerVectors(one.vectors, name=name, model=model_name(model.model), site=one.site)
        for name, one in found.items()
    }
    provenance = {field: getattr(found.provenance, field) for field in Provenance.__dataclass_fields__}
    return DirectionSet(vectors, Provenance(**{**provenance, **known}))


def digest_of(prompts: Sequence[bytes]) -> str:
    """Return the SHA-256 of several texts' digests, in order, in hexadecimal."""
    return hashlib.sha256(b"".join(prompts)).hexdigest()


def sha_of(ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of a text's token ids, taken as the bytes of an int64 array."""
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).digest()


async def prompts_and_rows(
    model: ReadingModel, texts: Sequence[Text], selection: TokenSelection, special: bool | None = None
) -> list[tuple[list[int], TokenSelection]]:
    """Return for each text, in order, the token ids to read and the selection of tokens whose rows are used.

    Args:
        model: open model, whose tokenizer is used.
        texts: texts to read.
        selection: selection for a text that is not an Exchange; of an Exchange, the response is selected.
        special: True to add the tokenizer's special tokens to a str; None too, except where vLLM adds none, with a
            warning for texts that have them.

    Raises:
        InvalidSpec: an exchange has an empty response, or an entry is not a text.
    """

    async def one_of(text: Text) -> tuple[list[int], list[int]]:
        parts = [
            await model.tokenize(part, add_special_tokens=special if first else False)
            for part, first in _parts_of(text)
        ]
        return parts[0], _joined(text, parts)

    found = await each_of(texts, one_of, CALL_TEXTS)
    if special is None and (suspects := repeating(_prompts(texts, [first for first, _ in found]))):
        warn_of_doubled(suspects, await model.tokenize(""))
    return [
        (ids, TokenSelection.parse(slice(len(first), None)) if isinstance(text, Exchange) else selection)
        for text, (first, ids) in zip(texts, found, strict=True)
    ]


async def ids_of(model: ReadingModel, texts: Sequence[Text], special: bool | None = None) -> list[list[int]]:
    """Return each text's token ids, of an exchange those of prompt and response; arguments as of `prompts_and_rows`."""
    return [ids for ids, _ in await prompts_and_rows(model, texts, TokenSelection.parse("all"), special)]


def _parts_of(text: Text) -> list[tuple[Any, bool]]:
    """Return the parts of a text that are tokenised separately, each with True if it is the first."""
    return [(text.prompt, True), (text.response, False)] if isinstance(text, Exchange) else [(text, True)]


def _prompts(texts: Sequence[Text], firsts: Sequence[list[int]]) -> Iterator[tuple[Any, list[int]]]:
    """Yield each text, or the prompt of an exchange, with its token ids, as arguments of `repeating`."""
    for text, ids in zip(texts, firsts, strict=True):
        yield text.prompt if isinstance(text, Exchange) else text, ids


def _joined(text: Text, parts: Sequence[list[int]]) -> list[int]:
    if isinstance(text, Exchange) and not parts[1]:
        raise InvalidSpec(f"{text!r} has an empty response, which has no rows")
    return [token for part in parts for token in part]


def _row(captures: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return a text's rows averaged to one per layer, heads concatenated: float32 [layers, width]."""
    return torch.stack([rows.float().mean(0).flatten() for rows in captures.values()])


async def calibrate(
    model: SketchingModel,
    texts: Sequence[Text],
    *,
    layers: Layers = "all",
    sites: str | Sequence[str] = ("resid_post",),
    tokens: Tokens | TokenSelection = BUT_THE_FIRST,
    add_special_tokens: bool | None = None,
    progress: ProgressCallback | None = None,
) -> Calibration:
    """Measure mean and standard deviation of each element of a model's rows over texts; no row leaves the workers.

    The texts are read unsteered, even inside `model.steered`. Inside `model.sketch` they enter that sketch too, as all
    calls do.

    Args:
        model: an open model.
        texts: str, token ids, or `Exchange(prompt, response)`, which is read as a whole: some dozens that resemble the
            texts to be captured.
        layers, sites: layers and sites of the rows.
        tokens: tokens whose rows are measured. By default all but the first, in most models an attention sink.
        add_special_tokens: argument as for `SteerModel.generate`; False for rendered chats, which have theirs.
        progress: function called with a `Progress` whenever the work advances.

    Raises:
        InvalidSpec: there are no texts.
        InvalidRequest: the texts have fewer than two rows.
        CaptureNotFinite: a row holds NaN or infinity.
        The errors of `SteerModel.sketch` and `SteerModel.read`.
    """
    check_texts(texts)
    if not texts:
        raise InvalidSpec("no texts to read; give at least one")
    asked = await ids_of(model, texts, checked_special(add_special_tokens))
    count = Count("texts", len(asked), 0, progress)

    async def read(part: Sequence[list[int]]) -> None:
        await model.read([{"prompt_token_ids": ids} for ids in part], capture=None, steering=None)
        count.add(len(part))

    async with model.sketch("variances", layers=layers, sites=sites, tokens=tokens) as running:
        await each_of([asked[first : first + CALL_TEXTS] for first in range(0, len(asked), CALL_TEXTS)], read, CALLS)
        if running.rows < 2:
            raise InvalidRequest(f"these texts have {running.rows} rows at the tokens {tokens}; give two at least")
        found = await running.fetch()
    return Calibration(
        {point: found.mean(*point).float() for point in found.points},
        {point: found.variance(*point).sqrt().float() for point in found.points},
        model=model_name(model.model),
        revision=model.origin["revision"],
        dtype=found.dtype,
        tokens=str(found.tokens),
        prompts=digest_of([sha_of(ids) for ids in asked]),
        texts=len(texts),
        rows=found.rows,
    )
