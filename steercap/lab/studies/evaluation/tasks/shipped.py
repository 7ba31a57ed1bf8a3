"""Texts shipped with steercap, written for it and free of any data set."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TypeVar

import msgspec

from steercap.core.extras import extra

Kind = TypeVar("Kind")


@functools.cache
def read_shipped(name: str, kind: type[Kind]) -> Kind:
    """Read a YAML file of `steercap/lab/studies/evaluation/shipped`.

    Args:
        name: name of the file, without its suffix.
        kind: type to decode to.
    """
    with extra("experiments"):
        import yaml

    text = (resources.files("steercap.lab.studies.evaluation") / "shipped" / f"{name}.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), kind)
