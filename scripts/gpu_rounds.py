"""What `bench_gpu.py` runs in which order, and what its times say; pure, so that it is tested without an engine."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

BASE = "base"
#: Plain vLLM once more, measured against the base runs around it as every mode is: what this machine cannot tell.
CONTROL = "control"
MODES = (
    CONTROL,
    "idle",
    "capture-one",
    "capture-all",
    "capture-mean",
    "capture-project",
    "capture-full8",
    "steer-1",
    "steer-8",
    "steer-64",
    "steer-256",
    "steer-each",
)
#: Run where they are asked for alone: their site is armed then, and costs every other mode a little.
NEURONS = ("capture-neurons", "capture-neurons-topk8")
#: The same, of what heads give.
HEADS = "capture-z"
#: Codecs of the stream that a mode may name.
CODECS = ("full8", "fp8", "int4", "rp8", "rp16")
#: Per cent above plain vLLM that we allow ourselves on one H200 with the shapes of a model; "steer-each" is a spec for
#: each request, and "~" those of requests that arrive as others end.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "qwen3-8b": {"idle": 0.5, "capture-all": 2.5, "steer-1": 1.5, "steer-each": 2.0},
    "qwen3-8b~": {"idle": 0.5, "capture-all": 4.0, "steer-1": 3.0, "steer-each": 3.0},
    "qwen3-8b-tp2": {"idle": 0.5, "capture-all": 3.0, "steer-1": 2.0, "steer-each": 2.5},
    "qwen3-8b-ngram_gpu": {"idle": 0.5, "capture-all": 2.5, "steer-1": 1.5, "steer-each": 2.0},
    "qwen3-8b-ngram_gpu~": {"idle": 0.5, "capture-all": 4.0, "steer-1": 3.0, "steer-each": 3.0},
    "qwen3-0.6b": {"idle": 1.0, "capture-all": 6.0, "steer-1": 4.0, "steer-each": 5.0},
}


#: How many requests arrive in all, over those under way, where they arrive as others end.
TURNS = 3


@dataclass(frozen=True)
class Workload:
    """`requests` at once, each of `prompt` tokens in and `generated` tokens out; written "64x128+200".

    Written "64~128+200", `TURNS` times 64 requests, each a call of its own that begins when one of the 64 under way
    ends, with lengths of half to one and a half times these: a batch that changes at nearly every pass.

    Args:
        under_way: most requests at once where they arrive one by one; 0 where all arrive together.
    """

    requests: int
    prompt: int
    generated: int
    under_way: int = 0

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read "64x128+200" or "64~128+200".

        Raises:
            ValueError: another form.
        """
        found = re.fullmatch(r"(\d+)([x~])(\d+)\+(\d+)", text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is not a workload; write REQUESTSxPROMPT+GENERATED, such as 64x128+200, or with ~ for x"
            )
        count, arriving = int(found[1]), found[2] == "~"
        return cls(count * (TURNS if arriving else 1), int(found[3]), int(found[4]), count if arriving else 0)

    def __str__(self) -> str:
        count = f"{self.under_way}~" if self.under_way else f"{self.requests}x"
        return f"{count}{self.prompt}+{self.generated}"

    @cached_property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Tokens in and tokens out of each request."""
        if not self.under_way:
            return ((self.prompt, self.generated),) * self.requests
        drawn = random.Random(0)
        return tuple(
            (drawn.randint(-(-prompt // 2), 3 * prompt // 2), drawn.randint(-(-generated // 2), 3 * generated // 2))
            for prompt, generated in ((self.prompt, self.generated),) * self.requests
        )

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each request at one point: the last sampled token is never an input."""
        return tuple(prompt + generated - 1 for prompt, generated in self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens in and out, all requests together."""
        return sum(map(sum, self.lengths))


@dataclass(frozen=True)
class Mode:
    """What is asked of steercap.

    Args:
        capture: rows of "one" layer or of "all", at all layers their "mean", what they are along directions
            ("project"), in a codec, or "z" or the "neurons", these whole or in "topk8"; None for none.
        specs: how many different specs steer.
    """

    capture: str | None = None
    specs: int = 0

    @classmethod
    def parse(cls, name: str) -> Mode:
        """Read "idle", "capture-" and one of the captures, or "steer-K".

        Raises:
            ValueError: another name.
        """
        captures = "|".join(("one", "all", "mean", "project", "z", "neurons", "neurons-topk8", *CODECS))
        found = re.fullmatch(rf"idle|capture-({captures})|steer-([1-9]\d*)", name)
        if found is None:
            known = ", ".join(dict.fromkeys((*MODES, *NEURONS, HEADS, *(f"capture-{codec}" for codec in CODECS))))
            raise ValueError(f"no mode {name!r}; modes: {known}, and steer-K for any K")
        return cls(found[1], int(found[2] or 0))

    @property
    def site(self) -> str | None:
        """The site it captures or steers at."""
        if self.capture and self.capture.startswith("neurons"):
            return "neurons"
        if self.capture == "z":
            return "z"
        return "resid_post" if self.capture or self.specs else None


def modes_for(names: Iterable[str], workload: Workload) -> list[str]:
    """The modes that a workload can tell apart: "steer-each" named by its K, more specs than requests left out.

    Raises:
        ValueError: an unknown mode.
    """
    resolved = dict.fromkeys(f"steer-{workload.requests}" if name == "steer-each" else name for name in names)
    return [name for name in resolved if name == CONTROL or Mode.parse(name).specs <= workload.requests]


def limits_of(shape: str, workload: Workload) -> dict[str, float]:
    """The limits of the modes of a workload, by the names that `modes_for` gives them; one request has that of one spec."""
    found = LIMITS.get(shape + ("~" if workload.under_way else ""), {})
    return {modes_for([name], workload)[0]: found[name] for name in sorted(found, reverse=True)}


def sites_for(names: Iterable[str], beside: Iterable[str] = ()) -> list[str]:
    """The sites that these modes need armed, and others; the residual stream where they need none."""
    found = dict.fromkeys(Mode.parse(name).site for name in names if name not in (CONTROL, "steer-each"))
    return sorted({*beside, *(site for site in found if site)}) or ["resid_post"]


def sequence(names: Sequence[str], number: int, base_every: int) -> list[str]:
    """The runs of one round: the modes, turned by the number of the round, base before every few and at the end.

    Args:
        names: modes.
        number: number of the round.
        base_every: modes between two base runs; 0 for base at both ends alone.
    """
    shift = number % max(len(names), 1)
    turned = [*names[shift:], *names[:shift]]
    step = base_every or max(len(turned), 1)
    found: list[str] = []
    for place, name in enumerate(turned):
        found += [BASE, name] if place % step == 0 else [name]
    return [*found, BASE]


def ratios(runs: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Each mode's time over the mean of the base runs right before and right after it, in the order of the runs."""
    bases = [place for place, (name, _) in enumerate(runs) if name == BASE]
    found = []
    for place, (name, seconds) in enumerate(runs):
        if name != BASE:
            before = max(base for base in bases if base < place)
            after = min(base for base in bases if base > place)
            found.append((name, seconds / statistics.mean((runs[before][1], runs[after][1]))))
    return found


def summary(
    passes: Sequence[Sequence[Mapping[str, Any]]], workload: Workload, limits: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """What the rounds of one workload say of each mode.

    Args:
        passes: the runs of each round; a run has "mode" and "seconds", captures also "readable_s" and
            "bytes_per_token", some "fetch_s" and "fetch_bytes".
        workload: what was run.
        limits: most per cent over base of each mode.

    Returns:
        Of each mode: every ratio, its median, quartiles, least and greatest; seconds; tokens a second; bytes that a computed
        token takes in the arena; fetches.
    """
    found: dict[str, dict[str, Any]] = {}
    compared = [pair for runs in passes for pair in ratios([(run["mode"], run["seconds"]) for run in runs])]
    everything = [run for runs in passes for run in runs]
    for name in dict.fromkeys(run["mode"] for run in everything):
        of_mode = [run for run in everything if run["mode"] == name]
        seconds = statistics.median(run["seconds"] for run in of_mode)
        found[name] = {
            "seconds": seconds,
            "tokens_per_s": workload.tokens / seconds,
            "ratio": _spread([ratio for mode, ratio in compared if mode == name]),
            "limit_percent": limits.get(name),
            "readable_s": _median(run.get("readable_s") for run in of_mode),
            "bytes_per_token": _median(run.get("bytes_per_token") for run in of_mode),
            "fetch_gb_per_s": _median(run["fetch_bytes"] / run["fetch_s"] / 1e9 for run in of_mode if "fetch_s" in run),
        }
    return found


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "quartiles": [low, high],
        "all": list(values),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
