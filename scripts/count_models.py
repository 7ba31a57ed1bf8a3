"""Count how the architectures that the installed vLLM registers for text would be served, by the code alone.

    python scripts/count_models.py              shown, with the numbers
    python scripts/count_models.py --keep       and written to docs/models.md
    python scripts/count_models.py --derive     tiny models: their sites derived with the family hidden, beside its own

With --derive each tiny model is built in this process, without an engine, and its derived paths are compared with those
of its family. A path is right if it is the family's, or if its module's output is that of the family's bit for bit.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import beside_tests  # noqa: F401 -- support is there
import typer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from steercap.adapters.releases import installed, registered
from steercap.cli.models import Standing, standing_of
from steercap.testing import tiny_checkpoint
from steercap.testing.architectures import ARCHITECTURES, ENGINES, FAMILY_CONFIGS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SAID = {
    "proved": "all sites that steercap taps in them, compared with transformers",
    "known": "all sites that they have by a family; the proof at start decides",
    "derived": "the sites that a start derives and proves",
    "refused": "refused",
    "unknown": "not known",
}


def standings() -> list[Standing]:
    """Each text-generation architecture of the installed vLLM."""
    return [standing_of(name) for name, tables in sorted(registered().items()) if "text_generation" in tables]


def markdown(found: list[Standing]) -> str:
    """A row for each state, with the number and names."""
    lines = [f"vLLM {installed()} registers {len(found)} architectures for text alone:", ""]
    lines += ["| served with | number | architectures |", "|---|---|---|"]
    for state, said in SAID.items():
        if names := [one.architecture for one in found if one.state == state]:
            lines.append(f"| {said} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def derived(name: str) -> dict[str, Any]:
    """The sites of one tiny model with its family hidden: those that are the family's, others, and those refused."""
    from support.deriving import built, derivations, named, paths_of

    arguments = {key: value for key, value in ENGINES.get(name, {}).items() if key in {"dtype", "model_impl"}}
    with built(tiny_checkpoint(name), **arguments) as (runner, decoder):
        known, family = named(decoder)
        tried = derivations(runner, decoder)
        found, _ = next((one for one in tried if one[0].residual_output == family.residual_output), tried[0])
        counts: dict[str, set[str]] = {"same": set(), "more": set(), "refused": set(), "other": set()}
        for layer in decoder.layers.values():
            ours, theirs = paths_of(layer, found), paths_of(layer, family)
            for site in ours:
                if ours[site] or theirs[site]:
                    missing, new = not ours[site], not theirs[site]
                    same = "same" if ours[site] == theirs[site] else "other"
                    counts["refused" if missing else "more" if new else same].add(site)
    return {"family": known, **{kind: sorted(sites) for kind, sites in counts.items()}}


def main(
    only: Annotated[list[str] | None, typer.Option(help="With --derive: names of tiny models; all by default.")] = None,
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Write the table to docs/models.md.")] = False,
    derive: Annotated[bool, typer.Option("--derive", help="Derive the sites of tiny models.")] = False,
) -> None:
    """Count them."""
    if derive:
        for name in only or [*FAMILY_CONFIGS, *ARCHITECTURES]:
            try:
                row = derived(name)
            except Exception as error:  # noqa: BLE001 -- a model that this build cannot make is a line of the table
                row = {"failed": f"{type(error).__name__}: {str(error)[:120]}"}
            print(name, " ".join(f"{key}={','.join(v) if isinstance(v, list) else v}" for key, v in row.items() if v))
            sys.stdout.flush()
        return
    found = standings()
    print(dict(Counter(one.state for one in found)))
    print(markdown(found))
    if keep:
        before, _, rest = PAGE.read_text().partition("<!-- registered -->\n")
        PAGE.write_text(f"{before}<!-- registered -->\n{markdown(found)}{rest[rest.index('<!-- /registered -->') :]}")


if __name__ == "__main__":
    typer.run(main)
