"""Rows of published corpora become the same samples in every version.

Where a change is meant, write the new golden values, and look at the difference:

    python -m tests.converting.test_golden_rows > tests/data/published_rows/expected.json
"""

from __future__ import annotations

import hashlib
import json
import sys

import pytest

from mmstream.converting.draft import Media, StoredSample, samples_of
from mmstream.converting.formats.formats import draft_of
from mmstream.converting.rows.open import open_rows
from tests.helpers.paths import ROOT

DATA = ROOT / "tests/data"
FILES = [
    *("conversations/mllm_demo.json", "conversations/qwen_single_images.json"),
    *("published_rows/mllm_audio_demo.json", "published_rows/mllm_video_demo.json"),
    *("published_rows/v1_multimodal_demo.jsonl", "published_rows/qwen_video.json"),
    *("published_rows/caps_boxes_coco2014_val.jsonl", "published_rows/captions_val2017.jsonl"),
    *("foreign/mpdata.tar", "foreign/sample.tgz"),
]
STAND_INS = {"image": "jpg", "video": "mp4", "audio": "wav"}


def digest(fields):
    """Return a checksum of the members of a sample, in their order."""
    hashes = [(name, hashlib.sha256(data).hexdigest()) for name, data in fields.items()]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]


def golden(name):
    """Return [key, format, paths of the media, checksum] of all samples of a file.

    The bytes of a medium are its path here, so another order of the media is noticed.
    """
    samples = []
    with open_rows(DATA / name) as source:
        for row in source.select(range(source.num_rows)).read():
            if isinstance(row.value, StoredSample):
                samples.append([row.value.key, "tar", [], digest(row.value.fields)])
                continue
            draft = draft_of(row.value)
            media = [Media(STAND_INS[ref.kind], ref.path.encode()) for ref in draft.media]
            paths = [ref.path for ref in draft.media]
            for key, fields in samples_of(f"{row.index:06d}", draft, media, per_caption=True):
                samples.append([key, draft.format, paths, digest(fields)])
    return samples


@pytest.mark.parametrize("name", FILES)
def test_rows_of_published_corpora_become_the_same_samples_as_ever(name):
    expected = json.loads((DATA / "published_rows/expected.json").read_text())
    assert golden(name) == expected[name]


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(sample, ensure_ascii=False) for sample in golden(name))
        + "\n]"
        for name in FILES
    ]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
