"""A run over roles that kills itself: `python roles_run.py CHECKPOINT FOLDER STAGE DONE`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

from support.rows import TINY_ENGINE

from steercap import Progress, SteerModel
from steercap.lab.personas.roles import Role, RoleSet, RoleSettings, run_roles
from steercap.testing import tiny_checkpoint

TEMPLATE = "{% for one in messages %}{{ one.role[0] }}:{{ one.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
ROLES = RoleSet(
    tuple(Role(name, (f"be a {name}", f"you are a {name}")) for name in ("pirate", "poet", "ghost", "king", "monk")),
    ("who?", "what?", "when?", "where?", "why?", "how?"),
    ("", "be helpful"),
)
#: 72 answers of eight tokens, in parts that hold a few of them each.
SETTINGS = RoleSettings.small(ROLES, n_questions=6, max_tokens=8, min_kept=2, concurrency=16)


def checkpoint(folder: Path) -> Path:
    """The tiny model with a template for chats."""
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def engine(path: str | Path) -> SteerModel:
    return SteerModel(str(path), **TINY_ENGINE)


async def main(path: str, folder: str, stage: str, done: int) -> None:
    def kill(report: Progress) -> None:
        if report.stage == stage and report.done >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    async with engine(path) as model:
        await run_roles(model, SETTINGS, folder, progress=kill)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
