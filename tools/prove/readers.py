"""Prove that other libraries read what `mm.convert` writes.

    python -m tools.prove.readers --peers-python ~/peers/bin/python

It converts photos with captions, texts alone, and conversations. webdataset, Hugging Face's
`datasets` and Megatron-Energon must then give the same keys and bytes as `mm.open_dataset`, and
img2dataset's reader and pyarrow the same rows of the sidecars. The peers run with a Python of their
own; one that is not installed there is named.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_ROWS = 60


def main() -> int:
    """Convert, let every peer read, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--read", nargs=2, metavar=("READER", "FOLDER"), help="used by itself")
    arguments = parser.parse_args()
    if arguments.read is not None:
        reader, folder = arguments.read
        print(json.dumps(dict(READERS[reader](Path(folder)))))
        return 0
    num_failures = 0
    with tempfile.TemporaryDirectory() as name:
        for kind, rows in write_rows(Path(name)).items():
            dest = Path(name, kind)
            expected = convert(rows, dest)
            for reader in READERS:
                words = [arguments.peers_python, __file__, "--read", reader, str(dest)]
                result = subprocess.run(words, capture_output=True, text=True, check=False)
                verdict = judge(reader, result, expected)
                num_failures += not verdict.startswith(("the same", "is not installed"))
                print(f"{kind}, {reader}: {verdict}")
    return 1 if num_failures else 0


def judge(reader: str, result: subprocess.CompletedProcess[str], expected: dict[str, Any]) -> str:
    """Say whether a reader gave what was expected."""
    if result.returncode:
        last = result.stderr.strip().rpartition("\n")[2]
        return "is not installed" if "No module named" in last else f"failed: {last}"
    given = json.loads(result.stdout.splitlines()[-1])
    if reader in ("webdataset", "datasets", "energon"):
        return f"the same {len(given)} samples" if given == expected else "OTHER SAMPLES"
    keys = set(given) == set(expected)
    return f"the same {len(given)} keys" if keys else "OTHER KEYS"


def write_rows(folder: Path) -> dict[str, Path]:
    """Write three files of rows and their pictures."""
    from PIL import Image

    for i in range(NUM_ROWS):
        file = io.BytesIO()
        Image.new("RGB", (40, 30), (i, 2 * i, 90)).save(file, "JPEG")
        (folder / f"{i}.jpg").write_bytes(file.getvalue())
    turns = [
        {"role": "user", "content": "<image>What?"},
        {"role": "assistant", "content": "A bear."},
    ]
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "captions": lambda i: {"id": i, "image": f"{i}.jpg", "text": f"photo {i}", "url": f"u{i}"},
        "texts": lambda i: {"text": f"text {i}"},
        "conversations": lambda i: {"id": i, "images": [f"{i}.jpg"], "messages": turns},
    }
    paths = {kind: folder / f"{kind}.jsonl" for kind in kinds}
    for kind, row in kinds.items():
        paths[kind].write_text("".join(json.dumps(row(i)) + "\n" for i in range(NUM_ROWS)))
    return paths


def convert(rows: Path, dest: Path) -> dict[str, Any]:
    """Convert, and return {key: {field: hash}} as mmstream reads it."""
    import mmstream as mm

    mm.convert(rows, dest, samples_per_shard=25, progress=False)
    return {sample["__key__"]: _hashes(sample) for sample in mm.open_dataset(dest)}


def _hashes(sample: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(value).hexdigest()
        for name, value in sample.items()
        if not name.startswith("__")
    }


def _tars(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("shard-*.tar")))


def read_webdataset(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read with a stock `wds.WebDataset`."""
    import webdataset as wds

    for sample in wds.WebDataset(_tars(folder), shardshuffle=False):
        yield sample["__key__"], _hashes(sample)


def read_datasets(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read with Hugging Face's builder, streaming and without decoding."""
    import datasets

    stream = datasets.load_dataset(
        "webdataset", data_files={"train": _tars(folder)}, split="train", streaming=True
    )
    for name, feature in stream.features.items():
        if isinstance(feature, datasets.Image):
            stream = stream.cast_column(name, datasets.Image(decode=False))
    for sample in stream:
        fields = {}
        for name, value in sample.items():
            data = value["bytes"] if isinstance(value, dict) and "bytes" in value else value
            if name == "json":
                data = _json_of(folder, sample["__key__"])
            fields[name] = data.encode() if isinstance(data, str) else data
        yield sample["__key__"], _hashes(fields)


def _json_of(folder: Path, key: str) -> bytes:
    """Return the bytes of a json, which `datasets` parses."""
    import tarfile

    for path in _tars(folder):
        with tarfile.open(path) as tar:
            if f"{key}.json" in tar.getnames():
                member = tar.extractfile(f"{key}.json")
                assert member is not None
                return member.read()
    raise KeyError(key)


def read_sidecars(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read the sidecars as one table, as DuckDB and pandas do."""
    import pyarrow.dataset as pads

    table = pads.dataset(sorted(map(str, folder.glob("*.parquet")))).to_table()
    for row in table.select(["key", "status"]).to_pylist():
        yield row["key"], row["status"]


def read_img2dataset(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read the sidecars with img2dataset's reader of Parquet, as a list of URLs with captions."""
    import fsspec
    import pyarrow.ipc as ipc
    from img2dataset.reader import Reader

    temporary = folder.parent / f"{folder.name}-feather"
    temporary.mkdir()
    reader = Reader(
        url_list=str(folder),
        input_format="parquet",
        url_col="url",
        caption_col="caption",
        verify_hash_col=None,
        verify_hash_type=None,
        save_additional_columns=["key", "width", "height", "sha256"],
        number_sample_per_shard=1000,
        done_shards=set(),
        tmp_path=str(temporary),
    )
    for _, path in reader:
        with fsspec.open(path, "rb") as file:
            for row in ipc.open_file(file).read_all().to_pylist():
                yield row["key"], row["url"]


def read_energon(folder: Path) -> Iterator[tuple[str, Any]]:
    """Read with Megatron-Energon, after its own command has prepared the tars."""
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_val_dataset,
        stateless,
    )

    prepared = folder.parent / f"{folder.name}-energon"
    prepared.mkdir()
    for path in _tars(folder):
        (prepared / Path(path).name).symlink_to(path)
    tool = str(Path(sys.executable).parent / "energon")
    options = "--non-interactive --no-progress --split-ratio 0,1,0 --sample-type CrudeWebdataset"
    subprocess.run([tool, "prepare", *options.split(), prepared], check=True, stdout=sys.stderr)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        """Leaves samples as their bytes."""

        decoder = None
        cookers = (Cooker(stateless(lambda sample: sample)),)

        def batch(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return samples

    settings = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(
        str(prepared), batch_size=7, worker_config=settings, task_encoder=Encoder()
    )
    for samples in get_loader(dataset):
        for sample in samples:
            yield sample["__key__"], _hashes(sample)


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    "webdataset": read_webdataset,
    "datasets": read_datasets,
    "energon": read_energon,
    "pyarrow": read_sidecars,
    "img2dataset": read_img2dataset,
}

if __name__ == "__main__":
    sys.exit(main())
