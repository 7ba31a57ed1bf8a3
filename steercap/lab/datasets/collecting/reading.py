"""Settings of a collection, compiled for one open model: the request for each window, and the rows to keep of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

from steercap.core.protocols import ProgressCallback
from steercap.core.schema import ATTENTION, Coding
from steercap.core.spec import CaptureSpec, Point
from steercap.core.tokens import Tokens, TokenSelection
from steercap.core.values import FAR, count_of
from steercap.errors import InvalidSetting, InvalidSpec
from steercap.kernels.codecs import record_of
from steercap.kernels.codecs.coded import Whole
from steercap.lab.datasets.collecting.documents import Bos, Cutting, Long, Window, check_cutting
from steercap.lab.datasets.collecting.samples import Selected, TokenSample, sample_of, seed_of
from steercap.lab.datasets.tables import Index

if TYPE_CHECKING:
    from steercap.client import RemoteModel
    from steercap.client.compiling import RemoteEngine
    from steercap.engine.engine import Engine
    from steercap.model import SteerModel
    from steercap.steering.spec import Steering

#: vLLM batches in flight at once: one runs, one is prepared, and rows of earlier ones are being transferred,
#: which may wait for a disk.
BATCHES: Final = 16
#: Maximum bytes of rows in flight, unless a single window exceeds it.
UNDER_WAY_BYTES: Final = 2 << 30


@dataclass(frozen=True)
class Reading:
    """Compiled settings of the request for each window.

    Args:
        engine: engine of the model.
        spec: points and encoding of the rows; tokens are selected by `sample`.
        sample: sample of tokens.
        cutting: settings for cutting documents into windows.
        sampling_params: sampling parameters, or None for no generation.
        seed: seed of all sampling; each document's own seed is derived from it and the document's number.
        steering: edits applied during the run.
        concurrency: maximum windows in flight; None for as many as the engine can use, within memory.

    Raises:
        InvalidSpec: the spec keeps something other than rows or targets of attention, a probe's point is not captured,
            or targets are asked for of a sample of tokens.
        InvalidSetting: the context exceeds the engine's, or sampling gives other than one text a document.
        PointNotArmed, LayerOutOfRange, UnknownName: see `SteerModel.read`.
    """

    engine: Engine | RemoteEngine
    spec: CaptureSpec
    sample: TokenSample
    cutting: Cutting
    sampling_params: Mapping[str, Any] | None = None
    seed: int = 0
    steering: Steering | None = None
    concurrency: int | None = None
    points: tuple[Point, ...] = field(init=False)
    coding: Coding = field(init=False)

    def __post_init__(self) -> None:
        if not (self.spec.keeps_rows or self.spec.attention) or not self.spec.gather:
            raise InvalidSpec("collect keeps rows; leave reduce=, project=, sae= and gather=False out")
        if isinstance(self.sample, Selected):  # the same for every window, so it is lowered once
            object.__setattr__(self, "spec", replace(self.spec, tokens=self.sample.selection))
        elif self.spec.attention:
            raise InvalidSpec(
                f"attention={self.spec.attention} reads the keys of all tokens before, and "
                f"{type(self.sample).__name__} leaves some out; collect all tokens, and choose rows as they are read"
            )
        object.__setattr__(self, "points", self.engine.compiler.captured(self.spec)[0])
        object.__setattr__(self, "coding", self.engine.compiler.coding(self.spec))
        if self.spec.attention:
            object.__setattr__(self, "points", tuple(point for point in self.points if point.site == "q"))
            object.__setattr__(self, "coding", Coding(ATTENTION, self.spec.attention))
        check_sample(self.sample, self.points)
        if self.concurrency is not None:
            count_of(self.concurrency, "concurrency", wrong=InvalidSetting)
        if self.sampling_params is not None:
            if self.engine.vllm.pools:
                raise InvalidSetting("sampling_params= is for generation, and this is a pooling model; leave it out")
            self.engine.vllm.sampling(self.sampling_params)
        check_room(self.cutting.context, most_context(self.engine, self.sampling_params))

    def asked(self, window: Window) -> TokenSelection | None:
        """Return the selection of the window's tokens whose rows are requested, None for none; for any thread."""
        return self.sample.asked(window, self.limit(len(window.token_ids)))

    def limit(self, prompt_len: int) -> int:
        """Return the number of positions that can have a row: of `prompt_len` prompt tokens, and of generated ones."""
        if self.sampling_params is None:
            return prompt_len
        return self.engine.vllm.limit(prompt_len, self.engine.vllm.sampling(self.sampling_params))

    async def run(self, model: SteerModel | RemoteModel, window: Window, tokens: TokenSelection) -> Any:
        """Run the request of a window, capturing `tokens`; return its capture handle, with rows not yet fetched.

        Raises:
            The errors of `SteerModel.read` and `generate`.
        """
        spec = self.spec if isinstance(self.sample, Selected) else replace(self.spec, tokens=tokens)
        prompt: dict[str, Any] = {"prompt_token_ids": window.token_ids.tolist()}
        if self.concurrency == 1:  # what the prefix cache holds depends on what ran before, and last bits depend on it
            prompt["cache_salt"] = uuid4().hex
        if self.sampling_params is None:
            return await model.read(prompt, capture=spec, steering=self.steering)
        params = {**self.sampling_params, "seed": seed_of(self.seed, window.document), **self.engine.vllm.without_text}
        _, handle = await model.generate(prompt, params, capture=spec, steering=self.steering)
        return handle

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's rows at all points."""
        return sum(record_of([self.engine.schemas[point] for point in self.points], self.coding).sizes)

    @property
    def under_way(self) -> int:
        """Maximum tokens in flight, unless a single window exceeds it."""
        by_batch = BATCHES * self.engine.vllm.batch_tokens * self.engine.engines
        most = min(UNDER_WAY_BYTES, self.engine.vllm.held_bytes or UNDER_WAY_BYTES)
        return max(1, min(by_batch, most // max(1, self.row_bytes)))

    def described(self) -> dict[str, Any]:
        """Return the settings that determine the rows, beside model, points and documents; JSON-compatible."""
        generation = None if self.sampling_params is None else {**self.sampling_params, "seed": self.seed}
        described: dict[str, Any] = {
            "windows": self.cutting.described(),
            "sample": self.sample.described(),
            "generation": generation,
            "steering": None,
            "before_edits": self.spec.before_edits,
        }
        if self.steering is not None:
            described |= self.engine.compiler.lowered(self.steering).described
        if (calibrated := self.engine.compiler.calibrated(self.spec)) is not None:
            described["calibration"] = calibrated.digest  # no key without one: data sets are known by all this says
        return described


def check_sample(sample: TokenSample, points: Collection[Point]) -> None:
    """Check that a token sample reads rows of these points only.

    Raises:
        InvalidSpec: it reads others.
    """
    if sample.needs is not None and sample.needs not in points:
        raise InvalidSpec(f"the probe reads {sample.needs}, which is not collected; collect it too")


def check_room(context: int, longest: int) -> None:
    """Check that a window of `context` tokens is no longer than the longest prompt.

    Raises:
        InvalidSetting: it is longer.
    """
    if context > longest:
        raise InvalidSetting(
            f"context={context}, and this engine has room for prompts of {longest} tokens; give less, or start it with "
            "a larger max_model_len"
        )


def most_context(engine: Engine | RemoteEngine, params: Mapping[str, Any] | None) -> int:
    """Return the length in tokens of the longest prompt that leaves the engine room for generated tokens."""
    longest = engine.vllm.max_model_len
    if engine.vllm.pools:
        return longest
    generated = 1 if params is None else engine.vllm.sampling(params).max_tokens or 1
    return max(1, longest - generated)


#: Default bytes of rows in a shard: few files, and little lost if the process is killed.
SHARD_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class CollectArguments:
    """Arguments of `steercap.lab.datasets.collecting.collect`, documented there."""

    capture: CaptureSpec
    tokens: Tokens | TokenSelection | TokenSample = "all"
    context: int | None = None
    long: Long | None = None
    bos: Bos = "document"
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] | None = None
    seed: int = 0
    steering: Steering | None = None
    shard_bytes: int = SHARD_BYTES
    documents_per_shard: int | None = None
    statistics_every: int | None = None
    concurrency: int | None = None
    verify: bool = False
    progress: ProgressCallback | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("shard_bytes", 1), ("documents_per_shard", 1), ("statistics_every", 0)):
            given = getattr(self, name)
            if given is None:
                continue
            number = count_of(given, name, least, wrong=InvalidSetting)
            object.__setattr__(self, name, number)  # NumPy's are no JSON
        if self.capture.attention and self.statistics_every:
            raise InvalidSetting(
                f"statistics_every={self.statistics_every}: targets of attention are positions, which have no mean; "
                "leave it out, or give 0"
            )
        check_cutting(FAR if self.context is None else self.context, self._long, self.bos)
        if self.sampling_params is not None:
            self._check_params(self.sampling_params)

    @property
    def _long(self) -> Long:
        return self.long or ("split" if self.sampling_params is None else "refuse")

    def _check_params(self, params: Mapping[str, Any]) -> None:
        if "seed" in params or params.get("n", 1) != 1:
            raise InvalidSetting(
                "sampling_params= must leave out n= and seed=: each document gets one sample, with a seed of its own; "
                "give seed= to collect"
            )
        if self._long == "split":
            raise InvalidSetting(
                "long='split' with sampling_params=: windows of a document are not prompts; give long='cut' or 'refuse'"
            )

    def reading(self, model: SteerModel | RemoteModel, engine: Engine | RemoteEngine) -> Reading:
        """Compile the arguments for an open model and its engine.

        Raises:
            InvalidRequest: an argument does not fit; raised as the matching subclass.
        """
        context = most_context(engine, self.sampling_params) if self.context is None else self.context
        tokenizer = model.tokenizer if engine.vllm.tokenizes else None
        cutting = Cutting(tokenizer, context, self._long, self.bos, self.template)
        sample = sample_of(self.tokens)
        return Reading(
            engine, self.capture, sample, cutting, self.sampling_params, self.seed, self.steering, self.concurrency
        )


class Ended(NamedTuple):
    """Document whose rows have all been yielded.

    Args:
        number: number in the corpus.
        digest: SHA-256 of the document.
        read: number of tokens that the model read, generated ones included.
        bytes: bytes of the corpus up to its end, None if unknown.
    """

    number: int
    digest: bytes
    read: int
    bytes: int | None


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of consecutive windows.

    Args:
        index: labels of the rows.
        rows: rows of each point, in consecutive pieces; [rows, ...] in the point's dtype, or in a codec.
        ended: documents whose last window is in this block, and documents without windows; in order.
    """

    index: Index
    rows: Mapping[Point, Sequence[Whole]]
    ended: Sequence[Ended]
