"""Mixtures of datasets in a run: the same batches everywhere, exact resumes, honest errors."""

import json
from collections import Counter

import pytest

import mmstream as mm
from tests.helpers.bad_corpus import policy, write_tiny
from tests.helpers.mixtures import make_pipeline, mixed
from tests.helpers.orders import rows_of_run
from tests.helpers.states import edited
from tests.helpers.topology import assert_resumes_exactly, run


@pytest.mark.parametrize(("size", "num_workers"), [(1, 2), (3, 3), (12, 1)])
def test_every_topology_sees_the_same_batches(datasets, size, num_workers):
    pipe = make_pipeline(mixed(datasets))
    assert run(pipe, size, num_workers).steps == run(pipe).steps


def test_a_resume_at_every_step_is_exact(datasets):
    steps = assert_resumes_exactly(lambda: mm.Loader(make_pipeline(mixed(datasets, epoch_steps=9))))
    assert len(steps) == 18


def test_a_batch_tells_the_source_of_each_row(datasets):
    batch = next(iter(mm.Loader(make_pipeline(mixed(datasets)))))
    assert set(batch["__source__"]) <= {"a", "b", "c"}
    urls = {n: d.store.url for n, d in datasets.items()}
    for source, url in zip(batch["__source__"], batch["__url__"]):
        assert url.startswith(urls[source])
    assert make_pipeline(mixed(datasets)).take(3)[0]["__source__"] in "abc"


def test_weights_that_lie_ahead_may_be_declared_anew(datasets):
    before = make_pipeline(mixed(datasets, epoch_steps=20))
    change = {"a": 5, "b": 5, "c": 0}
    now = make_pipeline(mixed(datasets, epoch_steps=20, changes={30: change}))
    assert [now.order.refs(1, s)[0].tolist() for s in range(10)] == [
        before.order.refs(1, s)[0].tolist() for s in range(10)
    ]
    loader = mm.Loader(before)
    list(loader)
    state = loader.state_dict()
    mm.Loader(now).load_state_dict(state)
    at_once = mixed(datasets, epoch_steps=20, changes={20: change})
    mm.Loader(make_pipeline(at_once)).load_state_dict(state)
    with pytest.raises(mm.StateError, match="weights from step 10"):
        mm.Loader(
            make_pipeline(mixed(datasets, epoch_steps=20, changes={10: change}))
        ).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"global_batch_size": 6}, "global_batch_size was 12 and is 6"),
        ({"grid": (1, 3)}, "grid was"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"window": 48}, "source c window was 18 and is 36"),
    ],
)
@pytest.mark.parametrize("step", [0, 3])
def test_what_has_begun_binds_at_an_epochs_begin_too(datasets, change, named, step):
    state = edited(mm.Loader(make_pipeline(mixed(datasets))).state_dict(), epoch=2, step=step)
    with pytest.raises(mm.StateError, match=named):
        mm.Loader(make_pipeline(mixed(datasets), **change)).load_state_dict(state)


def test_a_shard_that_is_gone_is_named_with_its_source(tmp_path, datasets):
    gone = write_tiny(tmp_path / "gone", [60])
    mixture = mm.Mixture(
        {"c": (datasets["c"], 1), "gone": (mm.open_dataset(gone), 1)}, epoch_steps=9
    )
    pipe = make_pipeline(mixture)
    (tmp_path / "gone" / "shard-000000.tar").unlink()
    with pytest.raises(mm.errors.ShardError, match=r"shard-000000\.tar"):
        next(iter(mm.Loader(pipe)))
    pipe = make_pipeline(mixture, bad_samples=policy(shards=True))
    bad = next(iter(mm.Loader(pipe)))["__lineage__"].bad
    assert {record.shard for record in bad} == {"gone/shard-000000.tar"}


def test_sources_in_another_order_are_refused(datasets):
    state = edited(mm.Loader(make_pipeline(mixed(datasets))).state_dict(), step=3)
    turned = dict(reversed(datasets.items()))
    with pytest.raises(mm.StateError, match=r"sources was \['a', 'b', 'c'\] and is \['c'"):
        mm.Loader(make_pipeline(mixed(turned))).load_state_dict(state)


def test_a_bad_sample_is_replaced_by_one_of_its_source(tmp_path):
    bad = write_tiny(tmp_path / "bad", [60, 60], bad=range(0, 120, 7))
    good = write_tiny(tmp_path / "good", [300])
    mixture = mm.Mixture(
        {"bad": (mm.open_dataset(bad), 1), "good": (mm.open_dataset(good), 1)}, epoch_steps=30
    )
    pipe = make_pipeline(mixture)
    whole = run(pipe)
    assert run(pipe, 3, 2).steps == whole.steps
    records = [record for step in whole.steps for record in step.bad]
    assert records
    for record in records:
        assert record.shard.startswith("bad/shard-")
        assert record.substitute[0].startswith("bad/shard-")
    assert all(all(step.valid) for step in whole.steps)


def test_a_transforms_draws_follow_the_sources_own_epochs(tmp_path):
    one, other = write_tiny(tmp_path / "one", [5]), write_tiny(tmp_path / "other", [50])
    mixture = mm.Mixture(
        {"one": (mm.open_dataset(one), 1), "other": (mm.open_dataset(other), 1)}, epoch_steps=5
    )
    draws = Counter()
    for batch in mm.Loader(make_pipeline(mixture, transforms=(_draw,))):
        draws.update(
            (key, draw)
            for key, draw, source in zip(batch["__key__"], batch["draw"], batch["__source__"])
            if source == "one"
        )
    assert len(draws) == sum(draws.values()) == 30  # five samples, six times each, all different


def _draw(sample):
    return sample | {"draw": str(mm.sample_rng(sample).integers(1 << 62))}


def test_a_bad_list_is_left_out_of_a_source(tmp_path):
    from mmstream.dataset.bad_list import write_bad

    url = write_tiny(tmp_path / "one", [20, 20])
    write_bad(mm.open_dataset(url), [(0, 3), (1, 0)])
    mixture = mm.Mixture({"one": (mm.open_dataset(url), 1)}, stop="all")
    order = make_pipeline(mixture).order
    seen = {ref for step in rows_of_run(order, 20) for ref in ((s, i) for _, s, i in step)}
    assert len(seen) == 38
    assert not seen & {(0, 3), (1, 0)}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "say when an epoch ends"),
        ({"stop": "first", "epoch_steps": 3}, "say when an epoch ends"),
        ({"stop": "last"}, "give .first., .all. or None"),
        ({"stop": "all", "changes": {3: {"a": 1, "b": 1, "c": 1}}}, "need epoch_steps"),
        ({"epoch_steps": "all"}, "give a whole number from 1 up"),
        ({"epoch_steps": 9, "changes": {3: {"a": 1}}}, "the sources are"),
        ({"epoch_steps": 9, "changes": {0: {"a": 1, "b": 1, "c": 1}}}, "with steps from 1 up"),
    ],
)
def test_impossible_mixtures_are_refused(datasets, given, named):
    with pytest.raises(mm.ConfigError, match=named):
        mm.Mixture({name: (dataset, 1) for name, dataset in datasets.items()}, **given)


def test_a_replay_of_a_mixture_tells_what_was_shown(datasets):
    from mmstream.audit import replay
    from mmstream.state import order_of_state

    pipe = make_pipeline(mixed(datasets, epoch_steps=9))
    loader = mm.Loader(pipe)
    batches = list(loader)
    plain = mm.Mixture({name: (d, 1) for name, d in datasets.items()}, epoch_steps=1)
    order, epoch, step = order_of_state(json.loads(json.dumps(loader.state_dict())), plain)
    assert (epoch, step) == (1, 0)
    rows = list(replay(plain, order, 0, range(9), keys=True))
    assert [row.key for row in rows] == [key for batch in batches for key in batch["__key__"]]
    assert rows[0].shard.split("/")[0] == batches[0]["__source__"][0]
