"""Compilation of specs on a client for the engine of a server, from the server's description of it.

A `RemoteEngine` has those attributes of `Engine` that planning a capture and digesting steering read. The server
compiles each request again, and its result counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from steercap.client.sampling import sampling_json
from steercap.config import Settings
from steercap.core.schema import PointSchema
from steercap.core.spec import Point
from steercap.engine.compiler import Compiler
from steercap.files.fingerprint import template_digest, tokenizer_digest

if TYPE_CHECKING:
    from steercap.engine.engine import Engine

#: Names of the fields of `Settings` that compilation reads.
SETTINGS: Final = ("codec", "codec_k", "codec_seed", "edits_per_point")


def engine_description(engine: Engine) -> dict[str, Any]:
    """Describe an engine to clients, as JSON values by which they compile specs; its points are sent separately."""
    return {
        "generation_config": dict(engine.vllm.llm.model_config.try_get_generation_config()),
        "tokenizer": _tokenizer(engine),
        "compiling": _described(engine),
        "texts": engine.vllm.texts if engine.vllm.tokenizes else {},
    }


def _described(engine: Engine) -> dict[str, Any]:
    """Return the JSON values that a `RemoteEngine` is made from; armed indices are in the order of the points sent."""
    vllm = engine.vllm
    return {
        "armed": list(engine.armed.values()),
        "absent": engine.absent,
        "refused": dict(engine.refused),
        "settings": {name: getattr(engine.settings, name) for name in SETTINGS},
        "vllm": {
            "model_name": vllm.model_name,
            "names": list(engine.names),
            "num_layers": vllm.num_layers,
            "max_model_len": vllm.max_model_len,
            "vocabulary": vllm.vocabulary,
            "batch_tokens": vllm.batch_tokens,
            "tokenizes": vllm.tokenizes,
            "pools": vllm.pools,
        },
        "engines": engine.engines,
    }


def _tokenizer(engine: Engine) -> dict[str, str]:
    """Return the name, revision and digests that identify the engine's tokenizer; {} if it has none."""
    if not engine.vllm.tokenizes:
        return {}
    config, found = engine.vllm.llm.model_config, engine.vllm.tokenizer
    digests = {"digest": tokenizer_digest(found), "template": template_digest(found)}
    return {"name": str(config.tokenizer), "revision": config.tokenizer_revision or "", **digests}


@dataclass(frozen=True)
class RemoteVllm:
    """Facts about a server's vLLM, under the names of `VllmEngine`'s attributes; see there."""

    model_name: str
    names: tuple[str, ...]
    num_layers: int
    max_model_len: int
    vocabulary: int
    batch_tokens: int
    tokenizes: bool
    held_bytes: int
    pools: bool = False
    #: Sampling parameters to add if a request's text is not read: none, since a server detokenises in any case.
    without_text: Mapping[str, Any] = field(default_factory=dict)

    def sampling(self, params: Any) -> Any:
        """Return sampling parameters as an object with attributes; raises the errors of `sampling_json`."""
        return SimpleNamespace(**sampling_json(params))

    def limit(self, prompt_len: int, params: Any) -> int:
        """Return the maximum number of input tokens of a request: prompt + generated - 1, within the context length."""
        longest = self.max_model_len if params.max_tokens is None else prompt_len + params.max_tokens
        return min(longest, self.max_model_len) - 1


class RemoteEngine:
    """Properties of a server's engine that a client needs to plan requests.

    Args:
        description: "compiling" of `engine_description`.
        schemas: shape and dtype of the rows at every armed point, in the server's order.
        held_bytes: maximum bytes of captured rows that may wait at the server.
    """

    def __init__(self, description: Mapping[str, Any], schemas: Mapping[Point, PointSchema], held_bytes: int) -> None:
        armed = dict(zip(schemas, description["armed"], strict=True))
        absent = {site: frozenset(layers) for site, layers in description["absent"].items()}
        known = {**description["vllm"], "names": tuple(description["vllm"]["names"])}
        self.vllm = RemoteVllm(**known, held_bytes=held_bytes)
        self.schemas: Final = dict(schemas)
        self.engines: int = description["engines"]
        self.compiler = Compiler(
            armed,
            self.schemas,
            (),
            num_layers=self.vllm.num_layers,
            settings=Settings(**description["settings"]),
            exists=lambda point: point in armed or point.layer not in absent.get(point.site, ()),
            refused=description["refused"],
            vocabulary=self.vllm.vocabulary,
            names=self.vllm.names,
        )
