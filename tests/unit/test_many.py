"""What holds of many machines without any: settings of actors, numbers of documents, memory that is another's, errors."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from shards import definition_of, folder_of
from support.rows import TINY_ENGINE

from steercap.adapters.entry import find_folder
from steercap.adapters.process_exit import FOLDER, recorded_error, startup_error
from steercap.core.spec import CaptureSpec
from steercap.errors import InvalidSetting, MemoryNotShared, RunDiffers, UnsupportedModel
from steercap.lab.datasets.collecting import RayActors
from steercap.lab.datasets.collecting.documents import digests
from steercap.lab.datasets.collecting.feeding import feed
from steercap.lab.datasets.collecting.many import _Spread
from steercap.lab.datasets.collecting.reading import CollectArguments
from steercap.lab.datasets.collecting.sources import DocumentSource, open_source
from steercap.model import SteerModel
from steercap.worker.memory import NONCE_BYTES, SharedSegment


class Asks:
    """Reads nothing of any document."""

    cutting = SimpleNamespace(windows=lambda _documents: [])

    def asked(self, _window):
        return None


@pytest.mark.parametrize("wrong", [{"count": 0}, {"count": 1.5}, {"count": 1, "max_restarts": -2}])
def test_settings_of_actors_are_checked(wrong) -> None:
    with pytest.raises(InvalidSetting, match="give"):
        RayActors(**wrong)


def test_actors_are_given_what_ray_calls_so() -> None:
    """All settings but the address are options of an actor; the user's own environment is kept."""
    options = RayActors(2, num_gpus=0.5, runtime_env={"env_vars": {"A": "b"}, "pip": ["x"]}).options
    assert (options["num_gpus"], options["max_restarts"], options["max_task_retries"]) == (0.5, -1, 3)
    assert options["runtime_env"]["env_vars"]["A"] == "b"
    assert options["runtime_env"]["pip"] == ["x"]


async def test_documents_of_a_shard_are_those_of_the_corpus() -> None:
    """Their numbers go on where the shard begins, and the digest of all is what a receipt holds."""
    corpus = ["one", [1, 2, 3], {"text": "two"}, [{"role": "user", "content": "three"}]]
    documents = list(open_source(corpus))
    again = DocumentSource(
        "a part", lambda: iter([(one.where, one.content, one.bytes) for one in documents[2:]]), first=2
    )
    assert [one.number for one in again] == [2, 3]
    assert digests(documents[2:]) == digests(list(again)) != digests(documents[:2])
    fed = [one async for batch in feed(open_source(corpus), Asks(), lambda _: False) for one in batch]
    assert digests(documents) == hashlib.sha256(b"".join(one.digest for one in fed)).hexdigest()


async def test_a_shard_that_is_there_is_passed_over_or_differs(tmp_path) -> None:
    """Of the same documents, of others, of fewer than the corpus has now, and of more."""
    corpus = ["one", "two", "three"]
    definition = definition_of(documents=2)
    folder = folder_of(tmp_path, definition, shards=1, last=2)
    (receipt,) = folder.receipts().values()

    async def second(documents: list[str], of: list[str]) -> object:
        spread = _Spread([], open_source(documents), str(tmp_path), CollectArguments(capture=CaptureSpec()))
        spread._known[0] = replace(receipt, stop=len(of), documents_sha256=digests(list(open_source(of))))
        return await spread._next(2)

    number, (document,) = await second(corpus, corpus[:2])
    assert (number, document.content) == (1, "three")
    for other in (["one", "other"], ["other"]):
        with pytest.raises(RunDiffers, match="holds shard 0 of other documents"):
            await second(corpus, other)
    with pytest.raises(RunDiffers, match="holds shard 0 of other documents"):
        await second(corpus[:1], corpus[:2])
    with pytest.raises(RunDiffers, match=r"has grown\. Remove .*/shards/000000\.json, and the same call"):
        await second(corpus, corpus[:1])


def test_a_model_that_is_not_started_can_be_opened_elsewhere() -> None:
    """What opens another of the same arguments crosses to any process."""
    model = SteerModel("some/model", sites=("resid_post", "mlp_out"), capture_bytes=1 << 20, **TINY_ENGINE)
    again = pickle.loads(pickle.dumps(model.factory))()
    assert (again.model, again.settings) == (model.model, model.settings)
    assert again.serving.engine_args == model.serving.engine_args


def test_files_of_other_processes_are_not_opened() -> None:
    """The path of a segment on another machine may lead to anything here: it is looked at before it is opened."""
    read, write = os.pipe()
    other = os.memfd_create("another")
    os.ftruncate(other, 1 << 16)
    try:
        for fd in (read, write, other):
            with pytest.raises(MemoryNotShared, match="is not the segment that was announced"):
                SharedSegment.open(f"/proc/{os.getpid()}/fd/{fd}", bytes(NONCE_BYTES))
    finally:
        for fd in (read, write, other):
            os.close(fd)


def test_workers_elsewhere_make_sockets_where_they_can(monkeypatch, tmp_path) -> None:
    """The engine's folder is kept where it is there, and replaced where it is another machine's."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    find_folder()
    assert os.environ[FOLDER] == str(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path / "elsewhere"))
    find_folder()
    assert os.environ[FOLDER] == tempfile.gettempdir()


def test_what_a_task_of_rays_raised_keeps_its_words(monkeypatch, tmp_path) -> None:
    """Ray makes an error of its own of it, whose text is a traceback; the client hears the worker's."""
    exceptions = pytest.importorskip("ray.exceptions")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    raised = exceptions.RayTaskError("work", "Traceback ...", UnsupportedModel("no such site")).as_instanceof_cause()
    with pytest.raises(UnsupportedModel), recorded_error():
        raise raised
    found = startup_error(tmp_path, "the engine did not start")
    assert type(found) is UnsupportedModel
    assert str(found) == "no such site"
