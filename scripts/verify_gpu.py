"""Right and wrong on a CUDA machine, in one process: engines start together, and checks share them.

    python scripts/verify_gpu.py [--only parity,stress] [--json out.json] [--smollm2 PATH] [--gpus 2]

Every check prints a line with PASS or FAIL and its figures as it ends; the exit code is 1 if any failed. Engines are
tiny random checkpoints served with vLLM's defaults (compiled, CUDA graphs, async scheduling, Model Runner V2, prefix
caching, chunks); the reference is transformers in float32 on CPU. `--device cpu` runs the same checks on eager CPU
engines, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import typer
from rich.console import Console
from rich.markup import escape

console = Console(highlight=False, soft_wrap=True)


def environment(device: str) -> None:
    """Variables that must be set before vllm, torch and Triton are imported, here and in the workers."""
    cuda = {
        # FlashAttention takes 16 bits only: float32 runs in vLLM's Triton attention, whose dots are TF32 by default.
        "TRITON_F32_DEFAULT": "ieee",
        # NVLink multicast can put the GPUs of a host that others share out of service.
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TOKENIZERS_PARALLELISM": "false",
        **(cuda if device == "cuda" else {}),
    }.items():
        os.environ.setdefault(name, value)


def show(name: str, result: dict[str, Any]) -> None:
    """One line a check."""
    colour = {"PASS": "green", "FAIL": "red", "SKIP": "yellow"}[result["verdict"]]
    parts = [f"{key}: {_short(value)}" for key, value in result["figures"].items()]
    if result["error"]:  # whole in the JSON
        parts.insert(0, f"[red]{escape(' '.join(result['error'].split())[:1500])}[/red]")
    console.print(f"[{colour}]{result['verdict']}[/{colour}] {name} ({result['seconds']} s) ", "; ".join(parts), sep="")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(one)}" for key, one in value.items())
    return escape(str(value))


async def judged(name: str, run: Any, seconds: float) -> dict[str, Any]:
    """Run one check; whatever it raises is its result."""
    from verification.checks import CHECKS

    check, figures, error, start = CHECKS[name], dict[str, Any](), "", time.perf_counter()
    unfit = check.unfit(run.machine)
    if not unfit:
        try:
            async with asyncio.timeout(seconds):
                await check.run(run, figures)
        except TimeoutError:
            error = f"did not end within {seconds:.0f} s"
        except Exception as raised:  # noqa: BLE001 -- one check must not stop the others
            last = traceback.extract_tb(raised.__traceback__)[-1]
            error = f"{type(raised).__name__}: {raised} ({Path(last.filename).name}:{last.lineno}: {last.line})"
    verdict = "SKIP" if unfit else "FAIL" if error else "PASS"
    took = round(time.perf_counter() - start, 1)
    return {"verdict": verdict, "seconds": took, "figures": figures, "error": error or unfit}


async def verify(names: list[str], run: Any, together: bool, limit: float, out: Path | None) -> bool:
    """Run checks, those that must be alone last; whether none failed."""
    from verification.checks import CHECKS

    start, results, engines = time.perf_counter(), dict[str, Any](), run.engines
    fit = [name for name in names if not CHECKS[name].unfit(run.machine)]
    for name in fit:
        engines.expect(CHECKS[name].engines(run))

    async def one(name: str) -> None:
        results[name] = await judged(name, run, max(1.0, limit - (time.perf_counter() - start)))
        show(name, results[name])
        if out:
            written = {"device": run.machine.device, "start seconds": engines.seconds, "checks": results}
            out.write_text(json.dumps(written, indent=2, default=str))
        if name in fit:
            await engines.let_go(CHECKS[name].engines(run))

    beside = [name for name in names if not CHECKS[name].alone]
    try:
        if together:
            engines.start_all()
            await asyncio.gather(*(one(name) for name in beside))
        else:
            for name in beside:
                await one(name)
        for name in names:
            if CHECKS[name].alone:
                await one(name)
    finally:
        await engines.aclose()
    console.print("engine starts, seconds:", json.dumps(engines.seconds), f"all: {time.perf_counter() - start:.0f} s")
    return all(result["verdict"] != "FAIL" for result in results.values())


def main(
    only: Annotated[str, typer.Option(help="Checks to run, by name, with commas between; all by default.")] = "",
    out: Annotated[Path | None, typer.Option("--json", help="Write results here, after every check.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda if there is one.")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs that may be used; `parallel` needs 2.")] = 1,
    share: Annotated[float, typer.Option(help="gpu_memory_utilization of each engine.")] = 0.06,
    starts: Annotated[int, typer.Option(help="Engines that may start at once.")] = 6,
    requests: Annotated[int, typer.Option(help="Requests of `memory`; 10,000 on CUDA, 500 on CPU by default.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds after which what has not ended has failed.")] = 3600,
    smollm2: Annotated[Path | None, typer.Option(help="A checkpoint of SmolLM2, for `bf16`.")] = None,
    all_families: Annotated[bool, typer.Option(help="All ten families, not llama, qwen3 and gemma2 alone.")] = False,
    together: Annotated[
        bool | None, typer.Option(help="Start engines and run checks side by side; on CUDA by default.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks and end.")] = False,
) -> None:
    """Show right and wrong on this machine; exit code 1 if any check failed."""
    if not device:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    environment(device)
    from verification.checks import CHECKS, FAMILY_NAMES, Run
    from verification.engines import Engines, Machine, register_metrics_one_engine_at_a_time

    if list_:
        for name, check in CHECKS.items():
            console.print(f"[bold]{name}[/bold]", escape(" ".join((check.run.__doc__ or "").split())))
        return
    names = [name.strip() for name in only.split(",") if name.strip()] or list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        raise typer.BadParameter(f"unknown checks {unknown}; known: {', '.join(CHECKS)}")
    cuda = device == "cuda"
    families = FAMILY_NAMES if all_families else ("llama", "qwen3", "gemma2")
    register_metrics_one_engine_at_a_time()

    async def run_all() -> bool:
        machine = Machine(device, gpus, share, smollm2)
        run = Run(machine, Engines(machine, starts), families, requests or (10_000 if cuda else 500))
        return await verify(names, run, together=cuda if together is None else together, limit=limit, out=out)

    raise typer.Exit(code=0 if asyncio.run(run_all()) else 1)


if __name__ == "__main__":  # vLLM's processes import the script again
    typer.run(main)
