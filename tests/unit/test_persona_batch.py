"""Many traits at several precisions: what is planned, what is skipped, and that a job's failure stays its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import persona_batch
import pytest
from persona_batch import Board, Precision, Status, board_of, plan, precision_of, run_all

from steercap.errors import InvalidSetting

BF16, FP8 = Precision("bf16", {"dtype": "bfloat16"}), Precision("fp8", {"quantization": "fp8"})


def planned(out: Path, traits=("poetic", "formal", "evil"), precisions=(BF16, FP8), group=2, **changes):
    how = {"model": "smollm2", "arguments": {"seed": 1}, "settings": {"samples": 2}, "small": True, "out": out}
    return plan(traits, precisions, group=group, **{**how, **changes})


def test_every_group_meets_every_precision(tmp_path) -> None:
    """Each trait is in one job of each precision, with its arguments and a folder of its own."""
    jobs = planned(tmp_path)
    assert [job.name for job in jobs] == ["bf16-poetic+formal", "bf16-evil", "fp8-poetic+formal", "fp8-evil"]
    assert len({job.folder for job in jobs}) == 4
    assert jobs[3].arguments == {"seed": 1, "quantization": "fp8"}
    assert jobs[3].settings == {"samples": 2, "traits": ["evil"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"traits": ()}, "traits"),
        ({"traits": ("evil", "mine/evil.yaml")}, "each once"),
        ({"precisions": (BF16, BF16)}, "each once"),
        ({"group": 0}, "group=0"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, says, tmp_path) -> None:
    """Nothing to do, or two jobs in one folder, is an error before anything starts."""
    with pytest.raises(InvalidSetting, match=says):
        planned(tmp_path, **changes)


def test_a_precision_is_a_dtype_or_engine_arguments() -> None:
    """Values are JSON, or else text; what lacks a name or a value is refused."""
    assert precision_of("float32") == Precision("float32", {"dtype": "float32"})
    assert precision_of("q:quantization=fp8,gpu-memory-utilization=0.5") == Precision(
        "q", {"quantization": "fp8", "gpu_memory_utilization": 0.5}
    )
    for wrong in (":dtype=x", "a/b", "q:dtype", "q:"):
        with pytest.raises(InvalidSetting):
            precision_of(wrong)


def test_a_finished_job_is_skipped_if_it_is_the_same(tmp_path) -> None:
    """A folder is finished for what was asked of it, and for nothing else; a trait's file counts by what is in it."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("a")
    job = planned(tmp_path, traits=(str(mine),), precisions=(BF16,))[0]
    Path(job.folder).mkdir(parents=True)
    mark = Path(job.folder) / "job.json"
    mark.write_text(json.dumps({"digest": job.digest, "outcomes": {"mine": {"auc": 1.0}}}))
    assert board_of([job]).status[job.name] == Status("skipped", outcomes={"mine": {"auc": 1.0}})
    assert board_of([job]).next() is None
    other = planned(tmp_path, traits=(str(mine),), precisions=(BF16,), settings={"samples": 3})
    assert board_of(other).next() == other[0]
    mine.write_text("b")
    assert board_of([job]).next() == job


def test_the_first_that_waits_is_next(tmp_path) -> None:
    """Jobs are taken in their order, each once, whatever becomes of the others."""
    board = board_of(planned(tmp_path))
    taken = []
    while (job := board.next()) is not None:
        taken.append(job.name)
        board = board.told(job.name, state="failed" if len(taken) == 2 else "done")
    assert taken == [job.name for job in board.jobs]
    assert board.failed == 1


@pytest.mark.slow
async def test_a_job_that_fails_does_not_stop_the_others(tmp_path) -> None:
    """Real processes: a trait that does not exist is that job's error, a model that does not exist the other's."""
    jobs = planned(tmp_path, traits=("no_such_trait", "poetic"), precisions=(BF16,), group=1, model="/no/such/model")
    seen: list[Board] = []
    board = await run_all(board_of(jobs), ["cpu"], seen.append)
    first, second = board.status.values()
    assert (first.state, second.state, board.failed) == ("failed", "failed", 2)
    assert first.error.startswith("InvalidSetting: unknown traits ['no_such_trait']")
    assert second.error.startswith("ModelNotLoaded: ")
    assert {status.state for board in seen for status in board.status.values()} >= {"waiting", "running", "failed"}
    assert max(sum(status.state == "running" for status in board.status.values()) for board in seen) == 1


def test_a_child_ends_as_it_says() -> None:
    """The thread that watches stdin does not bring Python down at its end: the exit code is the job's."""
    job = planned(Path("/nowhere"), traits=("no_such_trait",), precisions=(BF16,))[0]
    command = [sys.executable, persona_batch.__file__, "--job"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdin.write(msgspec.json.encode(job) + b"\n")
        child.stdin.flush()  # and stays open
        assert b"unknown traits" in child.stdout.read()
        assert child.wait() == 1


def test_precisions_of_one_name_never_share_a_folder(tmp_path) -> None:
    """In one call they are refused; in two calls each has a folder of its own, and its own again the third time."""
    fp8, awq = Precision("w8", {"quantization": "fp8"}), Precision("w8", {"quantization": "awq"})
    with pytest.raises(InvalidSetting, match="each once"):
        planned(tmp_path, precisions=(fp8, awq))
    folders = [[job.folder for job in planned(tmp_path, precisions=(one,))] for one in (fp8, awq, fp8)]
    assert folders[0] == folders[2]
    assert not set(folders[0]) & set(folders[1])
    assert not set(folders[0]) & {job.folder for job in planned(tmp_path, precisions=(fp8,), arguments={"seed": 2})}


def test_a_group_of_hundreds_of_traits_has_a_name_that_files_can_have(tmp_path) -> None:
    """Other traits, another name; the log beside the folder can be made."""
    many = [f"trait_number_{at}" for at in range(300)]
    job, other = (
        planned(tmp_path, traits=traits, precisions=(BF16,), group=300)[0] for traits in (many, [*many[:-1], "evil"])
    )
    assert job.folder != other.folder
    Path(f"{job.folder}.log").touch()


#: Stands where the script starts its children: reads a job, and does what the first trait says.
CHILD = """
import json, os, sys
job = json.loads(sys.stdin.buffer.readline())
match job["settings"]["traits"][0]:
    case "wide":
        print(json.dumps({"stage": "x" * 100_000}))
    case "wider":
        print("x" * 5_000_000)
    case "odd":
        print("no JSON")
os.makedirs(job["folder"], exist_ok=True)
outcomes = {f"trait_{at}": {"auc": 1.0} for at in range(5000)}
with open(job["folder"] + "/job.json", "w") as file:
    json.dump({"digest": "", "outcomes": outcomes}, file)
"""


async def test_nothing_that_a_child_writes_ends_the_other_jobs(tmp_path, monkeypatch) -> None:
    """A line beyond 64 KiB is read, one beyond all bounds or no JSON fails its job alone; outcomes come from the file."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(persona_batch, "__file__", str(script))
    traits = ("wide", "wider", "odd", "plain")
    board = await run_all(board_of(planned(tmp_path, traits=traits, precisions=(BF16,), group=1)), ["cpu"], _unseen)
    assert [status.state for status in board.status.values()] == ["done", "failed", "failed", "done"]
    assert len(board.status["bf16-plain"].outcomes) == 5000
    assert "Error: " in board.status["bf16-wider"].error
    assert "JSON" in board.status["bf16-odd"].error


async def test_a_process_that_cannot_start_fails_its_own_job(tmp_path) -> None:
    """A log that cannot be opened is an error of that job, and the others are taken all the same."""
    jobs = planned(tmp_path, traits=("poetic", "no_such_trait"), precisions=(BF16,), group=1)
    _block_log(jobs[0])
    board = await run_all(board_of(jobs), ["cpu"], _unseen)
    first, second = board.status.values()
    assert first.error.startswith("IsADirectoryError")
    assert second.error.startswith("InvalidSetting: unknown traits")
    assert board.failed == 2


def _block_log(job: persona_batch.Job) -> None:
    """Put a folder where the job's log would be."""
    Path(f"{job.folder}.log").mkdir()


def _unseen(board: Board) -> None:
    """Nobody looks at the board."""
