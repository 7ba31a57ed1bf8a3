"""Prove the architectures that steercap serves, on this machine: tiny models of each against transformers.

    python scripts/prove_models.py                    all, two at a time; writes proved.json and the page
    python scripts/prove_models.py --only granite     one or several, shown, and written with --keep

Each is opened as a user opens it, so the proof at start runs too; then rows at all its sites are compared with
transformers' for prompts that are chunked and generated tokens; so are edits: every operation somewhere, every site
somehow. What is refused is written with its reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import msgspec
import typer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention on CUDA in float32, else in TF32

from support.multimodal import BLIND, runnable
from support.published import TWINS

from steercap.architectures.families.proved import PATH, ProvedModel, markdown, records
from steercap.testing.architectures import ARCHITECTURES, FAMILY_CONFIGS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
#: Seconds for one of them; an engine takes 15 on a quiet machine.
PATIENCE = 600
MARK = "PROVED "


def in_process(name: str) -> dict[str, Any]:
    """The same in a process of its own, which can die or hang by itself."""
    command = [sys.executable, __file__, "--only", name, "--machine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "refused": f"not done after {PATIENCE} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {"name": name, "refused": f"the process ended with {done.returncode}: {done.stderr[-500:]}"}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def said(record: dict[str, Any]) -> str:
    """One line of one record."""
    if reason := record.get("refused"):
        return f"{record['name']:24} REFUSED {reason[:200]}"
    worst = max(record["rows"].values(), key=lambda same: same["error"])
    return (
        f"{record['name']:24} {record['family'] or 'derived':12} {' '.join(record['sites'])}: rows "
        f"{worst['error']:.1e}, edits {max(record['edits'].values(), default=0):.1e}, lens {record['lens']:.1e}"
    )


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names; all by default.")] = None,
    together: Annotated[int, typer.Option(help="Engines at once.")] = 2,
    keep: Annotated[
        bool | None, typer.Option(help="Write the records, beside those of other names; by default if all are run.")
    ] = None,
    machine: Annotated[bool, typer.Option(help="Print a record for the process that asked.", hidden=True)] = False,
) -> None:
    """Prove them."""
    if machine and only:
        from support.proving import prove

        print(MARK + json.dumps(asyncio.run(prove(only[0]))), flush=True)
        return
    names = only or list(dict.fromkeys([*FAMILY_CONFIGS, *ARCHITECTURES, *TWINS, *runnable(), *BLIND]))
    refused = 0
    with ThreadPoolExecutor(together) as pool:
        for done in as_completed([pool.submit(in_process, name) for name in names]):
            record = done.result()
            print(said(record), flush=True)
            refused += "refused" in record
            if keep or (keep is None and not only):
                put(record)
    sys.exit(bool(refused) if only else 0)


def put(found: dict[str, Any]) -> None:
    """Write a record in place of the one of its name and device, and the tables of the page."""
    new = msgspec.convert(found, ProvedModel)
    others = [one for one in records() if (one.name, one.device) != (new.name, new.device)]
    every = sorted([*others, new], key=lambda one: (one.name, one.device))
    PATH.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, every)) + b"\n]\n")  # a line each
    records.cache_clear()
    page = PAGE.read_text()
    before, _, rest = page.partition("<!-- proved -->\n")
    _, _, after = rest.partition("<!-- /proved -->")
    PAGE.write_text(f"{before}<!-- proved -->\n{markdown(records())}<!-- /proved -->{after}")


if __name__ == "__main__":
    typer.run(main)
