"""Samples that go through the first pass of a step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mmstream as mm
from mmstream.decoding.sample import PLAIN, SampleDecoding, tokenize


def decode_texts(
    samples: Sequence[dict[str, Any]], decode: mm.Decode | None
) -> list[tuple[dict[str, Any], Any]]:
    """Parse samples and tokenize their texts in one call. Return each, and its tokens.

    A sample with damaged JSON comes back unchanged, and without tokens.
    """
    decodings = [SampleDecoding(sample, decode) for sample in samples]
    planned = []
    for decoding in decodings:
        try:
            decoding.plan()
        except mm.SampleError:
            continue
        planned.append(decoding)
    tokenize(planned, decode or PLAIN)
    return [(decoding.sample, decoding.tokens) for decoding in decodings]
