"""Read a corpus with an open model: into a data set on disk, or straight into a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.errors import InvalidSpec
from steercap.lab.datasets.choosing import Join
from steercap.lab.datasets.collecting.collection import SHARD_BYTES, Asked, Collected, Progress, run_collection
from steercap.lab.datasets.collecting.many import RayActors, collect_on_actors
from steercap.lab.datasets.collecting.samples import TokenSample
from steercap.lab.datasets.collecting.sources import Corpus, open_source
from steercap.lab.datasets.collecting.streaming import ActivationStream, Streaming
from steercap.lab.datasets.collecting.windows import Bos, Long
from steercap.lab.datasets.normalising import Normalise
from steercap.lab.datasets.statistics import PointStatistics
from steercap.requests.context import FROM_CONTEXT, FromContext, by_word_or_context
from steercap.steering.spec import SteeringSpec

if TYPE_CHECKING:
    from steercap.model import SteerModel
    from steercap.steering.edits.base import Edit
    from steercap.steering.logit_bias import LogitBias


async def collect(
    model: SteerModel,
    corpus: Corpus,
    folder: str | os.PathLike[str],
    *,
    layers: Layers | None = None,
    sites: str | Sequence[str] | None = None,
    codec: str | None = None,
    k: int | None = None,
    capture: CaptureSpec | None = None,
    tokens: Tokens | TokenSelection | TokenSample | None = None,
    context: int | None = None,
    long: Long | None = None,
    bos: Bos = "document",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    steering: SteeringSpec | Edit | LogitBias | FromContext | None = FROM_CONTEXT,
    shard_bytes: int = SHARD_BYTES,
    documents_per_shard: int | None = None,
    statistics_every: int | None = None,
    concurrency: int | None = None,
    verify: bool = False,
    progress: Callable[[Progress], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    ray: RayActors | None = None,
) -> Collected:
    """Read a corpus into a data set of activations on disk, which `steercap.lab.datasets` and other tools open.

    A call that ends before the corpus does, however it ends, loses the shards that were not written; the same call
    goes on. Every document is in the data set once. With `concurrency=1` the data set is the same, bit for bit,
    whenever and however often it was interrupted; otherwise rows may differ in their last bits, as they do from
    batch to batch, and through them which rows `ByProbe` keeps and which texts `params` generates.

    Args:
        model: an open model; with `ray` it need not be started.
        corpus: a file, a folder or a pattern, or any iterable or async iterable of documents: str, token ids,
            messages, or mappings that hold one of these; or an opened `Source`: see
            `steercap.lab.datasets.collecting.open_source`.
        folder: where it goes: a path, or the URL of an fsspec file system.
        layers, sites, codec, k: what is kept: shorthand for `capture=CaptureSpec(layers=..., ...)`.
        capture: the same, with all that a `CaptureSpec` may say but `reduce`, `project`, `sae` and `gather=False`.
        tokens: which tokens' rows are kept: a selection as for `CaptureSpec`, or `OneIn`, `ByProbe`, `ByPredicate`;
            by default those of `capture`. Positions count in each window by itself.
        context: most tokens of a window, by default as many as the engine takes.
        long: what becomes of longer documents: they are "split" into windows, which are read each by itself, "cut"
            off, or "refuse"d. By default "split"; "refuse" where something is generated.
        bos: where the token goes that begins a text: as the tokenizer puts it before a "document", before each
            "window" too, or "none".
        chat_template_kwargs: further arguments of the chat template. A conversation that ends with the assistant's
            message is read as it is; any other with what invites the reply.
        params: sampling parameters, if the model is to go on with each document; its rows are collected too.
        seed: of all sampling: each document has a seed of its own, made of this one and its number.
        steering: what is changed, as for `generate`.
        shard_bytes: of rows that a shard should have; three to nine shards are in memory, by the number of cores.
        documents_per_shard: by default as many of the first few documents as come to `shard_bytes`.
        statistics_every: of so many rows one is looked at for statistics; 0 for none. By default 8 for each point:
            many points are looked at in no more time than one.
        concurrency: windows under way at once; by default as many as the engine has use for, within memory.
        verify: whether the shards that are there are compared with their hashes, rather than their sizes alone;
            what is damaged is collected again.
        progress: called with a `Progress` now and then.
        storage_options: of the URL's file system.
        ray: over which actors of Ray's the corpus is spread. Each starts an engine of this model's arguments. A shard
            has the same documents, whoever makes it, and with `concurrency=1` the same bits; otherwise it may differ
            as it does from call to call. The folder is one that all machines reach. `concurrency` is of each engine.

    Returns:
        What the data set holds.

    Raises:
        RunDiffers: the folder holds another data set, or one of another corpus, or its last shard is short and the
            corpus has grown.
        CollectionStopped: it cannot be written to, such as on a full disk, or actors were lost too often.
        InvalidFile: a file of the corpus cannot be read, or holds something that is no document.
        InvalidRequest: something is asked for that does not fit, or another process writes to the folder.
        MissingExtra: the extra `datasets`, or with `ray` the extra `ray`, is not installed.
        The errors of `generate`.
    """
    kept, chosen = _kept(capture, tokens, layers=layers, sites=sites, codec=codec, k=k)
    asked = Asked(
        capture=kept,
        tokens=chosen,
        context=context,
        long=long,
        bos=bos,
        template=chat_template_kwargs or {},
        params=params,
        seed=seed,
        steering=by_word_or_context(model, steering),
        shard_bytes=shard_bytes,
        documents_per_shard=documents_per_shard,
        statistics_every=statistics_every,
        concurrency=concurrency,
        verify=verify,
        progress=progress,
        storage_options=storage_options or {},
    )
    if ray is not None:
        return await collect_on_actors(model.factory, corpus, os.fspath(folder), asked, ray)
    engine = model.serving.here()
    return await model.serving.run(lambda: run_collection(model, engine, corpus, os.fspath(folder), asked))


def activations(
    model: SteerModel,
    corpus: Corpus,
    *,
    layers: Layers | None = None,
    sites: str | Sequence[str] | None = None,
    codec: str | None = None,
    k: int | None = None,
    capture: CaptureSpec | None = None,
    tokens: Tokens | TokenSelection | TokenSample | None = None,
    context: int | None = None,
    long: Long | None = None,
    bos: Bos = "document",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    steering: SteeringSpec | Edit | LogitBias | FromContext | None = FROM_CONTEXT,
    concurrency: int | None = None,
    batch_size: int = 4096,
    buffer: int = 1 << 16,
    seed: int = 0,
    join: Join = "dict",
    normalise: Normalise = "none",
    statistics: Mapping[str, PointStatistics] | None = None,
    dtype: torch.dtype | None = torch.float32,
    labels: bool = False,
    drop_last: bool = False,
) -> ActivationStream:
    """Rows of a corpus in shuffled batches, straight from the engine into a training, without a disk.

    What it gives is an iterator, and a context manager that closes it: `async with activations(model, ...) as rows`.
    The engine works ahead while the training computes, as far as `buffer` allows. Each row comes once; a corpus is
    read once, and to read it again is another stream. Closing the stream ends what runs.

    Args:
        model: an open model.
        corpus: as for `collect`.
        layers, sites, codec, k, capture, tokens: which rows, and how they come from the engine; as for `collect`.
        context, long, bos, chat_template_kwargs, params, steering, concurrency: as for `collect`.
        batch_size: rows of a batch.
        buffer: rows that a batch is drawn from; at least `batch_size`. A quarter more may wait before it.
        seed: of the draws, and of sampling with `params`.
        join: of several points: "dict", by name; "concatenate", [n, sum of widths]; "mix", each row of each point
            by itself.
        normalise: "none", "mean", "standard" or "norm", as for `ActivationDataset`.
        statistics: of each point by its name, such as those of a data set; by default of the rows in the first
            full buffer. `normalisations` of the stream says what was found.
        dtype: of the rows; None for that of the model, and of decoded codecs float32.
        labels: whether batches come as `steercap.lab.datasets.Labelled`.
        drop_last: leave out the last batch if it is short.

    Returns:
        An asynchronous iterator of rows [batch, *shape of the point], or dicts of them by the points' names.

    Raises:
        InvalidRequest: something is asked for that does not fit.
        InvalidFile: no such corpus, or a file of it that cannot be read.
        MissingExtra: the corpus is Parquet, and the extra `datasets` is not installed.
        ModelClosed: the model was never started, or is closed.
        WrongEventLoop: it was started in another event loop.
    """
    kept, chosen = _kept(capture, tokens, layers=layers, sites=sites, codec=codec, k=k)
    asked = Asked(
        capture=kept,
        tokens=chosen,
        context=context,
        long=long,
        bos=bos,
        template=chat_template_kwargs or {},
        params=params,
        seed=seed,
        steering=by_word_or_context(model, steering),
        concurrency=concurrency,
    )
    how = Streaming(
        batch_size=batch_size,
        buffer=buffer,
        seed=seed,
        join=join,
        normalise=normalise,
        statistics=statistics,
        dtype=dtype,
        labels=labels,
        drop_last=drop_last,
    )
    return ActivationStream(model, asked.reading(model, model.serving.here()), open_source(corpus), how)


def _kept(
    capture: CaptureSpec | None, tokens: Tokens | TokenSelection | TokenSample | None, **shorthand: Any
) -> tuple[CaptureSpec, Tokens | TokenSelection | TokenSample]:
    """The spec of what is kept, given in full or by the shorthand for it, and the tokens.

    Raises:
        InvalidSpec: the spec or the tokens are given in both ways.
    """
    given = {name: value for name, value in shorthand.items() if value is not None}
    if capture is not None and given:
        raise InvalidSpec(f"capture= beside {', '.join(given)}; give one of them")
    kept = CaptureSpec(**given) if capture is None else capture
    if tokens is None:
        return kept, kept.selection
    if kept.selection != TokenSelection.parse("all"):
        raise InvalidSpec(f"tokens= beside those of capture=, {kept.selection}; give one of them")
    return kept, tokens
