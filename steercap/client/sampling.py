"""Sampling and pooling parameters as fields of an HTTP request's body.

A parameter left out gets vLLM's default, as in a local request, and not that of the server's own configuration. Only
its `max_new_tokens` bounds `max_tokens`; a text that it ends is warned of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from steercap.core.values import choices, number_of, shown
from steercap.errors import InvalidRequest

#: Defaults of vLLM's SamplingParams that are always sent, since a server's configuration may change them.
DEFAULTS: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 16,
}
#: Names of all sampling parameters that can be sent in a completion request.
KNOWN: Final = (
    *DEFAULTS,
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "watermarking",
)
#: Greatest absolute `logit_bias` of vLLM's server, which clips greater ones silently; a local model does not clip.
MOST_BIAS: Final = 100
#: Parameters that the server sets itself, or that have no visible effect in its answers.
_ITS_OWN: Final = ("output_kind", "skip_clone", "output_text_buffer_length", "stream_interval")


def sampling_json(given: Any) -> dict[str, Any]:
    """Return sampling parameters as fields of a request's body, vLLM's defaults included.

    Args:
        given: vLLM's SamplingParams, a dict of their fields, or None.

    Raises:
        InvalidRequest: `given` is of another type, has a parameter that cannot be sent to a server, or a bias beyond
            `MOST_BIAS`, which the server would change.
    """
    asked = dict(DEFAULTS)
    for name, value in _fields(given, "sampling_params", "SamplingParams").items():
        if name not in KNOWN:
            raise InvalidRequest(f"sampling parameter {name!r} cannot be sent to a server; {choices(name, KNOWN)}")
        if value is not None or name == "max_tokens":  # None is as many as the context holds
            asked[name] = _plain(value)
    if "logprob_token_ids" in asked:
        asked.setdefault("logprobs", 0)  # the server wants it, and reads the other alone
    if isinstance(biases := asked.get("logit_bias"), Mapping):
        for token, bias in biases.items():
            number = number_of(bias)
            if number is not None and not abs(number) <= MOST_BIAS:
                raise InvalidRequest(
                    f"logit_bias[{token}]={bias} cannot be sent to a server, where vLLM makes it {MOST_BIAS} or "
                    f"{-MOST_BIAS}; give a number between these, or steering=LogitBias({{token: bias}}) for any that "
                    "float32 holds"
                )
    return asked


def pooling_json(given: Any) -> dict[str, Any]:
    """Return pooling parameters as JSON values; the server checks them.

    Args:
        given: vLLM's PoolingParams, a dict of their fields, or None.

    Raises:
        InvalidRequest: `given` is of another type, or a value cannot be written as JSON.
    """
    asked = {name: _plain(value) for name, value in _fields(given, "pooling_params", "PoolingParams").items()}
    for name, value in asked.items():
        try:
            msgspec.json.encode({name: value})
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"pooling parameter {name}={shown(value)} cannot be sent to a server") from error
    return asked


def _fields(given: Any, argument: str, kind: str) -> dict[str, Any]:
    """Return the given parameters as a dict; of vLLM's own `kind`, those fields that differ from their defaults."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, msgspec.Struct) or type(given).__name__ != kind:
        raise InvalidRequest(f"{argument}={shown(given)}; give vLLM's {kind}, or a dict of its fields")
    plain: Any = type(given)()
    names = [name for name in given.__struct_fields__ if not name.startswith("_") and name not in _ITS_OWN]
    if "skip_reading_prefix_cache" in names and kind == "SamplingParams":  # vLLM sets it itself for prompt_logprobs
        asked: Any = given
        plain.skip_reading_prefix_cache = type(asked)(prompt_logprobs=asked.prompt_logprobs).skip_reading_prefix_cache
    values = {name: (getattr(given, name), getattr(plain, name)) for name in names}
    # Only values of the same type are compared, so that an array is not.
    return {name: one for name, (one, other) in values.items() if type(one) is not type(other) or one != other}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # StructuredOutputsParams
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: one for name, one in fields.items() if one is not None and not name.startswith("_")}
    return value
