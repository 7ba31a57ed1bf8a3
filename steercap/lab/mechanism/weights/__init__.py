"""Weights of a model as linear maps of the stream, and its checkpoint, whose tensors are read one at a time by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from steercap.core.extras import extra
from steercap.errors import InvalidFile, ModelNotLoaded, UnsupportedModel
from steercap.files.fingerprint import nearest_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig


WHOLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
#: Dtypes of weights that can be read; others, such as float8, need separate scales.
PLAIN: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True, repr=False)
class TensorFiles:
    """Safetensors files of a checkpoint.

    Args:
        path: path of the checkpoint, or its name on the hub.
        held: path of the file of each tensor, by name of the tensor.
        renamings: transformers' `WeightRenaming`s, from names in the files to names in its model, in order.
    """

    path: str
    held: Mapping[str, Path]
    renamings: Sequence[Any] = ()

    @classmethod
    def find(cls, path: str, revision: str | None = None) -> TensorFiles:
        """Find the files of a checkpoint in a folder or on the hub; only the names of tensors are read.

        Raises:
            ModelNotLoaded: there are no safetensors files, or one is missing.
        """
        from safetensors import safe_open

        if index := _file(path, INDEX, revision):
            held: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
            files = {name: _file(path, name, revision) for name in sorted(set(held.values()))}
            if missing := [name for name, file in files.items() if file is None]:
                raise ModelNotLoaded(f"{path}: the index names {', '.join(missing)}, which cannot be found")
            return cls(path, {name: file for name, part in held.items() if (file := files[part]) is not None})
        if whole := _file(path, WHOLE, revision):
            with safe_open(whole, framework="pt") as tensors:
                return cls(path, dict.fromkeys(tensors.keys(), whole))
        raise ModelNotLoaded(f"{path!r} has neither {WHOLE} nor {INDEX}; weights are read from safetensors files")

    def of(self, model: Any) -> TensorFiles:
        """Return the files with transformers' renamings for a model, such as "embed_out" of GPT-NeoX to "lm_head"."""
        with extra("cpu", "cuda"):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightRenaming

        known = get_model_conversion_mapping(model)
        return replace(self, renamings=tuple(one for one in known if isinstance(one, WeightRenaming)))

    @cached_property
    def spellings(self) -> Mapping[str, str]:
        """Name in the files by name after transformers' renamings, for the tensors whose names differ."""
        found = {}
        for name in self.held:
            spelled = name
            for renaming in self.renamings:
                spelled, _ = renaming.rename_source_key(spelled)
            if spelled != name:
                found[spelled] = name
        return found

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Read one tensor by its name in transformers' model, and check its shape: float32, on the CPU.

        Checkpoints written without the head have names without the prefix of the body: "ln_f.weight" for
        "transformer.ln_f.weight".

        Raises:
            InvalidFile: there is no such tensor, or its numbers are not finite.
            UnsupportedModel: the tensor has another shape, or is not of plain floats: weights are quantised.
        """
        from safetensors import safe_open

        short = name.partition(".")[2]
        spelled = next((known for known in (name, short) if known in self.held), None)
        spelled = spelled or self.spellings.get(name) or self.spellings.get(short)
        if spelled is None:
            raise InvalidFile(f"{self.path} holds no tensor {name!r}, which its configuration asks for")
        with safe_open(self.held[spelled], framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(spelled)
        if tuple(found.shape) != tuple(shape) or found.dtype not in PLAIN:
            raise UnsupportedModel(
                f"{self.path}: {name} is {list(found.shape)} {found.dtype}, which is not the plain weight that the "
                "configuration describes; only weights that are not quantised can be read"
            )
        read = found.float()
        if not bool(read.sum(dtype=torch.float64).isfinite()):
            raise InvalidFile(f"{self.path}: {name} has numbers that are not finite; is the checkpoint damaged?")
        return read

    def fill(self, prefix: str, module: Any) -> Any:
        """Load the weights of a module, at `prefix` in transformers' model, in place and in float32; return the module.

        Raises:
            InvalidFile, UnsupportedModel: as for `read`.
        """
        for name, parameter in list(module.named_parameters()):
            tensor = self.read(f"{prefix}.{name}", parameter.shape)
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, torch.nn.Parameter(tensor, requires_grad=False))
        return module


def configuration(path: str, revision: str | None = None) -> PretrainedConfig:
    """Return transformers' configuration of a checkpoint.

    Raises:
        ModelNotLoaded: there is no configuration.
    """
    with extra("cuda", "cpu"):
        from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        near = nearest_path(path) if Path(path).absolute().parent.is_dir() else ""
        raise ModelNotLoaded(f"no configuration of a model at {path!r}{near}: {error}") from error


def option(config: PretrainedConfig, name: str, default: Any) -> Any:
    """Return an option of a configuration, or `default` where its class does not have it.

    Configurations keep keys of `config.json` that their class lacks and the model ignores.
    """
    return getattr(config, name) if name in inspect.signature(type(config)).parameters else default


def skeleton(config: PretrainedConfig) -> Any:
    """Build transformers' model of a configuration on the meta device, without weights."""
    with extra("cuda", "cpu"):
        from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _file(path: str, name: str, revision: str | None) -> Path | None:
    with extra("cuda", "cpu"):
        from transformers.utils import cached_file

    found = cached_file(
        path,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def read_tokenizer(path: str, revision: str | None = None) -> Any:
    """Read the tokenizer of a checkpoint, a folder or name on the hub, with transformers.

    Raises:
        ModelNotLoaded: there is no tokenizer.
    """
    with extra("cuda", "cpu"):
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelNotLoaded(f"no tokenizer at {path!r}: {error}") from error
