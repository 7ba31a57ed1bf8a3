"""Answers that exist, read at scale: `steercap persona answers` on SmolLM2 (CPU), its time and memory, and what `kill -9` leaves.

    python scripts/bench_answers.py out/answers --personas 24 --answers 200 --kills 10

Writes answers of 30 to 120 tokens, scored 0 to 3 or refused: sentences of this repository's pages, under the shipped roles and
their questions. The real command reads them with `--concurrency 1` twice: once from end to end, and once killed by SIGKILL
after random numbers of answers and begun again each time. Then

- all files of both are compared byte for byte,
- the means of some answers, drawn at random, are computed by transformers in float32 and compared row by row,
- tokens a second are said, of the time from the first answer to the last, and the memory (PSS) of the client and of its
  engine in ten parts of the run.

What is complete is not done again, so that a call that was cut off goes on. The result is in `result.json`. `--lock FILE` is held
while an engine starts, for machines on which several start engines; `--engine-arg gpu_memory_utilization=0.1` leaves them room.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from steercap.lab.demo import smollm2
from steercap.lab.personas.roles import shipped_roles

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention on CUDA in float32, else in TF32
ROOT = Path(__file__).parent.parent
#: Tokens of an answer, least and most; greatest error of a mean, over the norm of its row.
LENGTHS, BOUND = (30, 120), 1e-4
#: Bytes of an answer's record in the file of a persona under way: a head, then 30 layers of 576 float32.
RECORD = 16 + 30 * 576 * 4
#: Seconds between two looks at a run, and between two at its memory; of an engine to be gone after its client.
LOOK, WEIGH, GONE = 0.1, 4.0, 60.0


def sentences() -> list[str]:
    """English sentences of the repository's pages, without code and tables."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    prose = re.sub(r"```.*?```|<!--.*?-->|^[|#>][^\n]*", "", text, flags=re.DOTALL | re.MULTILINE)
    return sorted(set(re.findall(r"(?<=\s)[A-Z][a-z]*\s[^.!?\n|`*\[\]]{20,160}[.!?](?=\s)", prose)))


def write_data(folder: Path, personas: int, answers: int, tokenizer: Any) -> int:
    """Write `responses/NAME.jsonl` and `extract_scores/NAME.json`; return the number of tokens to read.

    One persona is "default", which has no system prompt and no scores; the others are shipped roles.
    """
    rng, texts, roles, tokens = random.Random(0), sentences(), shipped_roles(), 0
    for part in ("responses", "extract_scores"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for role in [None, *roles.roles[: personas - 1]]:
        lines, scores = [], {}
        for index in range(answers):
            prompt, question = divmod(index, len(roles.questions))
            said = tokenizer.encode(" ".join(rng.sample(texts, 12)), add_special_tokens=False)[: rng.randint(*LENGTHS)]
            turns = [("system", role.prompts[prompt % len(role.prompts)])] if role else []
            turns += [("user", roles.questions[question]), ("assistant", tokenizer.decode(said))]
            talk = [{"role": who, "content": text} for who, text in turns]
            tokens += len(
                tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)
            )
            label = "pos" if role else "default"
            lines.append({"conversation": talk, "label": label, "prompt_index": prompt, "question_index": question})
            scores[f"{label}_p{prompt}_q{question}"] = rng.choice([0, 1, 2, 3, 3, "REFUSAL"])
        name = role.name if role else "default"
        (folder / "responses" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if role:
            (folder / "extract_scores" / f"{name}.json").write_text(json.dumps(scores))
    return tokens


def done(out: Path) -> int:
    """Number of answers that are on the disk: those of finished personas, and records with a mark."""
    found = sum(int(json.loads(path.read_text())["answers"]) for path in out.glob("receipts/*.json"))
    for path in out.glob("parts/*.rows"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            for start in range(0, path.stat().st_size, RECORD):
                file.seek(start)
                found += file.read(4) == b"rows"
    return found


@contextmanager
def held(lock: Path | None) -> Iterator[Any]:
    """Hold a file's lock until the block ends, or `release` is called."""
    if lock is None:
        yield lambda: None
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)


def memory(client: psutil.Process) -> dict[str, int]:
    """MiB (PSS) of the client and of all that it started."""
    with suppress(psutil.Error):
        others = client.children(recursive=True)
        mine, engine = client.memory_full_info().pss, sum(one.memory_full_info().pss for one in others)
        return {"client": mine >> 20, "engine": engine >> 20}
    return {}


def read(folder: Path, out: Path, kill_at: int | None, lock: Path | None, engine_args: list[str]) -> dict[str, Any]:
    """Run the command to its end, or kill it once `kill_at` answers are done and a random while has gone by.

    Returns:
        Answers done, seconds since the first one, memory at times; of a kill, seconds until the engine was gone.
    """
    words = ["persona", "answers", folder / "responses", folder / "extract_scores", "--kind", "role", "--out", out]
    given = [word for one in engine_args for word in ("--engine-arg", one)]
    command = [sys.executable, "-m", "steercap", *map(str, words), "--concurrency", "1", "--dtype", "float32", *given]
    before, rng = done(out), random.Random(f"{out} {kill_at}")
    with held(lock) as release, (folder / f"{out.name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        client, began, weighed, samples = psutil.Process(process.pid), None, 0.0, []
        try:
            while process.poll() is None:
                now, reached = time.monotonic(), done(out)
                if began is None and reached > before:
                    began, first = now, reached
                    release()
                if began is not None and now - weighed > WEIGH:
                    weighed = now
                    samples.append({"seconds": round(now - began, 1), "done": reached, **memory(client)})
                if kill_at is not None and reached >= kill_at:
                    time.sleep(rng.uniform(0, 1))
                    break
                time.sleep(LOOK)
            if process.poll() is None:
                return {"done": reached, "gone": kill(client), "samples": samples}
            assert process.returncode == 0, f"exit code {process.returncode}; see {log.name}"
            assert began is not None, "nothing was left to read"
            return {"done": done(out), "first": first, "seconds": time.monotonic() - began, "samples": samples}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill(client: psutil.Process) -> float:
    """Kill the client alone by SIGKILL; return the seconds until its engine's processes are gone by themselves."""
    others, began = client.children(recursive=True), time.monotonic()
    client.send_signal(signal.SIGKILL)
    client.wait()
    _, alive = psutil.wait_procs(others, timeout=GONE)
    assert not alive, f"{alive} outlive their client"
    return time.monotonic() - began


def killed(folder: Path, kills: int, total: int, lock: Path | None, engine_args: list[str]) -> list[dict[str, Any]]:
    """Read into `killed`, killed after random numbers of answers; a call that was cut off leaves out those before."""
    out, moments = folder / "killed", sorted(random.Random(kills).sample(range(1, total - 1), kills))
    runs = []
    for at in [*moments, None]:
        if done(out) >= (total if at is None else at):
            continue
        runs.append(read(folder, out, at, lock, engine_args))
        print(f"killed: { ({**runs[-1], 'samples': len(runs[-1]['samples'])}) }", flush=True)
    return runs


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of each file, by its name in the folder."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def errors(folder: Path, count: int, tokenizer: Any) -> list[float]:
    """Greatest error of any layer over the norm of its row, of answers drawn at random: transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    rows: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _module, _inputs, output, at=index: rows.__setitem__(at, output))
    lines = [(path, line) for path in sorted(folder.glob("responses/*.jsonl")) for line in path.open()]
    found = []
    for path, text in random.Random(1).sample(lines, count):
        line = json.loads(text)
        talk = line["conversation"]
        before = tokenizer.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
        start = tokenizer.encode(before, add_special_tokens=False)
        with torch.inference_mode():
            model(torch.tensor([start + tokenizer.encode(talk[-1]["content"], add_special_tokens=False)]))
        outputs = [rows[at][0] if isinstance(rows[at], tuple) else rows[at] for at in range(len(rows))]
        wanted = np.stack([one.reshape(-1, one.shape[-1])[len(start) :].double().mean(0).numpy() for one in outputs])
        kept = torch.load(folder / "whole/response_activations" / f"{path.stem}.pt", weights_only=True, mmap=True)
        ours = kept[f"{line['label']}_p{line['prompt_index']}_q{line['question_index']}"].double().numpy()
        found.append(float((np.linalg.norm(ours - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max()))
    return found


def tenths(samples: list[dict[str, Any]], who: str) -> list[int]:
    """Greatest memory in each tenth of a run, MiB."""
    parts = np.array_split([one[who] for one in samples if who in one], 10)
    return [int(part.max()) for part in parts if len(part)]


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the answers and of both runs.")],
    personas: Annotated[int, typer.Option(min=2, max=25)] = 24,
    answers: Annotated[int, typer.Option(min=1)] = 200,
    kills: Annotated[int, typer.Option(min=0)] = 10,
    sample: Annotated[int, typer.Option(help="Answers compared with transformers.")] = 20,
    lock: Annotated[Path | None, typer.Option(help="File that is locked while an engine starts.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="Passed on to the command.")] = None,
) -> None:
    """Read answers from end to end, and killed; compare the files, the means and the memory."""
    engine_args = engine_arg or []
    tokenizer, total = AutoTokenizer.from_pretrained(smollm2()), personas * answers
    tokens = write_data(folder, personas, answers, tokenizer)
    whole = {} if done(folder / "whole") == total else read(folder, folder / "whole", None, lock, engine_args)
    found: dict[str, Any] = {"personas": personas, "answers": answers, "tokens": tokens, **whole}
    if whole:
        found["tokens_per_second"] = tokens * (whole["done"] - whole["first"]) / total / whole["seconds"]
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}), flush=True)
    runs = killed(folder, kills, total, lock, engine_args) if kills else []
    found["kills"] = [{name: run[name] for name in ("done", "gone")} for run in runs if "gone" in run]
    mine, theirs = digests(folder / "whole"), digests(folder / "killed") if kills else {}
    found["files"], found["differing"] = (
        len(mine),
        sorted(name for name in mine if kills and theirs.get(name) != mine[name]),
    )
    found["errors"] = errors(folder, sample, tokenizer)
    for who in ("client", "engine"):
        found[f"{who}_mib"] = tenths(found.get("samples", []), who)
    (folder / "result.json").write_text(json.dumps(found, indent=1))
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    raise typer.Exit(bool(found["differing"] or (kills and set(mine) != set(theirs)) or max(found["errors"]) > BOUND))


if __name__ == "__main__":
    typer.run(main)
