"""The last shards of a conversion get the CPUs of the workers that have no shard any more."""

from __future__ import annotations

import threading

from mmstream.converting.engines import processes
from mmstream.converting.media import check_rows
from mmstream.converting.media.options import MediaOptions
from tests.helpers.convert_corpus import make_corpus, run, tree

SMALL = MediaOptions(max_image_side=20)


def test_a_shard_that_two_cpus_check_has_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "num_cores", lambda: 2)  # also where there is one
    corpus = make_corpus(tmp_path)
    run(corpus, tmp_path / "two", samples_per_shard=30, media=SMALL, num_workers=2)
    run(corpus, tmp_path / "one", samples_per_shard=30, media=SMALL)
    assert tree(tmp_path / "two") == tree(tmp_path / "one")


def test_idle_workers_are_shared_out_when_no_shard_is_left_to_begin(tmp_path, monkeypatch):
    corpus = make_corpus(tmp_path)
    run(corpus, tmp_path / "one", media=SMALL)
    checked, names, shares = check_rows.checked, set(), []

    def noted(*args):
        names.add(threading.current_thread().name)
        return checked(*args)

    def in_turns(function, jobs, num_workers, *, command, prepare, prepare_args):
        """Like two workers that end their shards in turns; in this process."""
        prepare(*prepare_args)
        running = [next(jobs), next(jobs)]
        while running:
            shares.append(prepare_args[0].value)
            if (job := next(jobs, None)) is not None:
                running.append(job)
            yield running[0], function(running.pop(0))

    monkeypatch.setattr(check_rows, "checked", noted)
    monkeypatch.setattr(processes, "run_in_processes", in_turns)
    monkeypatch.setattr(processes, "num_cores", lambda: 2)
    run(corpus, tmp_path / "two", media=SMALL, num_workers=2)
    assert shares == [1, 1, 1, 1, 2]
    assert tree(tmp_path / "two") == tree(tmp_path / "one")
    assert any(name.startswith("mmstream-check") for name in names)
    assert threading.current_thread().name in names
