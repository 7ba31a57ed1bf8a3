"""Transfer of the engine's settings to the workers: `additional_config["steercap"]`.

The entry is also a key of vLLM's compile cache. A compiled artifact does not know which Python it was traced from:
without the key, a cached graph without taps would be loaded, and no tap would ever fire.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from steercap.architectures.families import architectures_within, family_of, generating, over_transformers
from steercap.core.schema import LINE_BYTES, REDUCED
from steercap.core.spec import Point
from steercap.errors import UnsupportedModel
from steercap.kernels.codecs import record_of
from steercap.worker.taps import Installed, TapSizes

if TYPE_CHECKING:
    from steercap.architectures.families.base import Family
    from steercap.config import Settings

CONFIG_KEY = "steercap"
#: Modules whose source affects traced graphs.
_TRACED = ("architectures/sites", "architectures/families", "kernels", "worker/install.py")


def worker_config(armed: Sequence[Point], settings: Settings, candidate: int) -> dict[str, Any]:
    """Return the entry of `additional_config` that arms `armed`; `candidate`: see `families.families_of`."""
    return {
        "points": [[point.layer, point.site] for point in armed],
        "slots": settings.steering_slots,
        "vector_bytes": settings.vector_bytes,
        "edits_per_point": settings.edits_per_point,
        "arena_bytes": settings.arena_bytes,
        "reduce_bytes": settings.reduce_bytes,
        "candidate": candidate,
        "source": source_digest(),
    }


def armed_points(additional_config: Mapping[str, Any]) -> tuple[Point, ...]:
    """Read the armed points in a worker."""
    return tuple(Point(layer, site) for layer, site in additional_config[CONFIG_KEY]["points"])


def expected_family(model_config: Any) -> Family | None:
    """Return the family expected from a model's architecture, or the inner language model's; None if unknown.

    It is the family as vLLM will run it. The loaded layers decide in the end; see `families.families_of`.
    """
    try:
        names = (*model_config.architectures, *_within(model_config))
        family = family_of((*names, *map(generating, names)))
    except UnsupportedModel:
        return None
    return over_transformers(family) if model_config.using_transformers_backend() else family


def _within(model_config: Any) -> tuple[str, ...]:
    """Return the possible architectures of the language model within a wrapper; () if the model is no wrapper."""
    text = model_config.hf_text_config
    if text is model_config.hf_config:
        return ()
    return architectures_within(text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def candidate_of(additional_config: Mapping[str, Any]) -> int:
    """Read the index of the candidate family to try in a worker."""
    return int(additional_config[CONFIG_KEY]["candidate"])


def tap_sizes(config: Any, installed: Installed, tokens: int) -> TapSizes:
    """Return the sizes of a worker's tables.

    Args:
        config: vLLM's configuration.
        installed: the worker's taps.
        tokens: maximum number of tokens of a pass.
    """
    found = config.additional_config[CONFIG_KEY]
    lag = overshoot(config)
    held = max(lag, 1)
    raw, reduced = record_of(installed.schemas), record_of(installed.schemas, REDUCED)
    each = (reduced.lines + held * raw.lines) * LINE_BYTES
    return TapSizes(
        slots=found["slots"],
        bank_rows=found["vector_bytes"] // (installed.bank_width * torch.float32.itemsize),
        entries=found["edits_per_point"],
        tokens=tokens,
        arena_bytes=found["arena_bytes"],
        # A few more than can run, so that the next ones are at hand when some end.
        accumulators=min(5 * config.scheduler_config.max_num_seqs // 4 + 4, found["reduce_bytes"] // max(each, 1)),
        lag=lag,
        held=held,
        graph_tokens=_graph_tokens(config.compilation_config),
    )


def _graph_tokens(compilation: Any) -> int:
    """Return the maximum tokens of a pass that runs a CUDA graph, 0 where none does."""
    replayed = getattr(compilation, "decoder_replay_cudagraph_capture_sizes", ())  # not in older releases
    return max((*(compilation.cudagraph_capture_sizes or ()), *replayed), default=0)


def drafts(config: Any) -> int:
    """Return the number of tokens that vLLM drafts for a request in a pass."""
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def overshoot(config: Any) -> int:
    """Return the number of positions that vLLM may compute past a sequence's end before its scheduler knows of it."""
    passes = int(config.max_concurrent_batches)
    return (passes - 1) * (1 + drafts(config)) + drafts(config)


def source_digest() -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 of the source that affects a trace of the model."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for part in _TRACED:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
