"""Facts about a model's checkpoint that are known without starting an engine: its folder, its config.json, its size.

This module imports neither torch nor vLLM, so its checks run first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.request
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded
from steercap.files.fingerprint import nearest_path, weights_digest

#: Files by which vLLM recognises the folder of a model, in transformers' format or Mistral's own.
CONFIGS: Final = ("config.json", "params.json")
#: Patterns of the files of a tokenizer and its chat templates.
TOKENIZERS: Final = (
    "tokenizer*.*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.*",
    "additional_chat_templates/*",
)


class Checkpoint(msgspec.Struct, frozen=True):
    """Facts about a model's checkpoint.

    Args:
        name: name or path as the user wrote it.
        folder: folder of the checkpoint, "" if it is not on this machine.
        architectures: class names under `architectures` in its config.json.
        layers: number of decoder layers, 0 if unknown.
        width: hidden size, 0 if unknown.
        dtype: dtype name in its config.json, "" if unknown.
        bytes: bytes of its weight files.
        context: maximum number of tokens of a sequence by its config.json, 0 if unknown or scaled beyond it.
        quantization: `quantization_config` of its config.json.
    """

    name: str
    folder: str = ""
    architectures: tuple[str, ...] = ()
    layers: int = 0
    width: int = 0
    dtype: str = ""
    bytes: int = 0
    context: int = 0
    quantization: Mapping[str, Any] = {}


def is_path(name: str) -> bool:
    """Check if a model's name can only be a path, since it does not have the form of a name on a hub.

    Names on a hub are "name" or "owner/name"; vLLM also accepts "owner/name/file.gguf" and URLs.
    """
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or (name.count("/") > 1 and not name.endswith(".gguf"))


def require_there(name: str) -> None:
    """Check that a model whose name is a path exists on this machine.

    Raises:
        ModelNotLoaded: the path does not exist, or is a folder without a model's config.
    """
    path = Path(name)
    if path.is_dir() and not any((path / config).is_file() for config in CONFIGS):
        raise ModelNotLoaded(f"the folder {path.absolute()} has no config.json; give the folder of a model")
    if not path.exists() and is_path(name):
        home = "; ~ is not expanded here: write the path in full" if name.startswith("~") else ""
        raise ModelNotLoaded(
            f"there is no model at {path.absolute()}{home or nearest_path(path)}; give the folder of a model, or a "
            "name on the hub such as Qwen/Qwen3-0.6B"
        )


def _folder_like(name: str) -> str:
    """Return a hint that names an existing path similar to `name`; "" if there is none."""
    return nearest_path(name) if Path(name).absolute().parent.is_dir() else ""


def require_reachable(name: str) -> None:
    """Check that a model is on this machine or its hub can be connected to; blocks for at most 10 s after DNS.

    The hub's library tries six times and vLLM calls it repeatedly after a long import, so that their own error would
    come minutes later. Only a connection to the hub, or to the proxy before it, is checked; errors behind a proxy and
    other hubs are left to those libraries.

    Raises:
        ModelNotLoaded: it is not on this machine, and there is no connection or HF_HUB_OFFLINE forbids one.
    """
    if "://" in name or Path(name).exists() or importlib.util.find_spec("huggingface_hub") is None:
        return
    with extra("cuda", "cpu"):
        from huggingface_hub import constants

    elsewhere = os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}
    if elsewhere or local_folder(name) is not None:
        return
    remedy = (
        f"give the folder of a model{_folder_like(name)}, or fetch it where there is a connection: hf download {name}"
    )
    if constants.HF_HUB_OFFLINE:
        in_parts = name.endswith(".gguf") or ":" in name  # a file of a repository, which vLLM looks up itself
        if not in_parts and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").exists():
            raise ModelNotLoaded(
                f"{name!r} is not on this machine: neither a folder nor in {constants.HF_HUB_CACHE}, and "
                f"HF_HUB_OFFLINE=1 forbids to fetch it; unset it, {remedy}"
            )
        return
    address, what = _first_hop(constants.ENDPOINT)
    if address is None:
        return
    try:
        socket.create_connection(address, timeout=10).close()
    except OSError as error:
        raise ModelNotLoaded(
            f"{name!r} is not on this machine, and {what} cannot be reached: {error}; {remedy}"
        ) from error


def _first_hop(endpoint: str) -> tuple[tuple[str, int] | None, str]:
    """Return the host and port that a request to the hub connects to, None if unknown, and their name for messages."""
    hub = urlsplit(endpoint)
    proxies = {} if urllib.request.proxy_bypass(hub.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    try:
        hop = urlsplit(proxy) if proxy else hub
        port = hop.port or {"http": 80, "https": 443}.get(hop.scheme)
    except ValueError:  # a port that is none
        return None, endpoint
    what = f"the proxy before {endpoint}, {hop.hostname}:{port}," if proxy else endpoint
    return (hop.hostname, port) if hop.hostname and port else None, what


def look_up(name: str, folder: Path | None = None) -> Checkpoint:
    """Read the facts about a model from its folder or the hub's cache, without a connection; unknown ones stay empty.

    Args:
        name: name or path as the user wrote it.
        folder: folder of the model; None to search for it.
    """
    found = folder or local_folder(name)
    if found is None:
        return Checkpoint(name)
    try:
        config = json.loads((found / "config.json").read_text())
    except (OSError, ValueError):
        return Checkpoint(name, str(found))
    if not isinstance(config, dict):
        return Checkpoint(name, str(found))
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    return Checkpoint(
        name,
        str(found),
        tuple(config.get("architectures") or ()),
        _first(text, "num_hidden_layers", "n_layer"),
        _first(text, "hidden_size", "n_embd"),
        str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""),
        weight_bytes(found),
        0 if _is_scaled(text) else _first(text, "max_position_embeddings", "n_positions"),
        quantization if isinstance(quantization := config.get("quantization_config"), dict) else {},
    )


def local_folder(name: str) -> Path | None:
    """Return the folder of a model on this machine, a path or in the hub's cache; None if there is none."""
    if Path(name).is_dir():
        return Path(name)
    if is_path(name) or importlib.util.find_spec("huggingface_hub") is None:
        return None
    with extra("cuda", "cpu"):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all weight files of a folder; .bin files count only without .safetensors, as in vLLM."""
    others = {"optimizer.bin", "scheduler.bin", "training_args.bin"}
    files = weight_files(folder) or [path for path in folder.glob("*.bin") if path.name not in others]
    return sum(path.stat().st_size for path in files)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files: those in the safetensors index, or else every `*.safetensors`.

    Mistral's own copy of the weights, `consolidated*.safetensors`, is left out if there are other files.
    """
    try:
        named = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        found = list(folder.glob("*.safetensors"))
        return [path for path in found if not path.name.startswith("consolidated")] or found
    return [path for name in sorted(named) if (path := folder / name).exists()]


def _first(config: dict[str, Any], *names: str) -> int:
    """Return the value of the first of the settings `names` that is an integer, 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def _is_scaled(config: dict[str, Any]) -> bool:
    """Return whether a config scales its rotary positions, so that vLLM may allow more than it names."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    return isinstance(rope, dict) and any("factor" in one for one in (rope, *rope.values()) if isinstance(one, dict))


def files_loaded(name: str, tokenizer: Any = None) -> str:
    """Return a fingerprint of the files at paths that an engine loads; "" if there are none.

    It covers the weights with their modification times, the configuration, and the contents of the tokenizer's files.

    Args:
        name: path or name of the model.
        tokenizer: path of a tokenizer elsewhere, or its name; None for the model's own.
    """
    parts = [weights_digest(name, dated=True).encode()] if Path(name).exists() else []
    found = sorted(file for pattern in TOKENIZERS for file in Path(tokenizer or name).glob(pattern))
    parts += [file.name.encode() + sha256(file.read_bytes()).digest() for file in found if file.is_file()]
    return sha256(b"".join(parts)).hexdigest() if parts else ""
