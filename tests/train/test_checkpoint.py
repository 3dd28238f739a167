"""Checkpoints: whole or not at all, checked when read, the newest good one wins."""

from __future__ import annotations

import errno
import io
import logging
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmstream.errors import StateError, StorageError
from mmstream.storage import LocalStore, open_store
from mmstream.train.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    require_writable,
    resume_training,
    save_checkpoint,
)
from mmstream.train.distributed import TrainProcess
from tests.helpers.fake_loader import FakeLoader
from tests.helpers.stub_server import refused
from tests.helpers.web_stubs import S3Stub, running


def content(value: float) -> dict[str, object]:
    return {"model": {"w": torch.full((50, 50), value)}, "loader": '{"epoch": 0}', "count": 3}


def save(folder: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        save_checkpoint(open_store(folder), Checkpoint(step, content(float(step))), keep=keep)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def flip_one_bit_of_a_weight(path: Path) -> None:
    data = bytearray(path.read_bytes())
    weights = bytes(torch.full((50, 50), 30.0).numpy().tobytes())
    data[data.index(weights) + 500] ^= 1
    path.write_bytes(bytes(data))


def other_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "not a checkpoint")
    return buffer.getvalue()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a flipped bit of a weight": flip_one_bit_of_a_weight,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>503 Slow Down</html>"),
    "another zip": lambda path: path.write_bytes(other_zip()),
}


def test_what_a_killed_writer_left_is_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / ".step-00000017.pt.311-0a1b2c.tmp").write_bytes(b"half a checkpoint")
    (tmp_path / ".notes.tmp").write_bytes(b"another program's")
    save(tmp_path, 20)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".notes.tmp", "step-00000010.pt", "step-00000020.pt"]


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert load_newest(open_store(tmp_path / "absent")) is None
    (tmp_path / "step-1.pt").write_bytes(b"another program's")
    (tmp_path / "notes.txt").write_text("hello")
    assert load_newest(open_store(tmp_path)) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    save(tmp_path, 10, 20, 30)
    DAMAGES[damage](path_of(tmp_path, 30))
    with caplog.at_level(logging.WARNING):
        newest = load_newest(open_store(tmp_path))
    assert newest is not None
    assert newest.num_steps == 20
    assert "step-00000030.pt: damaged checkpoint" in caplog.text


def test_when_all_are_damaged_the_run_does_not_start_anew(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    DAMAGES["cut"](path_of(tmp_path, 10))
    DAMAGES["cut"](path_of(tmp_path, 20))
    with pytest.raises(StateError, match="all 2 checkpoints are damaged"):
        load_newest(open_store(tmp_path))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "owned",)

    buffer = io.BytesIO()
    torch.save({"model": Evil()}, buffer)
    path_of(tmp_path, 5).write_bytes(buffer.getvalue())
    with pytest.raises(StateError, match="damaged checkpoint"):
        load_checkpoint(open_store(tmp_path), 5)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_run_that_may_not_write_is_refused_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    right = {"PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}[method]
    denied = refused("403 Forbidden", "AccessDenied", "not yours")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    with running(S3Stub, {}) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        server.refuse = lambda request: denied if request.command == method else None
        with pytest.raises(StorageError, match=rf"may lack the right to write there \({right}\)$"):
            require_writable(open_store("s3://bucket/run/checkpoints"))


@pytest.mark.s3
def test_a_store_that_may_be_written_is_left_as_it_was(s3: str) -> None:
    require_writable(open_store(f"{s3}/checkpoints"))
    assert open_store(f"{s3}/checkpoints").list() == {}
    assert not open_store(f"{s3}/checkpoints").exists(".write-test")


def test_only_the_newest_are_kept_and_come_back(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, 40, keep=2)
    assert list_checkpoints(open_store(tmp_path)) == [30, 40]
    newest = load_newest(open_store(tmp_path))
    assert newest is not None
    assert newest.num_steps == 40
    assert torch.equal(newest.content["model"]["w"], torch.full((50, 50), 40.0))
    assert newest.content["loader"] == '{"epoch": 0}'
    save(tmp_path, 50, keep=1)
    assert list_checkpoints(open_store(tmp_path)) == [50]


def test_a_good_one_is_never_removed_for_a_damaged_later_one(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, keep=2)
    DAMAGES["cut"](path_of(tmp_path, 20))
    save(tmp_path, 15, keep=1)
    assert list_checkpoints(open_store(tmp_path)) == [15]
    assert load_newest(open_store(tmp_path)) is not None


@pytest.mark.slow
def test_no_flipped_bit_of_the_zips_directory_goes_into_the_weights(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    path = path_of(tmp_path, 20)
    good = path.read_bytes()
    directory = good.index(b"PK\x01\x02")
    for place in range(directory, directory + 46):  # the first entry's fixed part
        for bit in range(8):
            data = bytearray(good)
            data[place] ^= 1 << bit
            path.write_bytes(bytes(data))
            newest = load_newest(open_store(tmp_path))
            assert newest is not None
            weights = newest.content["model"]["w"]
            assert torch.equal(weights, torch.full((50, 50), float(newest.num_steps)))


def resumed(folder: Path, content: Any, load: Any = lambda content: None) -> None:
    save_checkpoint(open_store(folder), Checkpoint(3, content), keep=1)
    trained: Any = SimpleNamespace(load_state_dict=load)
    batches: Any = FakeLoader()
    resume_training(open_store(folder), trained, batches, TrainProcess(torch.device("cpu")))


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, IndexError])
def test_weights_that_the_model_cannot_take_are_those_of_another_model(
    tmp_path: Path, error: type[Exception]
) -> None:
    with pytest.raises(StateError, match=r"step 3 is of another model: .*no place"):
        resumed(tmp_path, {"loader": "{}"}, Mock(side_effect=error("no place")))


@pytest.mark.parametrize(
    "content",
    [
        [],
        [1, 2],
        7,
        {},
        {"loader": "not JSON"},
        {"loader": None},
        {"loader": "[1]"},
        {"loader": 3},
        {"loader": "[" * 100_000},
    ],
    ids=lambda content: repr(content)[:30],
)
def test_a_checkpoint_without_a_loaders_state_is_a_state_error(
    tmp_path: Path, content: Any
) -> None:
    with pytest.raises(StateError) as caught:
        resumed(tmp_path, content)
    assert str(caught.value).startswith(str(tmp_path))
    assert len(str(caught.value)) < 1000


def test_a_disk_that_fills_up_while_a_checkpoint_is_made_keeps_the_older_ones(
    tmp_path, monkeypatch
):
    save(tmp_path, 1, 2)
    before = sorted(path.name for path in tmp_path.iterdir())
    num_written = 0
    create = LocalStore.create

    @contextmanager
    def create_on_a_full_disk(store, name):
        with create(store, name) as file:

            class Full(io.BytesIO):
                def write(self, data):
                    nonlocal num_written
                    num_written += file.write(data)
                    if num_written > 5000:
                        raise OSError(errno.ENOSPC, "no space left")
                    return len(data)

            yield Full()

    monkeypatch.setattr(LocalStore, "create", create_on_a_full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, 3, keep=1)
    # It failed in the middle: the content is not made as a whole first.
    assert 5000 < num_written < 15_000
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert load_newest(open_store(tmp_path)).num_steps == 2
