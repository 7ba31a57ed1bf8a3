"""The files of an SAE, in a folder or from the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from steercap.core.extras import extra
from steercap.errors import InvalidFile
from steercap.saes import gemma_scope, sae_lens

#: Weights and the configuration beside them, if there is one, in the order in which they are looked for.
LAYOUTS: Final = (
    (sae_lens.WEIGHTS, sae_lens.CONFIGURATION),
    (gemma_scope.WEIGHTS, gemma_scope.CONFIGURATION),
    (gemma_scope.ARRAYS, None),
)


class Found(NamedTuple):
    """Where an SAE lies.

    Args:
        weights: the file of its tensors.
        configuration: the file beside it; None where its format has none.
    """

    weights: Path
    configuration: Path | None


def find(source: str | os.PathLike[str], folder: str, revision: str | None) -> Found:
    """The files of an SAE.

    Args:
        source: a folder, or the name of a repository on the hub.
        folder: within it.
        revision: of the repository.

    Raises:
        InvalidFile: there are none.
        MissingExtra: `source` is no folder, and huggingface_hub is not installed.
    """
    path = Path(source)
    if path.is_dir():
        place = path / folder
        return _first(lambda name: place / name if (place / name).is_file() else None, str(place))
    named = os.fspath(source)
    if not isinstance(source, str) or named.startswith((".", "/", "~")) or named.count("/") != 1:
        raise InvalidFile(f"{named!r} is no folder; give one, or the name of a repository on the hub: owner/name")
    where = f"{named}/{folder}".rstrip("/") + " (as far as the hub, or its cache here, can be read)"
    return _first(lambda name: _from_hub(named, f"{folder}/{name}".lstrip("/"), revision), where)


def _first(file: Callable[[str], Path | None], place: str) -> Found:
    """The first layout whose files are there.

    Raises:
        InvalidFile: none is.
    """
    for weights, configuration in LAYOUTS:
        found = file(weights)
        if found is None:
            continue
        beside = None if configuration is None else file(configuration)
        if configuration is not None and beside is None:
            raise InvalidFile(f"{place} has {weights}, but no {configuration} beside it")
        return Found(found, beside)
    known = ", ".join(weights for weights, _ in LAYOUTS)
    raise InvalidFile(f"{place} has none of {known}; if it holds several SAEs, name one: SAE.load(source, folder)")


def _from_hub(repository: str, name: str, revision: str | None) -> Path | None:
    """A file of a repository, out of the cache where it is there; None where the repository has none of the name.

    Raises:
        InvalidFile: it is not in the cache, and cannot be fetched.
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
        raise InvalidFile(f"{repository}/{name} cannot be had from the hub: {reason}") from error
