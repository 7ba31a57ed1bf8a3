"""Fingerprints of an open model, which are compared when a run is resumed, and hints for paths that do not exist."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from steercap.core.extras import extra
from steercap.core.protocols import OpenModel
from steercap.core.values import warn

#: Patterns of the weight files that vLLM loads.
WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
#: Names of the configuration files: architecture, and defaults of sampling and stopping.
CONFIGS: Final = ("config.json", "generation_config.json")
#: Bytes read at each end of a weight file: the header and the last tensor, without reading the whole file.
ENDS: Final = 64 << 10
#: Pattern of vLLM's environment variables that change no answer: keys, logs, usage, folders, addresses, timeouts.
UNHEARD: Final = re.compile(
    r"VLLM_(.*(KEY|TOKEN)|.*LOG(GING)?_.*|.*LOGGING|(NO_)?USAGE_.*|DO_NOT_TRACK|HTTP_.*|.*_(CACHE|ROOT|PATH|PORT|IP)|"
    r"PORT|.*TIMEOUT.*|WORKER_MULTIPROC_METHOD)"
)
#: Maximum number of names in a folder that are compared with a misspelt name.
MOST_NAMES: Final = 10_000
#: Cached digests, by tokenizer; hashing a vocabulary of 150,000 takes a while.
_DIGESTS: Final[WeakKeyDictionary[Any, str]] = WeakKeyDictionary()


def tokenizer_of(model: OpenModel) -> Any:
    """Return the tokenizer of an open model, or None if it was started with `skip_tokenizer_init=True`."""
    return None if model.engine.vllm_config.model_config.skip_tokenizer_init else model.tokenizer


def identity_of(model: str, config: Any, tokenizer: Any) -> dict[str, str]:
    """Return the fields that identify a model, by name; "" for a field that is not set.

    Args:
        model: name on the hub, or path.
        config: vLLM's ModelConfig.
        tokenizer: tokenizer of the model.

    Returns:
        Fields by name: name, revision, dtype, quantization; weights, a commit of the hub or `weights_digest`; tensors,
        `tensors_digest`, "" beside a commit; generation, the SHA-256 of the engine's own sampling defaults and
        overrides of the configuration; chat_template, `template_digest`; tokenizer, `tokenizer_digest`.
    """
    overrides = config.hf_overrides
    defaults = [
        config.generation_config if not Path(config.generation_config).exists() else _folder(config.generation_config),
        config.override_generation_config,
        overrides if isinstance(overrides, Mapping) else getattr(overrides, "__qualname__", str(overrides)),
    ]
    return {
        "name": model_name(model),
        "revision": config.revision or "",
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization or ""),
        **weights_identity(model, config.hf_config, config.model),
        "generation": _digest(defaults),
        "chat_template": template_digest(tokenizer),
        "tokenizer": tokenizer_digest(tokenizer),
    }


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256, in hexadecimal, of all that determines how a tokenizer splits a text; "" for None."""
    if tokenizer is None:
        return ""
    with suppress(TypeError):  # one that cannot be a key
        if (known := _DIGESTS.get(tokenizer)) is not None:
            return known
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words = sorted((str(word), number) for word, number in getattr(tokenizer, "get_vocab", dict)().items())
        said: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": words}
        said["all special"] = list(map(str, getattr(tokenizer, "all_special_tokens", ())))
    else:
        said = msgspec.json.decode(backend.to_str())
        said |= {"truncation": None, "padding": None}  # settings of its last call
    # Templates and the starts of windows depend on the special tokens.
    special = getattr(tokenizer, "special_tokens_map", None) or {}
    said["special"] = {name: str(word) for name, word in sorted(special.items())}
    found = _digest(said)
    with suppress(TypeError):
        _DIGESTS[tokenizer] = found
    return found


def template_digest(tokenizer: Any) -> str:
    """Return the SHA-256, in hexadecimal, of a tokenizer's chat template; "" if it has none."""
    return _digest(getattr(tokenizer, "chat_template", None))


def weights_digest(path: str | Path, *, dated: bool = False) -> str:
    """Return a SHA-256, in hexadecimal, that identifies the weights in a folder, or in one file.

    It covers the configuration files, and name, size, first and last 64 KiB of each weight file; copies share it.

    Args:
        path: the folder or file.
        dated: True to cover each weight file's time of change too, so that copies and rewritten files differ.
    """
    found = hashlib.sha256()
    for part in _parts(Path(path), dated=dated):
        found.update(hashlib.sha256(part).digest())  # digests are of one length, so no two lists of parts are alike
    return found.hexdigest()


def files_of(model: str, revision: str | None = None) -> str:
    """Return a SHA-256, in hexadecimal, that identifies a model's files on this machine; "" if there are none.

    Beside what `weights_digest` reads, it covers the relative path, size and time of change of every file in the
    model's folder, and so the tokenizer, the chat template and weights that were edited in place. Copies differ.

    Args:
        model: path of the model, or its name on the hub, whose snapshot in the hub's cache and commit are hashed.
        revision: revision or commit of a name on the hub, None for its main branch.
    """
    folder = Path(model) if os.path.exists(model) else _snapshot(model, revision)  # noqa: PTH110 -- it may be no path
    if folder is None:
        return ""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    stamps: list[Any] = [weights_digest(folder), "" if os.path.exists(model) else folder.name]  # noqa: PTH110
    for file in sorted(files) or [folder]:
        with suppress(FileNotFoundError):  # it was removed meanwhile, or is a link to nothing
            found = file.stat()
            stamps.append((str(file.relative_to(folder)), found.st_size, found.st_mtime_ns))
    return _digest(stamps)


def surroundings() -> dict[str, str]:
    """Return what answers depend on besides the model, by name: vLLM's version, VLLM_* variables, Python's folder."""
    found = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    found = {name: value for name, value in found.items() if not UNHEARD.fullmatch(name)}
    with suppress(PackageNotFoundError):
        found["vLLM"] = version("vllm")
    return {**found, "Python": sys.prefix}


def digest_of(words: Sequence[str]) -> str:
    """Return the SHA-256, in hexadecimal, of a command's options and of the files that they name.

    It covers the resolved paths and contents of files and folders that a word, or its part after "=", names, and the
    STEERCAP_* variables. Of --folder, which rows are written to, it covers the path alone.
    """
    found: list[Any] = [sorted(item for item in os.environ.items() if item[0].startswith("STEERCAP_"))]
    for before, word in zip(("", *words), words, strict=False):
        found.append(os.path.realpath(word) if before == "--folder" else word)
        for path in filter(os.path.exists, {word, word.partition("=")[2]} - {"", word if before == "--folder" else ""}):
            found += [os.path.realpath(path), files_of(path)]
            if os.path.isfile(path):  # noqa: PTH113
                with Path(path).open("rb") as file:
                    found.append(hashlib.file_digest(file, "sha256").hexdigest())
    return _digest(found)


def _snapshot(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's snapshot in the hub's cache, None if it is missing; `revision` None is "main"."""
    if find_spec("huggingface_hub") is None:
        return None
    with extra("cuda", "cpu"):
        from huggingface_hub import constants

    repository = "--".join(name.partition(":")[0].split("/")[:2])  # of owner/name/file.gguf and owner/name:quantization
    cache = Path(constants.HF_HUB_CACHE) / f"models--{repository}"
    reference = cache / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    return cache / "snapshots" / commit if commit and (cache / "snapshots" / commit).is_dir() else None


def weights_identity(model: str, config: Any, loaded: str = "") -> dict[str, str]:
    """Return "weights" and "tensors" of `identity_of`; `loaded` is the path that vLLM took of a name on the hub."""
    here, commit = Path(model), ""
    if not here.exists():
        here = Path(loaded or model)
        commit = here.name if here.parent.name == "snapshots" else ""
        commit = str(getattr(config, "_commit_hash", None) or commit)
    if commit or not here.exists():
        return {"weights": commit, "tensors": ""}
    from steercap.files.tensors import tensors_digest

    return {"weights": weights_digest(here), "tensors": tensors_digest(here, WEIGHTS)}


def _folder(path: str) -> str:
    file = Path(path) / CONFIGS[1]
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else path


def _parts(path: Path, *, dated: bool) -> Iterator[bytes]:
    if path.is_file():
        yield from _ends(path, dated=dated)
        return
    for name in CONFIGS:
        yield (path / name).read_bytes() if (path / name).is_file() else b""
    for file in sorted(file for pattern in WEIGHTS for file in path.glob(pattern)):
        yield file.name.encode()
        yield from _ends(file, dated=dated)


def _ends(file: Path, *, dated: bool) -> Iterator[bytes]:
    found = file.stat()
    size = found.st_size
    yield str(size).encode()
    if dated:
        yield str(found.st_mtime_ns).encode()
    with file.open("rb") as content:
        yield content.read(ENDS)
        content.seek(max(0, size - ENDS))
        yield content.read(ENDS)


def _digest(value: Any) -> str:
    """Return the SHA-256, in hexadecimal, of plain data as canonical JSON; "" for None."""
    if value is None:
        return ""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic", enc_hook=str)).hexdigest()


def warn_of_other_model(what: str, label: str, names: Collection[str], *, tuned: bool = False, fix: str = "") -> None:
    """Warn if an object, such as a vector, was made for another model than the open one.

    Args:
        what: name of the object, for the message.
        label: model that the object was made for: path, hub name or transformers' `model_type`; "" if unknown.
        names: names of the open model; "" is ignored, and nothing is compared if there is no other.
        tuned: True if a base model and its instruct model count as the same.
        fix: advice for an intended use; "" to replace the object's label.
    """

    def called(name: str) -> str:
        return re.sub(r"-(base|chat|it|instruct)$", "", short_name(name)) if tuned else short_name(name)

    known = dict.fromkeys(filter(None, names))
    if label and known and called(label) not in map(called, known):
        warn(
            f"{what} says that it was made for model {label!r}, and this one is {' or '.join(map(repr, known))}: "
            "layers and directions of one model mean nothing in another; if it is meant, or both are one, "
            f"{fix or 'give dataclasses.replace(it, model=...)'}"
        )


def short_name(model: str) -> str:
    """Return a model's name for comparisons: lower case, without owner or folder; gpt2-small becomes gpt2."""
    name = (_in_cache(model) or model.rstrip("/")).rpartition("/")[2].casefold().replace("_", "-")
    return "gpt2" if name == "gpt2-small" else name


def names_of(model: str) -> tuple[str, ...]:
    """Return the names by which files may refer to a model, given its path (also of a hub snapshot) or name."""
    return tuple(filter(None, (_in_cache(model), model_name(model))))


def _in_cache(path: str) -> str:
    """Return the repository's name from the path of a snapshot in the hub's cache; "" for any other path."""
    found = re.search(r"models--(?:([^/]*)--)?([^/]+)/snapshots/", path)
    return "/".join(filter(None, found.groups())) if found else ""


def model_name(model: str) -> str:
    """Return the name of a model for files: its name on the hub, or that of its folder."""
    return Path(model).name if Path(model).is_dir() else model


def nearest_path(path: str | Path) -> str:
    """Return a hint for the error about a missing path: the folder that is missing, and the most similar path.

    It is "" if the folders cannot be listed.
    """
    with suppress(OSError):
        return _nearest(path)
    return ""


def _nearest(path: str | Path) -> str:
    whole = missing = Path(path).absolute()
    while not missing.parent.is_dir() and missing != missing.parent:
        missing = missing.parent
    names: list[str] = []
    with suppress(OSError):  # a folder that may not be listed
        names = [one.name for one in islice(missing.parent.iterdir(), MOST_NAMES)]
    folder = "" if missing == whole else f", nor a folder {missing}"
    near = [] if whole.exists() else difflib.get_close_matches(missing.name, names, n=1)
    if not near:
        return folder
    meant = missing.parent / near[0] / whole.relative_to(missing)
    return f"{folder} (did you mean {str(meant) if Path(path).is_absolute() else os.path.relpath(meant)!r}?)"
