"""A real Ray cluster of two nodes writes the bytes of one process, also when a node dies."""

from __future__ import annotations

import pytest

import mmstream as mm
from mmstream.converting import shard
from mmstream.dataset.manifest import MARKER_NAME
from tests.helpers.convert_corpus import run, tree
from tests.helpers.wait import wait_until

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """A head and another node, each with one CPU, and this process as a driver."""
    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    head_options = options | {"include_dashboard": False}
    with pytest.MonkeyPatch.context() as environment:
        # Other programs' memory ends no worker.
        environment.setenv("RAY_memory_monitor_refresh_ms", "0")
        environment.setenv("RAY_worker_niceness", "0")  # 15 leaves none of a busy machine to them
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head_options)
        cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def after_reports(monkeypatch, number, action):
    """Call a function when the driver has got so many reports."""
    real, seen = shard._require_visible, []

    def counted(job, report):
        real(job, report)
        seen.append(report.name)
        if len(seen) == number:
            action()

    monkeypatch.setattr(shard, "_require_visible", counted)
    return seen


def require_bytes_of_one_process(rows, tmp_path, **options):
    """Convert on the cluster and in this process, and compare all files."""
    run(rows, tmp_path / "ray", engine="ray", **options)
    run(rows, tmp_path / "alone", **options)
    assert tree(tmp_path / "ray") == tree(tmp_path / "alone")


def test_a_node_that_would_make_other_images_is_an_error_in_one_line(
    corpus, tmp_path, cluster, monkeypatch
):
    media = mm.MediaOptions(max_image_side=20)
    other = {**media.plan(), "libraries": "others"}
    with monkeypatch.context() as patch:
        patch.setattr(mm.MediaOptions, "plan", lambda _: other)  # in this process only
        with pytest.raises(mm.ConfigError, match="a node of Ray would write other images"):
            run(corpus, tmp_path / "out", engine="ray", num_workers=1, media=media)


def bug(row):
    return undefined_name  # noqa: F821


def test_a_bug_of_a_function_has_its_line_and_splits_by_media_are_those_of_one_process(
    corpus, tmp_path, cluster
):
    options = {"splits": {"train": 0.6, "val": 0.4}, "by_media": True}
    require_bytes_of_one_process(corpus, tmp_path, num_workers=2, **options)
    with pytest.raises(NameError) as raised:
        run(corpus, tmp_path / "bug", engine="ray", num_workers=1, row=bug)
    line = bug.__code__.co_firstlineno + 1
    assert f'test_ray.py", line {line}, in bug' in "".join(raised.value.__notes__)


def test_rows_in_temporary_copies_of_this_machine_travel_with_their_job(
    corpus, tmp_path, cluster, monkeypatch
):
    array = tmp_path / "rows.json"
    array.write_text("[" + ",".join(corpus.read_text().splitlines()) + "]")
    jobs = []
    portable = shard._portable
    monkeypatch.setattr(shard, "_portable", lambda job: jobs.append(portable(job)) or jobs[-1])
    require_bytes_of_one_process(array, tmp_path, num_workers=2)
    assert len(jobs) == 5
    assert sum(len(list(job.rows.read())) for job in jobs) == 40  # the copy is gone


def test_an_error_of_a_task_is_one_line_of_its_own_kind(corpus, tmp_path, cluster, monkeypatch):
    portable = shard._portable

    def elsewhere(job):
        (tmp_path / "images").rename(tmp_path / "gone")
        return portable(job)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "_portable", elsewhere)
        with pytest.raises(mm.MMStreamError, match="images") as error:
            run(corpus, tmp_path / "o", media_root=tmp_path / "images", engine="ray", num_workers=1)
    assert "\n" not in str(error.value)


def test_a_destination_that_nodes_do_not_share_is_named(corpus, tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(shard, "missing_file", lambda job, report: job.name)
    with pytest.raises(mm.MMStreamError, match="does not see it; write to a folder that all"):
        run(corpus, tmp_path / "out", engine="ray", num_workers=1)
    with pytest.raises(mm.ConfigError, match="only this process has its memory"):
        run(corpus, "memory://bucket/out", engine="ray")


def test_ctrl_c_cancels_all_tasks_and_another_engine_continues(
    corpus, tmp_path, cluster, monkeypatch
):
    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        after_reports(patch, 2, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "out", samples_per_shard=2, engine="ray")
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    assert (tmp_path / "out" / MARKER_NAME).exists()
    assert len(list((tmp_path / "out").glob("*.tar"))) < 20
    run(corpus, tmp_path / "out", samples_per_shard=2)
    run(corpus, tmp_path / "alone", samples_per_shard=2)
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def test_a_cluster_writes_the_same_bytes_although_a_node_is_killed(
    corpus, tmp_path, cluster, monkeypatch
):
    (node,) = cluster.worker_nodes  # no other test comes after this one
    seen = after_reports(monkeypatch, 3, lambda: cluster.remove_node(node, allow_graceful=False))
    media = mm.MediaOptions(max_image_side=20)
    require_bytes_of_one_process(corpus, tmp_path, samples_per_shard=2, media=media)
    assert len(seen) == 20
