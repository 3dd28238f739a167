"""Faults in the middle of a conversion: one clear error, nothing corrupt, the same call resumes."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import s3fs

import mmstream as mm
from mmstream.dataset.manifest import MARKER_NAME
from mmstream.storage import LocalStore
from tests.helpers.convert_corpus import before_shard, interrupted, objects, run, tree


def assert_resumes(corpus, tmp_path, **options):
    """Check that what is there is refused, and that the same call completes it."""
    with pytest.raises(mm.errors.ManifestError, match="mmstream convert"):
        mm.open_dataset(tmp_path / "out")
    assert run(corpus, tmp_path / "out", **options).num_rejects == 2
    run(corpus, tmp_path / "alone", **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


@contextmanager
def failing_writes(monkeypatch, suffix, code):
    """Let the second file with a suffix fail in the middle, as a full disk or lost rights do."""
    create, names = LocalStore.create, []

    class Failing:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            self.file.write(bytes(data)[: len(data) // 2])
            raise OSError(code, os.strerror(code), "disk")

    @contextmanager
    def failing(self, name):
        names.extend([name] if name.endswith(suffix) else [])
        with create(self, name) as file:
            yield Failing(file) if name.endswith(suffix) and len(names) == 2 else file

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", failing)
        yield


def error_of(command):
    """Run a command that fails, and return what it says."""
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    return process.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "code"),
    [
        *((".tar", code) for code in (errno.ENOSPC, errno.EACCES, errno.EIO, errno.ESTALE)),
        *((suffix, errno.ENOSPC) for suffix in (".tar.idx", ".parquet", ".json", ".rejects.jsonl")),
    ],
)
def test_a_disk_that_fails_at_any_file_leaves_nothing_half(
    corpus, tmp_path, monkeypatch, suffix, code
):
    with (
        failing_writes(monkeypatch, suffix, code),
        pytest.raises(OSError, match=os.strerror(code)),
    ):
        run(corpus, tmp_path / "out")
    assert (tmp_path / "out" / MARKER_NAME).exists()
    assert not list(tmp_path.glob("out/**/.*.tmp"))
    assert_resumes(corpus, tmp_path)


LIMITED = """
import resource, signal, sys
from mmstream.cli import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.argv[1:] = ["convert", *sys.argv[2:], "--samples-per-shard", "8", "--num-workers", "0"]
main()
"""


@pytest.mark.slow
def test_a_real_limit_of_the_file_system_is_one_line(corpus, tmp_path):
    command = [sys.executable, "-c", LIMITED, "9000", corpus, tmp_path / "out"]
    assert re.fullmatch("error: .*File too large.*\n", error_of(command))
    assert_resumes(corpus, tmp_path)


@pytest.fixture
def bound_by_modes():
    """Beginning of a command that may not pass over the modes of files, though root runs it."""
    if os.geteuid() != 0:
        return []
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*drop, "true"]).returncode:
        pytest.skip("root passes over the modes of files, and may not give that up here")
    return drop


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_is_one_line_and_the_same_command_resumes(
    corpus, tmp_path, monkeypatch, bound_by_modes
):
    out = tmp_path / "out"
    interrupted(monkeypatch, corpus, out, 2)
    before = tree(out)
    command = [*bound_by_modes, sys.executable, "-m", "mmstream", "convert", corpus, out]
    command += ["--samples-per-shard", "8", "--num-workers", "0", "--max-rejects", "10%"]
    for folder in (out, out / "reports"):
        folder.chmod(0o500)
    said = error_of(command)
    for folder in (out, out / "reports"):
        folder.chmod(0o700)
    assert re.search(f"\nerror: {out}/.*Permission denied\n$", f"\n{said}")
    assert tree(out) == before
    assert_resumes(corpus, tmp_path)


def test_a_medium_that_may_not_be_read_is_a_named_reject(corpus, tmp_path, bound_by_modes):
    (tmp_path / "images" / "1.jpg").chmod(0)
    command = [*bound_by_modes, sys.executable, "-m", "mmstream", "convert", corpus]
    process = subprocess.run([*command, "--dry-run", "3"], capture_output=True, text=True)
    assert "3 rows, 1 rejected" in process.stdout
    assert "images/1.jpg: no permission to read it" in process.stdout


@pytest.mark.parametrize("leaves_a_folder", [True, False])
def test_a_folder_of_media_that_is_gone_is_no_reject(
    corpus, tmp_path, monkeypatch, leaves_a_folder
):
    def unmount():
        (tmp_path / "images").rename(tmp_path / "away")
        if leaves_a_folder:
            (tmp_path / "images").mkdir()

    rows = tmp_path / "r.jsonl"
    rows.write_text(corpus.read_text().replace("images/", ""))
    options = {"media_root": tmp_path / "images"}
    with (
        before_shard(monkeypatch, 3, unmount),
        pytest.raises(mm.errors.StorageError, match="images"),
    ):
        run(rows, tmp_path / "out", **options)
    assert len(list(tmp_path.glob("out/reports/*[0-9].json"))) == 2
    (tmp_path / "away").rename(tmp_path / "images")  # in place of an empty folder
    assert_resumes(rows, tmp_path, **options)


def test_a_full_folder_of_temporary_files_is_named(corpus, tmp_path, monkeypatch):
    array = tmp_path / "rows.json"
    array.write_text("[" + ",".join(corpus.read_text().splitlines()) + "]")
    command = [sys.executable, "-c", LIMITED, "100", array, tmp_path / "out"]
    assert re.fullmatch("error: .*TMPDIR.*\n", error_of(command))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.s3
def test_a_bucket_that_is_gone_is_one_error_and_the_same_call_resumes(
    corpus, s3, tmp_path, monkeypatch, whole
):
    bucket = f"gone-{tmp_path.name.replace('_', '-')}"[:60].rstrip("-")
    client = s3fs.S3FileSystem(skip_instance_cache=True)
    client.mkdir(bucket)
    with (
        before_shard(monkeypatch, 3, lambda: client.rm(bucket, recursive=True)),
        pytest.raises((mm.MMStreamError, OSError)) as error,
    ):
        run(corpus, f"s3://{bucket}/out")
    assert "\n" not in str(error.value)
    assert bucket in str(error.value)
    client.invalidate_cache()
    if not client.exists(bucket):
        client.mkdir(bucket)
    assert run(corpus, f"s3://{bucket}/out").num_samples == 38
    assert objects(f"s3://{bucket}/out") == whole
