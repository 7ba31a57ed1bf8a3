"""Calls that read a corpus with an open model: into a data set on disk, or directly into a training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from steercap.core.protocols import ProgressCallback
from steercap.core.spec import CaptureSpec, Layers
from steercap.core.tokens import Tokens, TokenSelection
from steercap.errors import InvalidSpec
from steercap.lab.datasets.collecting.collection import Collected, run_collection
from steercap.lab.datasets.collecting.documents import Bos, Long
from steercap.lab.datasets.collecting.many import RayActors, collect_on_actors
from steercap.lab.datasets.collecting.reading import SHARD_BYTES, CollectArguments
from steercap.lab.datasets.collecting.samples import TokenSample
from steercap.lab.datasets.collecting.sources import Corpus, open_source
from steercap.lab.datasets.collecting.streaming import ActivationStream, Streaming
from steercap.lab.datasets.reading import Join
from steercap.lab.datasets.rows import Normalise
from steercap.lab.datasets.statistics import PointStatistics
from steercap.requests.context import FROM_CONTEXT, FromContext, effective_steering
from steercap.steering.spec import Steering

if TYPE_CHECKING:
    from steercap.client import RemoteModel
    from steercap.model import SteerModel


async def collect(
    model: SteerModel | RemoteModel,
    corpus: Corpus,
    folder: str | os.PathLike[str],
    *,
    layers: Layers | None = None,
    sites: str | Sequence[str] | None = None,
    codec: str | None = None,
    codec_k: int | None = None,
    codec_seed: int | None = None,
    attention: int | None = None,
    capture: CaptureSpec | None = None,
    tokens: Tokens | TokenSelection | TokenSample | None = None,
    context: int | None = None,
    long: Long | None = None,
    bos: Bos = "document",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    seed: int = 0,
    steering: Steering | FromContext | None = FROM_CONTEXT,
    shard_bytes: int = SHARD_BYTES,
    documents_per_shard: int | None = None,
    statistics_every: int | None = None,
    concurrency: int | None = None,
    verify: bool = False,
    progress: ProgressCallback | None = None,
    storage_options: Mapping[str, Any] | None = None,
    ray: RayActors | None = None,
) -> Collected:
    """Read a corpus into a data set of activations on disk, readable by `steercap.lab.datasets` and other tools.

    An interrupted call loses only the shards that were not written yet; repeating the same call resumes it. Every
    document is in the data set once. With `concurrency=1` it is the same bit for bit, however often it was interrupted;
    otherwise rows may differ in their last bits, as from batch to batch, and so may what `ByProbe` keeps and generated
    texts.

    Args:
        model: an open model; with `ray` it need not be started.
        corpus: a file, a folder or a pattern, or any iterable or async iterable of documents: str, token ids, messages,
            or mappings that hold one of these; or a `DocumentSource` of `steercap.lab.datasets.collecting.open_source`.
        folder: folder for the data set: a path, or the URL of an fsspec file system.
        layers, sites, codec, codec_k, codec_seed, attention: shorthand for `capture=CaptureSpec(layers=..., ...)`.
        capture: spec of the rows to keep, without `reduce`, `project`, `sae` and `gather=False`.
        tokens: tokens whose rows are kept: as for `CaptureSpec`, or `OneIn`, `ByProbe`, `ByPredicate`; by default those
            of `capture`. Positions count from the start of each window.
        context: maximum tokens of a window, by default as many as the engine takes.
        long: what is done with longer documents: "split" into windows, each read by itself, "cut" off, or "refuse"d. By
            default "split"; "refuse" where something is generated.
        bos: place of the beginning-of-text token: before each "document", if the tokenizer puts it there; before each
            "window"; or "none".
        chat_template_kwargs: further arguments of the chat template. A conversation that ends with the assistant's
            message is read as it is; any other with the generation prompt.
        sampling_params: parameters with which the model continues each document; generated tokens' rows are kept too.
        seed: seed of all sampling; each document's own seed is derived from it and the document's number.
        steering: as for `generate`, the same for all documents.
        shard_bytes: target bytes of rows in a shard; three to nine shards are in memory, the more cores the more.
        documents_per_shard: documents in a shard; by default as many as have `shard_bytes`, judged by the first few.
        statistics_every: statistics are of one row in so many; 0 for none, by default 8 for each point. Targets of
            attention have none.
        concurrency: maximum windows in flight; by default as many as the engine can use, within memory.
        verify: check existing shards by their hashes, not by their sizes alone; damaged ones are collected again.
        progress: function called with a `Progress` whenever the work advances.
        storage_options: options of the URL's file system.
        ray: Ray actors among which the corpus is distributed. Each starts an engine with this model's arguments, and
            `concurrency` is per engine. A shard has the same documents, whichever actor makes it. All machines must
            reach the folder.

    Returns:
        Summary of the complete data set.

    Raises:
        RunDiffers: the folder is of another data set or corpus, or the corpus has grown beyond its last, short shard.
        CollectionStopped: the folder cannot be written to, such as on a full disk, or actors were lost too often.
        InvalidFile: a file of the corpus cannot be read, or holds an item that is not a document.
        InvalidRequest: an argument does not fit, or another process writes to the folder.
        MissingExtra: the extra `datasets`, or with `ray` the extra `ray`, is not installed.
        The errors of `generate`.
    """
    coding = {"codec": codec, "codec_k": codec_k, "codec_seed": codec_seed}
    kept, chosen = _kept(capture, tokens, layers=layers, sites=sites, attention=attention, **coding)
    if seed and sampling_params is None:
        raise InvalidSpec(f"seed={seed} is for sampling, with sampling_params=; give codec_seed= for a codec's matrix")
    asked = CollectArguments(
        capture=kept,
        tokens=chosen,
        context=context,
        long=long,
        bos=bos,
        template=chat_template_kwargs or {},
        sampling_params=sampling_params,
        seed=seed,
        steering=effective_steering(model, steering),
        shard_bytes=shard_bytes,
        documents_per_shard=documents_per_shard,
        statistics_every=statistics_every,
        concurrency=concurrency,
        verify=verify,
        progress=progress,
        storage_options=storage_options or {},
    )
    if ray is not None:
        return await collect_on_actors(model.factory, corpus, os.fspath(folder), asked, ray)  # type: ignore[union-attr]
    engine = model.serving.here()
    return await model.serving.run(lambda: run_collection(model, engine, corpus, os.fspath(folder), asked))


def activations(
    model: SteerModel | RemoteModel,
    corpus: Corpus,
    *,
    layers: Layers | None = None,
    sites: str | Sequence[str] | None = None,
    codec: str | None = None,
    codec_k: int | None = None,
    codec_seed: int | None = None,
    capture: CaptureSpec | None = None,
    tokens: Tokens | TokenSelection | TokenSample | None = None,
    context: int | None = None,
    long: Long | None = None,
    bos: Bos = "document",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    steering: Steering | FromContext | None = FROM_CONTEXT,
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
    """Return a stream of shuffled batches of a corpus's rows, from the engine into a training loop, without a disk.

    The stream is an async iterator, and a context manager that closes it: `async with activations(model, ...) as rows`.
    The engine works ahead while the training computes, as far as `buffer` allows. Each row comes once; to read the
    corpus again, open another stream. Closing the stream ends its requests.

    Args:
        model: an open model.
        corpus: corpus as for `collect`.
        layers, sites, codec, codec_k, codec_seed, capture, tokens: rows to keep and their encoding, as for `collect`.
        context, long, bos, chat_template_kwargs, sampling_params, steering, concurrency: settings as for `collect`.
        batch_size: rows in a batch.
        buffer: number of rows in memory from which a batch is drawn, at least `batch_size`. A quarter more may queue.
        seed: seed of the draws, and of sampling with `sampling_params`.
        join: form of rows of several points: "dict", by name; "concatenate", [n, sum of widths]; "mix", each row of
            each point by itself.
        normalise: normalisation: "none", "mean", "standard" or "norm", as for `ActivationDataset`.
        statistics: statistics of each point by its name, such as those of a data set; by default of the rows in the
            first full buffer. The stream's `normalisations` has the normalisations computed from them.
        dtype: dtype of the rows; None for the model's, or float32 for rows decoded from a codec.
        labels: return batches as `steercap.lab.datasets.Labelled`.
        drop_last: leave out the last batch if it is short.

    Returns:
        An asynchronous iterator of rows [batch, *shape of the point], or dicts of them by the points' names.

    Raises:
        InvalidRequest: an argument does not fit.
        InvalidFile: the corpus does not exist, or a file of it cannot be read.
        MissingExtra: the corpus is Parquet, and the extra `datasets` is not installed.
        ModelClosed: the model was never started, or is closed.
        WrongEventLoop: the model was started in another event loop.
    """
    coding = {"codec": codec, "codec_k": codec_k, "codec_seed": codec_seed}
    kept, chosen = _kept(capture, tokens, layers=layers, sites=sites, **coding)
    if kept.attention is not None:
        raise InvalidSpec(f"attention={kept.attention}: batches hold rows; use collect() to keep targets of attention")
    asked = CollectArguments(
        capture=kept,
        tokens=chosen,
        context=context,
        long=long,
        bos=bos,
        template=chat_template_kwargs or {},
        sampling_params=sampling_params,
        seed=seed,
        steering=effective_steering(model, steering),
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
    """Return the capture spec and the tokens to keep, from `capture` and `tokens`, or from shorthand arguments.

    Raises:
        InvalidSpec: the spec or the tokens are given in both ways.
    """
    given = {name: value for name, value in shorthand.items() if value is not None}
    if capture is not None and given:
        raise InvalidSpec(f"capture= cannot be combined with {', '.join(given)}; give one of them")
    kept = CaptureSpec(**given) if capture is None else capture
    if tokens is None:
        return kept, kept.selection
    if kept.selection != TokenSelection.parse("all"):
        raise InvalidSpec(f"tokens= cannot be combined with the tokens of capture=, {kept.selection}; give one of them")
    return kept, tokens
