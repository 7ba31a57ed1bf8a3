"""What holds of many machines without any: settings of actors, numbers of documents, memory that is another's, errors."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from types import SimpleNamespace

import pytest

from steercap.adapters.cluster import find_folder
from steercap.adapters.refusal import FOLDER, left_behind, refusal
from steercap.collecting import RayActors
from steercap.collecting.documents import digests
from steercap.collecting.feeding import feed
from steercap.collecting.sources import Source, open_source
from steercap.errors import InvalidSetting, MemoryNotShared, UnsupportedModel
from steercap.model import SteerModel
from steercap.testing.rows import TINY_ENGINE
from steercap.transport.shared import NONCE_BYTES, SharedSegment


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
    again = Source("a part", lambda: iter([(one.where, one.content, one.bytes) for one in documents[2:]]), first=2)
    assert [one.number for one in again] == [2, 3]
    assert digests(documents[2:]) == digests(list(again)) != digests(documents[:2])
    fed = [one async for batch in feed(open_source(corpus), Asks(), lambda _: False) for one in batch]
    assert digests(documents) == hashlib.sha256(b"".join(one.digest for one in fed)).hexdigest()


def test_a_model_that_is_not_started_can_be_opened_elsewhere() -> None:
    """What opens another of the same arguments crosses to any process."""
    model = SteerModel("some/model", sites=("resid_post", "mlp_out"), capture_bytes=1 << 20, **TINY_ENGINE)
    again = pickle.loads(pickle.dumps(model._another))()
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
    with pytest.raises(UnsupportedModel), left_behind():
        raise raised
    found = refusal(tmp_path, "the engine did not start")
    assert type(found) is UnsupportedModel
    assert str(found) == "no such site"
