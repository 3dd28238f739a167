"""Members of tars and zips: each archive's directory is read once, and so is one that fails."""

from __future__ import annotations

import pytest

from mmstream.converting.draft import RowError
from mmstream.converting.media import directories
from mmstream.converting.media.directories import Directories, ReadRange
from mmstream.converting.media.tar_members import TarMembers
from mmstream.converting.media.zip_members import ZipMembers
from mmstream.errors import StorageError

NO_ARCHIVE = b"no archive" * 1000


class CountedArchive:
    """The bytes of an archive, and how many times a range of it was read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_reads = data, 0

    def read(self, start: int, stop: int) -> bytes:
        self.num_reads += 1
        return self.data[start:stop]


def fault_of(members: TarMembers | ZipMembers, archive: CountedArchive) -> str:
    """Return why no member can be read."""
    num_bytes = len(archive.data)
    try:
        if isinstance(members, ZipMembers):
            members.read("x", "a.png", archive.read, num_bytes, max_bytes=1000)
        else:
            members.span("x", "a.png", archive.read, num_bytes)
    except RowError as error:
        return str(error)
    raise AssertionError("an archive that cannot be read has no members")


@pytest.mark.parametrize("members", [TarMembers(), ZipMembers()], ids=["tar", "zip"])
def test_an_archive_that_cannot_be_read_is_read_once(members: TarMembers | ZipMembers) -> None:
    damaged = CountedArchive(NO_ARCHIVE)
    fault = fault_of(members, damaged)
    num_reads = damaged.num_reads
    assert fault.startswith("not a")
    assert num_reads > 0
    assert [fault_of(members, damaged) for _ in range(4)] == [fault] * 4
    assert damaged.num_reads == num_reads


class Archives:
    """Directories of archives of so many members each, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.directories = Directories(self._read_directory)

    def _read_directory(self, _read: ReadRange, num_members: int) -> dict[str, int]:
        self.read.append(num_members)
        if not num_members:
            raise RowError("damaged")
        return {str(number): number for number in range(num_members)}

    def members(self, num_members: int) -> dict[str, int]:
        return self.directories.members(num_members, CountedArchive(b"").read, num_members)


def test_the_directories_of_the_archives_named_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(directories, "MAX_KEPT_MEMBERS", 5)
    archives = Archives()
    for num_members in (2, 3, 2, 3):
        assert len(archives.members(num_members)) == num_members
    assert archives.read == [2, 3]
    archives.members(1)
    assert archives.read == [2, 3, 1]
    for num_members in (3, 1, 2):  # the one of 2 was named first, so it had to go
        archives.members(num_members)
    assert archives.read == [2, 3, 1, 2]


def test_a_fault_is_kept_as_one_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "MAX_KEPT_MEMBERS", 3)
    archives = Archives()
    for num_members in (0, 2, 0, 3, 0):
        if num_members:
            archives.members(num_members)
        else:
            with pytest.raises(RowError, match="damaged"):
                archives.members(num_members)
    assert archives.read == [0, 2, 3, 0]


def test_a_directory_beyond_the_limit_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "MAX_KEPT_MEMBERS", 5)
    archives = Archives()
    for num_members in (2, 100, 100, 2, 2):
        archives.members(num_members)
    assert archives.read == [2, 100, 2]


def test_a_failure_of_storage_is_not_kept() -> None:
    answers = iter([StorageError("away"), {"a": 1}])

    def read_directory(_read: ReadRange, _num_bytes: int) -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, StorageError):
            raise answer
        return answer

    directories_of_one = Directories(read_directory)
    read = CountedArchive(b"").read
    with pytest.raises(StorageError, match="away"):
        directories_of_one.members("x", read, 0)
    assert directories_of_one.members("x", read, 0) == {"a": 1}
