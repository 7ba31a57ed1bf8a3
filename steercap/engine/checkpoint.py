"""What can be known of a model without starting anything: where it is, and what its config.json says. It needs neither
torch nor vLLM, so it is looked at first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from steercap.core.extras import extra
from steercap.errors import ModelNotLoaded

#: Files by which vLLM recognises the folder of a model, in transformers' format or Mistral's own.
CONFIGS: Final = ("config.json", "params.json")


class Checkpoint(msgspec.Struct, frozen=True):
    """What is known of a model.

    Args:
        name: as the user wrote it.
        folder: where it is, "" if it is not on this machine.
        architectures: of its config.json.
        layers: decoder layers, 0 if unknown.
        width: elements of a row, 0 if unknown.
        dtype: that its weights are kept in.
        bytes: of its weights.
        context: tokens that its positions are made for, 0 if unknown.
        quantization: its `quantization_config`.
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
    """Whether a model's name can only be a path: no name on a hub looks like it.

    Names on a hub are "name" or "owner/name"; vLLM also takes "owner/name/file.gguf" and URLs.
    """
    if "://" in name:
        return False
    return name.startswith(("/", ".", "~")) or (name.count("/") > 1 and not name.endswith(".gguf"))


def require_there(name: str) -> None:
    """Check that a model that can only be on this machine is there.

    Raises:
        ModelNotLoaded: a path where nothing is, or a folder without a model in it.
    """
    path = Path(name)
    if path.is_dir() and not any((path / config).is_file() for config in CONFIGS):
        raise ModelNotLoaded(f"the folder {path.absolute()} has no config.json; give the folder of a model")
    if not path.exists() and is_path(name):
        home = "; ~ is not expanded here: write the path in full" if name.startswith("~") else ""
        raise ModelNotLoaded(
            f"there is no model at {path.absolute()}{home}; give the folder of a model, or a name on the hub such as "
            "Qwen/Qwen3-0.6B"
        )


def require_reachable(name: str) -> None:
    """Check that a model can be had: it is here, or the hub answers; blocks, for 10 s at most once names are resolved.

    The hub's library tries six times to reach it, and vLLM asks it again and again, after an import that takes long: it
    is minutes until their error comes. An answer is waited for from the hub, or from the proxy before it; what a proxy
    then answers, and another hub, are left to them.

    Raises:
        ModelNotLoaded: it is not on this machine, and nothing answers, or HF_HUB_OFFLINE forbids to ask.
    """
    if "://" in name or Path(name).exists() or importlib.util.find_spec("huggingface_hub") is None:
        return
    with extra("cuda", "cpu"):
        from huggingface_hub import constants

    elsewhere = os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}
    if elsewhere or local_folder(name) is not None:
        return
    remedy = f"give the folder of a model, or fetch it where there is a connection: hf download {name}"
    if constants.HF_HUB_OFFLINE:
        in_parts = name.endswith(".gguf") or ":" in name  # of a repository whose files vLLM looks for by itself
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
    """The host and port that a request to the hub goes to first, None if unknown, and what it is, in words."""
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
    """What is known of a model, from its folder or the hub's cache; what is not known is left empty.

    Args:
        name: as the user wrote it.
        folder: where it lies, if that is known otherwise.
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
        weights_of(found),
        _first(text, "max_position_embeddings", "n_positions"),
        quantization if isinstance(quantization := config.get("quantization_config"), dict) else {},
    )


def local_folder(name: str) -> Path | None:
    """Where a model is on this machine, in a folder or the hub's cache; None if it is not."""
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


def weights_of(folder: Path) -> int:
    """Bytes of a model's weights; vLLM reads .bin files only where there is no .safetensors."""
    files = list(folder.glob("*.safetensors")) or list(folder.glob("*.bin"))
    return sum(path.stat().st_size for path in files)


def _first(config: dict[str, Any], *names: str) -> int:
    """The first of some settings that is set, 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
