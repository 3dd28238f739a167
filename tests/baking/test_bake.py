"""What a pipeline makes of a dataset, baked: the same steps, the same batches, to the last bit."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset

import mmstream as mm
from mmstream.baking import bake as bake_module, samples as samples_module
from mmstream.baking.bake import BakeReport, baker_of, begin, estimate
from mmstream.dataset.bad_list import write_bad
from mmstream.dataset.manifest import MANIFEST_NAME, Manifest
from mmstream.dataset.verify import verify
from mmstream.decoding.stored import encode_sample, tensor_bytes
from mmstream.storage import RemoteStore, open_store
from mmstream.train import TrainConfig, train
from mmstream.train.tokenizer import byte_tokenizer
from tests.converting.test_kill import dies_at
from tests.helpers.convert_corpus import tree
from tests.helpers.corpora import captioned, jpeg, write_corpus
from tests.helpers.families import PICTURES, conversation, qwen
from tests.helpers.media_files import audio_file, video_file

COUNTS = [13, 0, 9, 18]
POLICY = mm.BadSamplePolicy(quarantine=None)
BAD = (3, 17)


def fields_of(number: int) -> dict[str, bytes]:
    """A captioned picture. Two of them are damaged, and no two are of one size."""
    picture = b"no picture" if number in BAD else jpeg(number, (40 + number, 50))
    return {**captioned(number), "jpg": picture, "raw.npy": b"left as it is %d" % number}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), COUNTS, fields_of, checksums=True)


def add_values(sample: dict[str, Any]) -> dict[str, Any]:
    """Add a value of each kind; leave some samples out."""
    number = sample["json"]["id"]
    if number % 7 == 5:
        raise mm.SkipSample("a number that nobody likes")
    return sample | {
        "latent": torch.arange(6).reshape(2, 3).to(torch.bfloat16) * (number / 3),
        "vector": np.arange(4, dtype=np.float32) + number,
        "ragged": np.arange(number % 3, dtype=np.int16),
        "boxes": [torch.full((2,), float(i)) for i in range(number % 3)],
        "arrays": {"a": np.arange(number % 2)},
        "score": number / 3,
        "half": np.float16(number / 3),
        "flag": number % 2 == 0,
        "cls": number,
        "name": f"näme {number}",
        "none": None,
        "list": [number, "x", None, 0.5],
    }


def double(sample: dict[str, Any]) -> dict[str, Any]:
    """Change an array in place, as transforms may."""
    sample["vector"] *= 2
    return sample


def pipeline(dataset: Any, decode: mm.Decode | None, **options: Any) -> mm.Pipeline:
    dataset = dataset if isinstance(dataset, mm.Dataset | mm.Mixture) else mm.open_dataset(dataset)
    settings = {"global_batch_size": 4, "seed": 3, "bad_samples": POLICY} | options
    return mm.Pipeline(dataset, decode=decode, **settings)


def captions() -> mm.Decode:
    text = mm.TextDecoder(byte_tokenizer(), max_length=20, append_eos=True)
    return mm.Decode(image=mm.ImageDecoder(size=32), text=text)


def exactly(value: Any) -> Any:
    """Return what says all of a value of a batch: types, shapes, strides and bits."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.numel() else None
        return type(value), value.dtype, value.shape, strides, tensor_bytes(value)
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: exactly(each) for name, each in value.items()}
    return [exactly(each) for each in value] if isinstance(value, list) else (type(value), value)


def assert_same_batches(
    one: mm.Pipeline,
    other: mm.Pipeline,
    num_workers: int = 0,
    epochs: int = 1,
    reasons: bool = True,
) -> None:
    """Compare all batches of some epochs. Only the URLs of shards may differ.

    In a mixture, reasons have the name of the source before the shard, and baked ones do not.
    """
    loaders = mm.Loader(one, num_workers=0), mm.Loader(other, num_workers=num_workers)
    num_batches = 0
    for _ in range(epochs):
        for batch, baked in zip(*loaders, strict=True):
            num_batches += 1
            assert list(batch) == list(baked)
            lineages = batch.pop("__lineage__"), baked.pop("__lineage__")
            of_lineage = ["planned", "shown", "valid", "num_cut_texts"]
            for name in [*of_lineage, *["text_losses"] * reasons]:
                assert len({repr(getattr(each, name)) for each in lineages}) == 1, name
            records, others = (
                [
                    (bad.row, bad.index, bad.kind, bad.reason * reasons, bad.substitute)
                    for bad in each.bad
                ]
                for each in lineages
            )
            assert records == others
            for name in batch.keys() - {"__url__"}:
                assert exactly(batch[name]) == exactly(baked[name]), name
    assert num_batches > 0


def bake(source: mm.Pipeline, folder: Path | str, **options: Any) -> mm.Pipeline:
    """Bake a pipeline without a bar, and return a pipeline of what was baked."""
    mm.bake(source, folder, progress=False)
    return pipeline(folder, mm.Decode.baked(), **options)


@pytest.fixture
def baked_captions(corpus: str, tmp_path: Path) -> Path:
    """A folder with the pictures and captions of the corpus, baked."""
    bake(pipeline(corpus, captions()), tmp_path / "baked")
    return tmp_path / "baked"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pictures_captions_and_values_of_all_kinds_come_back(
    corpus: str, tmp_path: Path, num_workers: int
) -> None:
    options: dict[str, Any] = {"drop_last": False, "before": (), "global_batch_size": 6}
    source = pipeline(corpus, captions(), transforms=(add_values,), **options)
    report = mm.bake(source, tmp_path / "baked", num_workers=num_workers, progress=False)
    assert (report.num_samples, report.num_shards) == (sum(COUNTS), len(COUNTS))
    assert report.num_bad - report.num_left_out == len(BAD)
    assert "not an image" in report.first_reason
    baked = pipeline(tmp_path / "baked", mm.Decode.baked(), **options)
    assert_same_batches(source, baked, num_workers, epochs=2 if num_workers == 0 else 1)
    source, baked = (
        pipeline(each.dataset, each.decode, transforms=(*each.transforms, double), **options)
        for each in (source, baked)
    )
    assert_same_batches(source, baked)


def test_plans_are_those_of_the_source(corpus: str, tmp_path: Path) -> None:
    dataset = mm.open_dataset(corpus)
    write_bad(dataset, [(0, 4), (2, 1)])
    try:
        source = pipeline(corpus, mm.Decode(image=mm.ImageDecoder(size=600)))
        mm.bake(source, tmp_path / "baked", progress=False)
    finally:
        write_bad(dataset, [])
    baked = mm.open_dataset(tmp_path / "baked")
    assert baked.manifest.num_bytes > 10 * dataset.manifest.num_bytes
    assert baked.counts.tolist() == COUNTS
    assert baked.bad.tolist() == [[0, 4], [2, 1]]
    assert baked.corpus.num_bytes == dataset.manifest.num_bytes
    with pytest.raises(mm.SampleError, match="it is on the bad list"):
        baked.read(0, 4)
    mine, others = (
        mm.Order.from_counts(
            each.counts, global_batch_size=8, num_bytes=each.corpus.num_bytes, bad=each.bad
        ).identity()
        for each in (source.dataset, baked)
    )
    assert mine == others
    order = pipeline(tmp_path / "baked", mm.Decode.baked()).order
    for epoch, step in product(range(3), range(source.order.steps_per_epoch)):
        np.testing.assert_equal(source.order.refs(epoch, step), order.refs(epoch, step))


def add_to_text(sample: dict[str, Any]) -> dict[str, Any]:
    """Use ``json`` as it is parsed, and change it and a text."""
    json_field = {**sample["json"], "seen": sample["json"]["id"] * 2}
    return {**sample, "json": json_field, "caption.txt": f"text {json_field['seen']}"}


def test_functions_before_decoding_find_json_parsed_in_a_baked_dataset(
    corpus: str, tmp_path: Path
) -> None:
    mm.bake(pipeline(corpus, captions(), transforms=(add_caption,)), tmp_path, progress=False)
    options: dict[str, Any] = {"before": (add_to_text,), "shuffle": False}
    numbers = []
    for batch in mm.Loader(pipeline(tmp_path, mm.Decode.baked(), **options)):
        numbers += [content["id"] for content in batch["json"]]
        assert [content["seen"] for content in batch["json"]] == [2 * n for n in numbers[-4:]]
        assert batch["caption"] == [f"text {2 * n}" for n in numbers[-4:]]
    assert len(numbers) == 40


def add_caption(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "caption": "a text"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_token_ids_are_padded_as_before(corpus: str, tmp_path: Path, side: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = side
    text = mm.TextDecoder(tokenizer, max_length=24, padding="max_length")
    source = pipeline(corpus, mm.Decode(text=text))
    assert_same_batches(source, bake(source, tmp_path / "baked"))
    flat = pipeline(corpus, mm.Decode(text=text), batching=mm.Flat())
    assert_same_batches(flat, pipeline(tmp_path / "baked", mm.Decode.baked(), batching=mm.Flat()))


@pytest.mark.slow
def test_conversations_of_a_qwen_processor_come_back(tmp_path: Path) -> None:
    def fields(number: int) -> dict[str, bytes]:
        pictures = [PICTURES[(number + i) % len(PICTURES)] for i in range(3)]
        sample = conversation(*pictures)
        if number == 5:
            sample["0.jpg"] = b"no picture"
        return {**sample, "json": json.dumps(sample["json"]).encode()}

    folder = write_corpus(tmp_path / "corpus", [7, 5], fields)
    source = pipeline(folder, qwen().decode)
    baked = bake(source, tmp_path / "baked")
    assert_same_batches(source, baked)
    assert baked.decode.picture_names == source.decode.picture_names


def test_videos_and_audio_features_come_back(tmp_path: Path) -> None:
    def fields(number: int) -> dict[str, bytes]:
        if number % 4 == 3:
            return {"txt": b"nothing to see"}
        files = {"mp4": video_file("mp4", num_frames=3 + number % 2)} if number % 2 else {}
        return {**files, "wav": audio_file("wav", seconds=0.2 + number / 50)}

    folder = write_corpus(tmp_path / "corpus", [6, 5], fields)
    decode = mm.Decode(
        video=mm.VideoDecoder(num_frames=2, size=32),
        audio=mm.AudioDecoder(sample_rate=16_000, features=mm.families.whisper.WhisperFeatures()),
    )
    source = pipeline(folder, decode, global_batch_size=3)
    assert_same_batches(source, bake(source, tmp_path / "baked", global_batch_size=3))


def encode(samples: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Make latents of the pictures of a batch."""
    pictures = torch.stack([sample["image"] for sample in samples]).to(device)
    latents = pictures.float().mean(dim=(2, 3)).half()
    return [
        {"txt": sample["txt"], "latent": latent}
        for sample, latent in zip(samples, latents, strict=True)
    ]


def encode_one(sample: dict[str, Any]) -> dict[str, Any]:
    return encode([sample], torch.device("cpu"))[0]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_latents_of_a_batch_function_are_those_of_single_samples(
    corpus: str, tmp_path: Path, device: str
) -> None:
    plain = pipeline(corpus, mm.Decode(image=mm.ImageDecoder(size=32)))
    mm.bake(
        plain, tmp_path / "baked", batch_function=encode, batch_size=5, device=device,
        progress=False,
    )  # fmt: skip
    source = pipeline(corpus, plain.decode, transforms=(encode_one,))
    baked = pipeline(tmp_path / "baked", mm.Decode.baked())
    assert_same_batches(source, baked)
    assert next(iter(mm.Loader(baked)))["latent"].dtype is torch.float16


def test_a_mixture_of_baked_datasets_is_that_of_their_sources(corpus: str, tmp_path: Path) -> None:
    folders = {"a": corpus, "b": write_corpus(tmp_path / "other", [11], captioned)}
    baked = {
        name: bake(pipeline(folder, captions()), tmp_path / name).dataset
        for name, folder in folders.items()
    }
    sources = {name: mm.open_dataset(folder) for name, folder in folders.items()}
    mixture, of_baked = (
        mm.Mixture({name: (dataset, 1) for name, dataset in each.items()}, stop="all")
        for each in (sources, baked)
    )
    before = (drop_raw,)
    assert_same_batches(
        pipeline(mixture, captions(), transforms=before),
        pipeline(of_baked, mm.Decode.baked(), transforms=before),
        reasons=False,
    )


def drop_raw(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "raw.npy"}


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"noise": mm.sample_rng(sample, "noise").normal(size=2)}


class Counting:
    """A transform that is another one at each call."""

    num_calls = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.num_calls += 1
        return sample | {"cls": self.num_calls}


@pytest.mark.parametrize(
    ("decode", "transforms", "epoch", "message"),
    [
        (
            mm.Decode(image=mm.ImageDecoder(size=32, flip=0.5)), (), None,
            "the decoder of 'image' crops, flips or cuts",
        ),
        (captions(), (noisy,), None, r"000000.noise.npy: depends on random draws"),
        (captions(), (Counting(),), 0, "cls: differs from call to call"),
    ],
    ids=["a decoder that draws", "a transform that draws", "no function of its sample"],
)  # fmt: skip
def test_what_differs_from_call_to_call_is_refused(
    corpus: str, tmp_path: Path, decode: mm.Decode, transforms: tuple, epoch: Any, message: str
) -> None:
    source = pipeline(corpus, decode, transforms=transforms)
    with pytest.raises(mm.ConfigError, match=message):
        mm.bake(source, tmp_path / "baked", epoch_of_draws=epoch, progress=False)


def test_draws_may_be_those_of_one_epoch(corpus: str, tmp_path: Path) -> None:
    source = pipeline(corpus, captions(), transforms=(noisy,))
    mm.bake(source, tmp_path / "baked", epoch_of_draws=0, progress=False)
    assert_same_batches(source, pipeline(tmp_path / "baked", mm.Decode.baked()))


VALUES: dict[str, tuple[Any, str]] = {
    "a tuple": ((1, 2), "a tuple with this content cannot be stored"),
    "NaN": ([float("nan")], "a list with this content"),
    "an object": (object(), "a object with this content"),
    "objects": (np.array([None]), "a ndarray with this content"),
    "half a pair": ("\ud800", "a str with this content"),
    "a mask": (np.ma.masked_array([1, 2], [0, 1]), "a MaskedArray with this content"),
    "a name": (HTTPStatus.OK, "a HTTPStatus with this content"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_would_not_come_back_are_refused(
    corpus: str, tmp_path: Path, name: str
) -> None:
    value, message = VALUES[name]
    source = pipeline(corpus, None, transforms=(lambda sample: sample | {"odd": value},))
    with pytest.raises(mm.ConfigError, match=rf"000000: field 'odd': {message}"):
        mm.bake(source, tmp_path / "baked", progress=False)


def test_another_pipeline_or_folder_is_refused_by_its_first_difference(
    corpus: str, tmp_path: Path, baked_captions: Path
) -> None:
    source = pipeline(corpus, captions())
    assert mm.bake(source, baked_captions, progress=False).was_finished
    larger = mm.Decode(image=mm.ImageDecoder(size=40), text=captions().text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for other, dest, message in (
        (pipeline(corpus, larger), baked_captions, "decode.image.size was .* and is now"),
        (
            pipeline(corpus, captions(), transforms=(drop_raw,)), baked_captions,
            r"transforms was \[\] and is now",
        ),
        (source, f"{corpus}/.", "is the source"),
        (source, tmp_path / "other", "holds something else"),
    ):  # fmt: skip
        with pytest.raises(mm.ConfigError, match=message):
            mm.bake(other, dest, progress=False)


def test_samples_that_no_epoch_has_do_not_count_as_bad(tmp_path: Path) -> None:
    strict = mm.BadSamplePolicy(max_fraction=0.01, min_samples=10, quarantine=None)
    url = write_corpus(tmp_path / "corpus", [20, 20], captioned)
    write_bad(mm.open_dataset(url), [(0, 3)], duplicates=np.array([[0, 5], [1, 7], [1, 8]]))
    source = pipeline(mm.open_dataset(url), captions(), bad_samples=strict)
    assert mm.bake(source, tmp_path / "baked", progress=False).num_samples == 40


def test_code_that_changed_in_mid_bake_is_named_with_what_to_do(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = mm.BadSamplePolicy(max_fraction=0.01, min_samples=10, quarantine=None)
    dest = tmp_path / "baked"
    source = pipeline(corpus, captions(), transforms=(drop_raw,), bad_samples=strict)
    with pytest.raises(mm.errors.BadSampleLimitError):
        mm.bake(source, dest, progress=False)
    source = pipeline(corpus, captions(), transforms=(drop_raw,))
    with monkeypatch.context() as edited:
        edited.setattr("mmstream.baking.bake.source_sha256", lambda function: "0" * 64)
        changed = r"the code of tests.baking.test_bake.drop_raw or of its module has changed\. Undo"
        with pytest.raises(mm.ConfigError, match=f"an unfinished dataset .*: {changed}"):
            mm.bake(source, dest, progress=False)
    assert mm.bake(source, dest, progress=False).num_new_bytes > 0


def test_a_batch_function_gets_its_device_and_another_gpu_does_not_go_on(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = set()

    def on_device(samples: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
        devices.add(str(device))
        return samples

    def bake() -> BakeReport:
        return mm.bake(
            pipeline(corpus, captions()), tmp_path / "baked", batch_function=on_device,
            device="cuda:1", progress=False,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(mm.ConfigError, match="'cuda:1': torch finds no CUDA device here"):
        bake()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one")
    assert bake().num_samples == sum(COUNTS)
    assert devices == {"cuda:1"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    with pytest.raises(
        mm.ConfigError, match=r"batch.device.name was one and is now another\. Name"
    ):
        bake()


TOO_LONG = mm.TextDecoder(byte_tokenizer(), max_length=1 << 23, padding="max_length")

IMPOSSIBLE: dict[str, tuple[Callable[[str], Any], str]] = {
    "no decoders": (lambda corpus: mm.bake(pipeline(corpus, None), "x"), "no decoders"),
    "zero copy": (
        lambda corpus: mm.bake(pipeline(corpus, None, zero_copy=True), "x"),
        "zero_copy=True decodes nothing",
    ),
    "a mixture": (
        lambda corpus: mm.bake(
            pipeline(mm.Mixture({"a": (mm.open_dataset(corpus), 1)}, stop="all"), captions()), "x"
        ),
        "a mixture is several datasets",
    ),
    "no pipeline": (lambda corpus: mm.bake(mm.open_dataset(corpus), "x"), "give mm.Pipeline"),
    "batch size": (
        lambda corpus: mm.bake(pipeline(corpus, captions()), "x", batch_size=0),
        "batch_size=0",
    ),
    "epoch": (
        lambda corpus: mm.bake(pipeline(corpus, captions()), "x", epoch_of_draws=-1),
        "epoch_of_draws=-1",
    ),
    "device": (
        lambda corpus: mm.bake(pipeline(corpus, captions()), "x", device="gpu"),
        "give cpu, cuda",
    ),
    "a padded length that no manifest may say": (
        lambda corpus: mm.bake(pipeline(corpus, mm.Decode(text=TOO_LONG)), "x"),
        "max_length=8388608, and a manifest may say 4194304 at most",
    ),
    "not baked": (lambda corpus: pipeline(corpus, mm.Decode.baked()), "was not made by"),
    "a source not baked": (
        lambda corpus: pipeline(
            mm.Mixture({name: (mm.open_dataset(corpus), 1) for name in "ab"}, epoch_steps=1),
            mm.Decode.baked(),
        ),
        "in a mixture, bake all sources or none",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_calls_are_refused(
    corpus: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = IMPOSSIBLE[name]
    with pytest.raises(mm.ConfigError, match=message):
        call(corpus)
    assert not list(tmp_path.iterdir())


def test_packs_of_a_baked_dataset_are_refused(baked_captions: Path) -> None:
    with pytest.raises(mm.ConfigError, match="a baked dataset has tokens"):
        pipeline(baked_captions, mm.Decode.baked(), batching=mm.Pack(64))


def test_a_bake_that_is_trained_on_as_files_is_refused(
    baked_captions: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        mm.ConfigError, match=r"baked: was written by .* and the model's own pipeline decodes"
    ):
        train(TrainConfig(url=str(baked_captions), out=str(tmp_path), device="cpu"))


def test_a_batch_function_must_return_its_samples(corpus: str, tmp_path: Path) -> None:
    source = pipeline(corpus, captions())

    def fails(samples: list[Any], _device: torch.device) -> list[Any]:
        raise ValueError("no room")

    for function, error, message in (
        (lambda samples, _: samples[:1], mm.ConfigError, "got 5 samples and returned 1"),
        (lambda samples, _: None, mm.ConfigError, "must return a list of samples"),
        (fails, mm.MMStreamError, r"\[0\.\.5\]: fails: ValueError: no room"),
    ):
        with pytest.raises(error, match=message):
            mm.bake(
                source, tmp_path / "baked", batch_function=function, batch_size=5, progress=False
            )  # type: ignore[arg-type]


def test_too_many_bad_samples_stop_a_bake(corpus: str, tmp_path: Path) -> None:
    strict = mm.BadSamplePolicy(max_fraction=0.01, min_samples=10, quarantine=None)
    with pytest.raises(mm.errors.BadSampleLimitError, match="of 13 samples are bad, more than"):
        mm.bake(pipeline(corpus, captions(), bad_samples=strict), tmp_path / "a", progress=False)

    def refuse_all(sample: dict[str, Any]) -> dict[str, Any]:
        raise mm.SkipSample("all of them")

    source = pipeline(corpus, captions(), transforms=(refuse_all,))
    with pytest.raises(mm.MMStreamError, match="none of 40 samples is good"):
        mm.bake(source, tmp_path / "b", progress=False)


def test_a_decoder_that_ran_out_of_time_ends_the_shard(corpus: str, tmp_path: Path) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        raise mm.errors.TimeoutError("took 9 s")

    decode = mm.Decode({"jpg": lambda data: slow({})})
    with pytest.raises(mm.MMStreamError, match=r"took 9 s.*; a slow machine must not make"):
        mm.bake(pipeline(corpus, decode), tmp_path / "baked", progress=False)


@pytest.mark.slow
def test_killed_at_any_write_a_bake_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus", [3, 2], captioned)
    Path(folder, "deep").mkdir()
    for name in ("shard-000001.tar", "shard-000001.tar.idx"):
        Path(folder, name).rename(Path(folder, "deep", name))
    manifest = Path(folder, MANIFEST_NAME)
    shards = Manifest.from_bytes(manifest.read_bytes()).shards
    deep = tuple(
        type(shard)(shard.name.replace("shard-000001", "deep/shard-000001"), shard.num_samples,
                    shard.num_bytes)
        for shard in shards
    )  # fmt: skip
    manifest.write_bytes(Manifest(deep).to_bytes())
    write_bad(mm.open_dataset(folder), [(1, 1)])
    source = pipeline(folder, mm.Decode(image=mm.ImageDecoder(size=8)))
    mm.bake(source, tmp_path / "whole", progress=False)
    expected = tree(tmp_path / "whole")
    moment = 0
    while dies_at(moment, partial(mm.bake, source, tmp_path / f"{moment}", progress=False)):
        dest = tmp_path / f"{moment}"
        if not (dest / MANIFEST_NAME).exists():
            with pytest.raises(mm.errors.ManifestError):
                mm.open_dataset(dest)
        mm.bake(source, dest, progress=False)
        assert tree(dest) == expected
        moment += 3
    assert tree(tmp_path / f"{moment}") == expected  # of the bake that nobody killed
    assert moment > 15  # one of three: each bake waits for the disk


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its file open
def test_files_and_uploads_of_others_below_a_destination_stay(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = mm.open_dataset(corpus)
    ours, theirs = ".shard-000000.tar.1-a.tmp", ".notes.txt.1-a.tmp"
    for name in (ours, theirs):
        (tmp_path / name).touch()
    begin(open_store(str(tmp_path)), dataset, {})
    assert not (tmp_path / ours).exists()
    assert (tmp_path / theirs).exists()
    patterns: list[str] = []
    monkeypatch.setattr(RemoteStore, "remove_uploads", lambda _, names: patterns.append(names))
    bake_module._remove_temporary_files(open_store("s3://bucket/corpus"), dataset)
    (pattern,) = patterns
    assert re.fullmatch(pattern, "shard-000000.tar")
    assert re.fullmatch(pattern, "mmstream.index.0123456789ab")
    assert not re.fullmatch(pattern, "data/val/shard-000007.tar")


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves it open
def test_webdataset_reads_what_was_baked(corpus: str, tmp_path: Path) -> None:
    source = pipeline(corpus, captions(), shuffle=False, transforms=(add_values,))
    bake(source, tmp_path / "baked")
    path = str(tmp_path / "baked" / "shard-000000.tar")
    files = webdataset.WebDataset(path, shardshuffle=False).map(drop_raw).decode()
    sample = next(each for each in list(files) if each["__key__"] == "000000")
    del files
    gc.collect()  # here, and not in another test
    expected = source.take(1)[0]
    assert [sample[name] for name in ("txt", "cls", "score.json")] == [
        expected[name] for name in ("txt", "cls", "score")
    ]
    np.testing.assert_array_equal(sample["input_ids.npy"], expected["input_ids"])
    np.testing.assert_array_equal(
        sample["image.hwc.npy"], expected["image"].permute(1, 2, 0).numpy()
    )


def test_a_baked_dataset_is_verified_and_refused_samples_keep_their_place(
    baked_captions: Path,
) -> None:
    dataset = mm.open_dataset(baked_captions)
    assert list(verify(dataset)) == []
    with pytest.raises(
        mm.errors.DecodeError, match=r"shard-000000.tar\[3\] 000003.jpg: not an image"
    ):
        dataset.read(0, 3)
    raw = pipeline(baked_captions, None, shuffle=False)  # without Decode they are bad, too
    assert [bad.index for batch in mm.Loader(raw) for bad in batch["__lineage__"].bad][:1] == [3]


def test_damage_in_a_baked_file_is_a_bad_sample(baked_captions: Path) -> None:
    path = baked_captions / "shard-000000.tar"
    path.write_bytes(path.read_bytes().replace(b"\x93NUMPY", b"nonono", 1))
    dataset = mm.open_dataset(baked_captions, checksums=False)
    baked = pipeline(dataset, mm.Decode.baked(), shuffle=False)
    record = next(bad for batch in mm.Loader(baked) for bad in batch["__lineage__"].bad)
    assert record.index == 0
    assert "000000.input_ids.npy: npy: " in record.reason


def test_a_tensor_of_another_shape_than_the_manifest_says_is_kept_out_of_the_batch(
    corpus: str, tmp_path: Path
) -> None:
    source = pipeline(corpus, mm.Decode(image=mm.ImageDecoder(size=8)))
    stored = bake(source, tmp_path / "a").decode.stored
    assert stored.shapes == {"image": (192,)}
    memory = {"image": torch.zeros(3, 192, dtype=torch.uint8)}
    files = [
        {name: data for name, (data, _) in encode_sample({"image.hwc": array}).items()}
        for array in (np.full((8, 8, 3), 7, np.uint8), np.full((4, 16, 3), 7, np.uint8))
    ]
    right, wide, nothing = stored.decode_all([*files, {}], memory)
    assert right["image"].shape == (3, 8, 8)
    assert right["image"].data_ptr() == memory["image"].data_ptr()
    torch.testing.assert_close(wide["image"], torch.full((3, 4, 16), 7, dtype=torch.uint8))
    assert nothing == {}
    assert memory["image"].sum(1).tolist() == [7 * 192, 0, 0]


def test_a_manifest_of_a_stranger_gets_no_memory_for_what_it_says(
    corpus: str, tmp_path: Path
) -> None:
    decode = mm.Decode(image=mm.ImageDecoder(size=8), text=mm.TextDecoder(byte_tokenizer()))
    bake(pipeline(corpus, decode), tmp_path / "baked")
    path = tmp_path / "baked" / MANIFEST_NAME
    manifest = Manifest.from_bytes(path.read_bytes())
    content = manifest.source["bake"]
    image = content["files"]["image.hwc.npy"]
    settings: list[tuple[dict[str, Any], str, Any]] = [
        *((manifest.source, "bake", nonsense) for nonsense in ({"version": 2}, {"files": 3}, [])),
        (image, "shape", [-1, -192]),
        (content["collate"], "pad_to", 2_000_000_000),
        (content["collate"], "pad_to", -5),
        (content["collate"], "pad_token_id", 1 << 63),
        (content["collate"], "video_fields", {"clip": [1 << 20, 1 << 20]}),
        (content["collate"], "audio_fields", {"wav": [[-1], "float32"]}),
    ]
    for part, name, value in settings:
        before = dict(part)
        part[name] = value
        path.write_bytes(manifest.to_bytes())
        with pytest.raises(mm.errors.ManifestError, match=r"no files of a bake: |baked in version"):
            pipeline(tmp_path / "baked", mm.Decode.baked())
        part.clear()
        part.update(before)
    for name in ("float", "quint8", "complex32", "no type"):  # of which numpy has another or none
        image["dtype"] = name
        path.write_bytes(manifest.to_bytes())
        batch = next(iter(mm.Loader(pipeline(tmp_path / "baked", mm.Decode.baked()))))
        assert batch["image"].shape[1:] == (3, 8, 8)


def test_an_estimate_says_what_the_files_will_be(corpus: str) -> None:
    lines = estimate(baker_of(pipeline(corpus, captions())), 12)
    assert lines[0] == "12 samples tried, 1 of them bad or left out"
    said = "\n".join(lines)
    assert "\n  .image.hwc.npy: uint8 [32, 32, 3], 3,200 bytes" in said
    assert "  bad: shard-000000.tar[3] 000003.jpg" in said
    assert lines[-1].startswith("40 samples of 0.0")


@pytest.mark.slow
@pytest.mark.s3
def test_a_bake_from_s3_to_s3(corpus: str, s3: str) -> None:
    for path in Path(corpus).iterdir():
        open_store(f"{s3}/source").write(path.name, path.read_bytes())
    source = pipeline(f"{s3}/source", captions())
    assert_same_batches(source, bake(source, f"{s3}/baked"))


def test_samples_are_cut_into_chunks_of_bounded_bytes(
    corpus: str, baked_captions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "BYTES_AT_ONCE", 1)
    bake(pipeline(corpus, captions()), tmp_path / "single")
    assert tree(baked_captions) == tree(tmp_path / "single")
