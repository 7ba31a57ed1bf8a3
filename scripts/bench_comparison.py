"""Memory and minutes of a comparison of two checkpoints of a large model's shape, on random weights.

    python scripts/bench_comparison.py [--layers 42] [--hidden 3584] [--neurons 14336] [--json out.json]

The defaults are Gemma 2 9B's shape: 275 roles and 240 traits, ten components, layers 16 to 26 and 14 to 23. The files are
sparse: only those layers are written, some 5 GB each, and removed at the end. `anonymous` is what the process holds;
`resident` counts pages of the mapped files too, which the system can take back.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import steercap  # noqa: F401 -- fails early outside the environment
from steercap.lab.mechanism.comparison import compare
from steercap.lab.mechanism.weights import skeleton
from steercap.lab.mechanism.weights.model import ModelWeights
from steercap.steering import DirectionSet, LayerVectors

LAYER = 21


def config(options: argparse.Namespace) -> Any:
    """Gemma 2's configuration of these sizes."""
    from transformers import Gemma2Config

    return Gemma2Config(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.neurons,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        vocab_size=256_000,
        architectures=["Gemma2ForCausalLM"],
    )


def write(folder: Path, made: Any, seed: int, written: range) -> Path:
    """Write a checkpoint in bfloat16 whose layers `written` are random, and all else holes."""
    made.save_pretrained(folder)
    header, end = {}, 0
    for name, parameter in skeleton(made).named_parameters():
        size = 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)
        for name, one in header.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            if layer and int(layer[1]) in written:
                file.seek(8 + len(head) + one["data_offsets"][0])
                for _ in range(one["shape"][0]):
                    row = torch.randn(one["shape"][1:] or [1], generator=generator) * 0.02
                    file.write(row.bfloat16().view(torch.int16).numpy().tobytes())
    return folder


def vectors(hidden: int) -> dict[str, DirectionSet]:
    """275 roles and 240 traits, random."""
    generator = torch.Generator().manual_seed(0)
    return {
        group: DirectionSet(
            {f"{group} {at}": LayerVectors({LAYER: torch.randn(hidden, generator=generator)}) for at in range(count)}
        )
        for group, count in (("roles", 275), ("traits", 240))
    }


@contextmanager
def memory() -> Iterator[dict[str, float]]:
    """Sample the peak of the process's anonymous and resident memory in the block, in GiB."""
    peaks, done = {"anonymous": 0.0, "resident": 0.0}, threading.Event()

    def sample() -> None:
        while not done.wait(0.05):
            status = Path("/proc/self/status").read_text()
            for name, field in (("anonymous", "RssAnon"), ("resident", "VmRSS")):
                found = re.search(rf"{field}:\s+(\d+)", status)
                peaks[name] = max(peaks[name], int(found[1]) / 2**20 if found else 0.0)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def main() -> None:
    """Write both checkpoints, compare them, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 42), ("hidden", 3584), ("neurons", 14336)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as room:
        paths = [Path(room) / name for name in ("base", "instruct")]
        for seed, path in enumerate(paths):
            path.mkdir()
            write(path, config(options), seed, range(LAYER - 7, LAYER + 6))
        base, instruct = (ModelWeights.open(path) for path in paths)
        groups, begun = vectors(options.hidden), time.perf_counter()
        with memory() as peaks:
            found = compare(base, instruct, groups, LAYER, folder=Path(room) / "out")
        rows = {name: table.num_rows for name, table in found.tables.items()}
        report = {
            "minutes": (time.perf_counter() - begun) / 60,
            "gib": peaks,
            "rows": rows,
            "threads": torch.get_num_threads(),
        }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
