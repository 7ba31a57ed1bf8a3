"""How tests call the command, and files to call it with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from steercap.captures.handle import CaptureHandle
from steercap.captures.lifecycle import Lifecycle
from steercap.captures.rows import Captures, Found
from steercap.cli.app import app
from steercap.core.receipt import Receipt
from steercap.core.spec import Point
from steercap.steering import DirectionSet, LayerVectors, Provenance


def call(*arguments: str | Path, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def shell(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steercap", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def vectors(seed: int = 0, layers=range(4), width: int = 8, **labels: str) -> LayerVectors:
    generator = torch.Generator().manual_seed(seed)
    return LayerVectors({layer: torch.randn(width, generator=generator) for layer in layers}, **labels)


@pytest.fixture
def directions(tmp_path) -> Path:
    known = Provenance(
        method="difference",
        tokens="all",
        rows={"kind": (6, 6)},
        held_out={"kind": (2, 2)},
        auc={"kind": {0: 0.5, 1: 0.75, 2: 1.0, 3: 0.9}},
        row_norms={"kind": dict.fromkeys(range(4), 10.0)},
    )
    found = DirectionSet({"kind": vectors(0, model="tiny"), "formal": vectors(1, model="tiny")}, known)
    return found.save(tmp_path / "traits.safetensors")


def captured(path: Path) -> Path:
    points = (Point(1, "resid_post"), Point(3, "resid_post"))
    captures = Captures({point: torch.randn(4, 8) for point in points}, 4)
    receipt = Receipt(points, torch.arange(4).numpy(), torch.tensor([5, 6, 7, 8]).numpy(), 4, None)
    handle = CaptureHandle(
        request_id="r-1",
        model="tiny",
        text="there",
        prompt_token_ids=[5, 6, 7],
        output_token_ids=[8, 9],
        points=points,
        num_layers=4,
        lifecycle=Lifecycle("r-1", found=Found(captures, receipt)),
    )
    return handle.save(path)
