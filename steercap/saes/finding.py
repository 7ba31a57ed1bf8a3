"""Search for the files of an SAE in a folder or on the hub, by the formats' file names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from steercap.core.extras import extra
from steercap.core.values import flag_of
from steercap.errors import InvalidFile
from steercap.files.fingerprint import nearest_path
from steercap.saes import formats, layouts
from steercap.saes.layouts import FoundSAE, named
from steercap.saes.reading import SAEParts, SAESettings, parts_of
from steercap.saes.tensors import read_npz, read_pt_tensors, read_safetensors


class SAEFormat(NamedTuple):
    """File format of SAEs: names of files, and the function that reads the settings.

    Args:
        name: name of the format, for error messages.
        weights: name of the weights file; a pattern if a folder has many, of which the user names one.
        configuration: name of the configuration file, "" for none; `{}` stands for the stem of the weights file.
        to_settings: function that returns the settings; None for a format that is not supported, whose `name` says why.
        transposed: names of tensors that are stored transposed, besides the weights of linear layers.
        optional: True if the configuration may be missing.
    """

    name: str
    weights: str | re.Pattern[str]
    configuration: str
    to_settings: Callable[[FoundSAE], SAESettings] | None
    transposed: frozenset[str] = frozenset()
    optional: bool = False


SAE_LENS: Final = SAEFormat("SAELens", "sae_weights.safetensors", "cfg.json", formats.sae_lens)
#: Formats with fixed file names, in the order of the search.
LAYOUTS: Final = (
    SAE_LENS,
    SAEFormat("Gemma Scope 2", "params.safetensors", "config.json", formats.gemma_scope_2, optional=True),
    SAEFormat("Gemma Scope", "params.npz", "", formats.gemma_scope),
    SAEFormat("Llama Scope R1", "sae_weights.safetensors", "config.json", layouts.llama_scope),
    SAEFormat("Llama Scope", "checkpoints/final.safetensors", "hyperparams.json", layouts.llama_scope),
    SAEFormat("dictionary_learning", "ae.pt", "config.json", layouts.dictionary_learning),
    SAEFormat("a temporal SAE, whose features depend on earlier tokens too", "latest_ckpt.safetensors", "", None),
    SAEFormat("an SAE of sparsify, whose published descriptions disagree", "sae.safetensors", "", None),
)
#: Formats of which a folder can have many weights files.
NAMED: Final = (
    SAEFormat("Qwen Scope", re.compile(r"layer\d+\.sae\.pt"), "", layouts.qwen_scope, frozenset({"W_enc", "W_dec"})),
    SAEFormat("mwhanna's", re.compile(r"layer_\d+\.safetensors"), "", layouts.mwhanna, frozenset({"W_enc"})),
    SAEFormat("Goodfire's and qresearch's", re.compile(r".+-SAE-l\d+\.pth?"), "", layouts.of_model),
    SAEFormat("Kissane's", re.compile(r".+Hcat_z.*\.pt"), "{}_cfg.json", layouts.kissane),
    SAEFormat(
        "a part of a cross-layer transcoder, whose features write at many layers",
        re.compile(r"(?:W_enc|W_dec|params_layer)_\d+\.safetensors"),
        "",
        None,
    ),
)
#: Pattern of repositories of cross-layer transcoders, which are not supported.
_CROSS_LAYER: Final = re.compile(r"(?:^|/)clt(?:-|/|$)")
_FILE: Final = re.compile(r".+\.(?:pth?|safetensors|npz)")


class SAEFiles(NamedTuple):
    """Files of an SAE, with their format; `configuration` is None if there is none."""

    layout: SAEFormat
    weights: Path
    configuration: Path | None


def find(source: str | os.PathLike[str], folder: str, revision: str | None) -> SAEFiles:
    """Find the files of an SAE in a folder or a repository on the hub; `folder` is a subfolder or one weights file.

    Raises:
        InvalidFile: there are none of a supported format, or `source` is neither a folder nor a repository's name.
        MissingExtra: `source` is no folder, and huggingface_hub is not installed.
    """
    path, named = Path(source), os.fspath(source)
    if path.is_file() and not folder:
        known = (str(one.weights) for one in LAYOUTS)
        folder = next((name for name in known if f"/{path.as_posix()}".endswith(f"/{name}")), path.name)
        path = path.parents[folder.count("/")]
    if path.is_dir():
        return _first(lambda name: path / name if (path / name).is_file() else None, folder, str(path / folder))
    if not isinstance(source, str) or named.startswith((".", "/", "~")) or named.count("/") != 1:
        raise InvalidFile(f"{named!r} is not a folder{nearest_path(named)}; give one, or a name on the hub: owner/name")
    place = f"{named}/{folder}" if folder else named
    where = f"{place} (as far as the hub, or its cache here, can be read)"
    if path.parent.is_dir():
        where += nearest_path(path)
    return _first(lambda name: _from_hub(named, name, revision), folder, where)


def _first(file: Callable[[str], Path | None], folder: str, where: str) -> SAEFiles:
    """Return the files of the first format that the source has; `folder` is a subfolder, or one weights file.

    Args:
        file: function that returns the local path of a file of the source, by name; None if it does not exist.
        where: description of the source, for error messages.

    Raises:
        InvalidFile: no format's files exist, or the format is not supported.
    """
    within, known = folder.rstrip("/").rpartition("/")[::2] if _FILE.fullmatch(folder) else (folder, "")
    for name in (str(layout.weights) for layout in LAYOUTS if "/" in str(layout.weights)):
        if f"/{folder}".endswith(f"/{name}"):
            within, known = folder[: -len(name)].rstrip("/"), name
    lacking = ""
    for layout in _candidates(known):
        weights = known or str(layout.weights)
        if (found := file(f"{within}/{weights}".lstrip("/"))) is None:
            continue
        if layout.to_settings is None:
            raise InvalidFile(f"{where} has {weights}, {layout.name}; steercap does not read that")
        wanted = layout.configuration.format(weights.rpartition(".")[0])
        beside = file(f"{within}/{wanted}".lstrip("/")) if wanted else None
        if beside is not None or not wanted or layout.optional:
            return SAEFiles(layout, found, beside)
        lacking = lacking or f"{where} has {weights}, but no {wanted} beside it"
    if lacking:
        raise InvalidFile(lacking)
    if _CROSS_LAYER.search(where.partition(" ")[0]):
        raise InvalidFile(f"{where} is a cross-layer transcoder, whose features write at many layers; it is not read")
    names = ", ".join(dict.fromkeys(str(one.weights) for one in LAYOUTS if one.to_settings))
    raise InvalidFile(
        f"{where} has none of {names}; if it holds several SAEs, name one, a folder or a file: SAE.load(source, folder)"
    )


def _candidates(name: str) -> Iterator[SAEFormat]:
    """Yield the formats that a weights file of this name may have; for "", those with fixed file names."""
    yield from (one for one in LAYOUTS if name in ("", one.weights))
    yield from (one for one in NAMED if isinstance(one.weights, re.Pattern) and one.weights.fullmatch(name))


def _from_hub(repository: str, name: str, revision: str | None) -> Path | None:
    """Return the local path of a file of a hub repository, downloaded if necessary.

    None if the repository has no such file, or if the hub cannot be reached and the file is not in the local cache.

    Raises:
        InvalidFile: the repository's name is invalid, the hub denies access or knows no such repository or revision, or
            the file cannot be stored.
    """
    with extra("cuda", "cpu"):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except LocalEntryNotFoundError:
        return None  # offline: another layout may be in the cache
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidFile(f"{repository}/{name} cannot be fetched from the hub: {reason}") from error


def read_found(files: SAEFiles, source: str, scale: float | None, centred: bool | None) -> tuple[SAESettings, SAEParts]:
    """Read and check the settings and tensors of an SAE from its files; `scale` and `centred` as of `SAE.load`.

    Raises:
        InvalidFile: see `SAE.load`.
    """
    layout, path = files.layout, files.weights
    assert layout.to_settings is not None
    reader = {".npz": read_npz, ".safetensors": read_safetensors}.get(path.suffix, read_pt_tensors)
    tensors = named(reader(path), layout.transposed)
    settings = layout.to_settings(FoundSAE(path, files.configuration, source, tensors, scale, flag_of(centred)))
    if layout is not SAE_LENS and (centred or (scale is not None and settings.scale != scale)):
        raise InvalidFile(
            f"{path}: files of {layout.name} already say how rows are scaled, and none takes centred rows; leave "
            "activation_scale= and centred= out"
        )
    return settings, parts_of(tensors, settings)
