"""Activations to disk, shuffled batches from disk, and live batches, beside SAELens's and TransformerLens's own.

    python scripts/bench_datasets.py --others out/lenses --tokens 8192 --rounds 2 --json out/datasets.json

SmolLM2 in float32 on this CPU, the same documents (token ids, all of the context's length), the same layer, everything in
one process each, one after another; a round runs all of them once. `--others` is a folder into which SAELens and
TransformerLens were installed (`pip install --no-deps --target`); without it only ours run.

What is run of theirs, as they have it, and what was needed for it:

- SAELens: `ActivationsStore` over `HookedProxyLM`, its own wrapper of a transformers model (`AutoModelForCausalLM`), since
  SmolLM2 is not among TransformerLens's models; one layer is hooked. Live is `next_batch`; to disk is its
  `CacheActivationsRunner`; from disk is the store with `cached_activations_path`. The model runs to its end there.
- TransformerLens: it has no store. `run_with_cache` with a filter of names, stopped behind the layer, is what its users
  write to disk with; SmolLM2's path is appended to its list of names, and the weights are converted by its own code. Rows
  go to one `.pt` file a batch, without labels, statistics, hashes or fsync.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYER, WIDTH = 15, 576
#: Seconds for which batches are taken, where they could be taken for ever.
SECONDS = 6.0


def documents(tokens: int, context: int, seed: int) -> list[list[int]]:
    """Random token ids: what a forward pass costs does not depend on them."""
    import numpy as np

    drawn: list[list[int]] = np.random.default_rng(seed).integers(100, 40_000, (tokens // context, context)).tolist()
    return drawn


def rate(work: Callable[[], int], side: Any) -> float:
    """Tokens a second of something that says how many it read."""
    side.began = time.perf_counter()
    count = work()
    return count / float(time.perf_counter() - side.began)


class Ours:
    """steercap, without await."""

    def __init__(self, ask: argparse.Namespace) -> None:
        from steercap.lab.demo import smollm2
        from steercap.sync import SteerModel

        cores = sorted(os.sched_getaffinity(0))  # all, as torch takes for theirs; vLLM would leave one free
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        self.ask = ask
        self.model = SteerModel(smollm2(), preset="cpu", use_tqdm_on_load=False).start()

    def to_disk(self, ids: list[list[int]], where: Path) -> int:
        from steercap.sync import collect

        return int(collect(self.model, ids, where, layers=LAYER, context=self.ask.context).totals.tokens)

    def from_disk(self, where: Path) -> int:
        from steercap.lab.datasets import ActivationDataset

        batches = ActivationDataset(where).batches(self.ask.batch, buffer=self.ask.buffer, epochs=100_000)
        began, count = time.perf_counter(), 0
        for batch in batches:
            count += len(batch)
            if time.perf_counter() - began > SECONDS:
                break
        return count

    def live(self, ids: list[list[int]]) -> int:
        from steercap.sync import activations

        how: dict[str, Any] = {"context": self.ask.context, "batch_size": self.ask.batch, "buffer": self.ask.buffer}
        return sum(len(batch) for batch in activations(self.model, ids, layers=LAYER, **how))

    def close(self) -> None:
        self.model.close()


class SAELens:
    """Its `ActivationsStore`, and what it caches activations with."""

    def __init__(self, ask: argparse.Namespace) -> None:
        import torch
        from sae_lens.load_model import load_model

        from steercap.lab.demo import smollm2

        self.ask, self.path, self.hook = ask, str(smollm2()), f"model.layers.{LAYER}"
        self.given = {"dtype": torch.float32}
        self.model = load_model("AutoModelForCausalLM", self.path, "cpu", self.given, hook_names=[self.hook])

    def store(self, ids: list[list[int]], cached: Path | None = None) -> Any:
        import torch
        from datasets import Dataset
        from sae_lens import ActivationsStore

        return ActivationsStore(
            self.model,
            Dataset.from_dict({"input_ids": ids}),
            streaming=False,
            hook_name=self.hook,
            hook_head_index=None,
            context_size=self.ask.context,
            d_in=WIDTH,
            n_batches_in_buffer=self.ask.buffer // self.ask.context,  # of rows of one context each
            total_training_tokens=self.ask.tokens,
            store_batch_size_prompts=self.ask.prompts,
            train_batch_size_tokens=self.ask.batch,
            prepend_bos=False,
            normalize_activations="none",
            device=torch.device("cpu"),
            dtype="float32",
            cached_activations_path=None if cached is None else str(cached),
        )

    def to_disk(self, ids: list[list[int]], where: Path) -> int:
        from datasets import Dataset
        from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

        config = CacheActivationsRunnerConfig(
            dataset_path="none",
            model_name=self.path,
            model_class_name="AutoModelForCausalLM",
            model_from_pretrained_kwargs=self.given,
            model_batch_size=self.ask.prompts,
            hook_name=self.hook,
            d_in=WIDTH,
            training_tokens=self.ask.tokens,
            context_size=self.ask.context,
            prepend_bos=False,
            new_cached_activations_path=str(where),
            buffer_size_gb=self.ask.buffer * WIDTH * 4 / 1e9,
            shuffle=False,
            streaming=False,
        )
        runner = CacheActivationsRunner(config, override_dataset=Dataset.from_dict({"input_ids": ids}))
        runner.model = runner.activations_store.model = self.model  # which hooks one layer and not all modules
        self.began = time.perf_counter()  # loading the model is not timed
        runner.run()
        return int(self.ask.tokens)

    def from_disk(self, where: Path) -> int:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            store = self.store([[0] * self.ask.context] * 4, where)
            for _ in range(max(1, self.ask.tokens // self.ask.batch - 1)):
                count += len(store.next_batch())
        return count

    def live(self, ids: list[list[int]]) -> int:
        store = self.store(ids)
        return sum(len(store.next_batch()) for _ in range(self.ask.tokens // self.ask.batch))

    def close(self) -> None:
        pass


class TransformerLens:
    """`run_with_cache`, and a file a batch: it has no store."""

    def __init__(self, ask: argparse.Namespace) -> None:
        import torch
        from transformer_lens import HookedTransformer, loading_from_pretrained
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from steercap.lab.demo import smollm2

        path = str(smollm2())
        loading_from_pretrained.OFFICIAL_MODEL_NAMES.append(path)
        self.ask, self.hook = ask, f"blocks.{LAYER}.hook_resid_post"
        self.model = HookedTransformer.from_pretrained_no_processing(
            path,
            hf_model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            tokenizer=AutoTokenizer.from_pretrained(path),
            dtype=torch.float32,
            device="cpu",
        )

    def to_disk(self, ids: list[list[int]], where: Path) -> int:
        import torch

        where.mkdir(parents=True)
        for start in range(0, len(ids), self.ask.prompts):
            tokens = torch.tensor(ids[start : start + self.ask.prompts])
            with torch.no_grad():
                _, cache = self.model.run_with_cache(
                    tokens, names_filter=self.hook, stop_at_layer=LAYER + 1, return_type=None, prepend_bos=False
                )
            torch.save(cache[self.hook].flatten(0, 1).clone(), where / f"{start:06}.pt")
        return int(self.ask.tokens)

    def close(self) -> None:
        pass


SIDES: dict[str, Any] = {"steercap": Ours, "SAELens": SAELens, "TransformerLens": TransformerLens}


def measured(ask: argparse.Namespace, name: str, folder: Path) -> list[dict[str, float]]:
    """Tokens a second of each kind of work, by round; the first is to warm up and left out."""
    side = SIDES[name](ask)
    found = []
    for number in range(ask.rounds + 1):
        where = folder / f"{name}{number}"
        kinds: dict[str, Callable[[], int]] = {
            "to disk": partial(side.to_disk, documents(ask.tokens, ask.context, number), where)
        }
        if name != "TransformerLens":
            kinds["from disk"] = partial(side.from_disk, where)
            kinds["live"] = partial(side.live, documents(ask.tokens, ask.context, 100 + number))
        found.append({kind: rate(work, side) for kind, work in kinds.items()})
    side.close()
    return found[1:]


def _in_process(ask: argparse.Namespace, name: str, folder: str, out: Any) -> None:
    if ask.others:
        sys.path.insert(1, ask.others)
    try:
        out.put((measured(ask, name, Path(folder)), ""))
    except Exception as error:  # noqa: BLE001 -- the others are measured all the same
        traceback.print_exc()
        out.put(([], f"{type(error).__name__}: {error}"))


def run_side(ask: argparse.Namespace, name: str, folder: Path) -> tuple[list[dict[str, float]], str]:
    """One side in a process of its own: engines and libraries do not meet."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=_in_process, args=(ask, name, str(folder), out))
    process.start()
    found, error = out.get()
    process.join()
    return found, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", default="")
    parser.add_argument("--only", choices=SIDES, action="append")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--buffer", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a forward pass of theirs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    ask = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-datasets-"))
    results = {}
    try:
        for name in ask.only or (SIDES if ask.others else ["steercap"]):
            found, error = run_side(ask, name, folder)
            results[name] = found
            for key in found[0] if found else ():
                rates = ", ".join(f"{one[key]:,.0f}" for one in found)
                print(f"{name:16s} {key:10s} {rates} tokens/s", flush=True)
            if error:
                print(f"{name}: {error}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if ask.json:
        ask.json.parent.mkdir(parents=True, exist_ok=True)
        ask.json.write_text(json.dumps({**vars(ask), "json": str(ask.json), "results": results}, indent=2))


if __name__ == "__main__":
    main()
