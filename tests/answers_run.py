"""A reading of answers that exist that kills itself: `python answers_run.py CHECKPOINT FOLDER DONE`; `write_data` writes the answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from support.rows import TINY_ENGINE

from steercap import Progress, SteerModel
from steercap.lab.personas import read_answers

PERSONAS = ("default", "ghost", "pirate")


def conversations(seed: int, many: int = 20) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Answers of roles: conversations by persona and key, some with a system prompt, some with several turns."""
    rng, found = random.Random(seed), {}
    words = ["sea", "ghost", "gold", "night", "ship", "and", "the", "old", "map", "of", "a", "quiet", "storm"]
    for name in PERSONAS:
        found[name] = mine = {}
        for place in range(many):
            system = [{"role": "system", "content": f"be a {name}"}] if place % 3 else []
            turns = []
            for _ in range(1 + place % 2):
                turns += [{"role": "user", "content": f"{rng.choice(words)}?"}]
                turns += [{"role": "assistant", "content": " ".join(rng.choices(words, k=rng.randint(1, 9)))}]
            label = "default" if name == "default" else "pos"
            mine[f"{label}_p{place // 5}_q{place % 5}"] = [*system, *turns]
    return found


def scores_of(name: str, keys: list[str]) -> dict[str, Any]:
    rng = random.Random(name)
    return {key: rng.choice([0, 1, 2, 3, 3, "REFUSAL"]) for key in keys}


def write_data(folder: Path, seed: int = 0) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Write answers and scores, and return the conversations by persona and key."""
    found = conversations(seed)
    for part in ("responses", "extract_scores"):
        (folder / part).mkdir(parents=True)
    for name, mine in found.items():
        with (folder / "responses" / f"{name}.jsonl").open("w") as file:
            for key, talk in mine.items():
                label, prompt, question = key.split("_")
                indices = {"prompt_index": int(prompt[1:]), "question_index": int(question[1:])}
                file.write(json.dumps({"conversation": talk, "label": label, **indices}) + "\n")
        if name != "default":
            (folder / "extract_scores" / f"{name}.json").write_text(json.dumps(scores_of(name, list(mine))))
    return found


async def main(path: str, folder: Path, done: int) -> None:
    def kill(report: Progress) -> None:
        if report.done >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    async with SteerModel(path, **TINY_ENGINE) as model:
        given = (folder / "responses", folder / "extract_scores", folder / "out")
        await read_answers(model, *given, kind="role", minimum=2, concurrency=1, progress=kill)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
