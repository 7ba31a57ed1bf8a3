r"""An agent of Inspect AI, unmodified, over a server of steercap: it calls a tool, is steered, and its rows wait.

    steercap serve --vectors calm=calm.safetensors --preset calm=calm \
        -- --enable-auto-tool-choice --tool-call-parser hermes
    pip install inspect_ai openai httpx          # in an environment of its own
    python scripts/inspect_agent.py [--model smollm2+calm] [--url http://127.0.0.1:8000/v1]

Inspect knows nothing of steercap: `--model` is a preset's name or the model's own, and the capture goes in the
`extra_body` of its `GenerateConfig`. Prints what the agent did and which captures wait.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Literal

import httpx
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool, GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

POPULATION = {"Paris": "2,102,650", "Rome": "2,748,109", "Oslo": "709,037"}
CAPTURE = {"capture": {"layers": [-1], "tokens": "generated", "codec": "full8"}}


@tool
def population() -> Tool:
    """Population of a city."""

    async def execute(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """How many people live in a city.

        Args:
            city: its name.
        """
        return POPULATION[city]

    return execute


def main() -> None:
    """Run the agent on three questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    asked = parser.parse_args()
    os.environ |= {"STEERCAP_BASE_URL": asked.url, "STEERCAP_API_KEY": asked.api_key}
    task = Task(
        dataset=[Sample(input=f"How many people live in {city}?", target=count) for city, count in POPULATION.items()],
        solver=[use_tools(population(), tool_choice="any"), generate(tool_calls="single")],
        scorer=includes(),
        config=GenerateConfig(temperature=0.0, max_tokens=60, extra_body={"steercap": CAPTURE}),
    )
    (log,) = evaluate(task, model=f"openai-api/steercap/{asked.model}", log_dir="out/inspect", display="none")
    if log.status != "success":
        raise SystemExit(f"Inspect: {log.error}")
    for sample in log.samples or []:
        calls = [call.arguments for one in sample.messages for call in getattr(one, "tool_calls", None) or ()]
        answers = [one.text for one in sample.messages if isinstance(one, ChatMessageTool)]
        print(sample.input, "->", *zip(calls, answers, strict=False))
    print("captures that wait:", waiting(asked.url, asked.api_key))


def waiting(url: str, key: str) -> list[dict[str, Any]]:
    """The captures of this key."""
    answer = httpx.get(f"{url}/steercap/captures", headers={"Authorization": f"Bearer {key}"})
    found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
    return found


if __name__ == "__main__":
    main()
