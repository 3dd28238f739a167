"""`SampleDict`: the dict that users get as a sample. It shows itself in one line.

`Dataset` and `Pipeline.take` return it. Samples inside a pipeline are plain dicts, which are made
twice as fast.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from mmstream.display.text import MAX_VALUE_CHARACTERS, value_text
from mmstream.errors import escaped

MAX_NAMED_FIELDS = 20
"""Fields in the line of a sample."""

MAX_LINE_CHARACTERS = 1000


class SampleDict(dict[str, Any]):
    """A sample: a dict in every respect, but for how it is shown.

    Its ``repr`` is one line and never the bytes of a file. In a notebook it shows its images and
    its text.

    Examples:
        >>> dataset = mm.open_dataset("shards/")
        >>> dataset[0]
        {'__key__': '000000001', ...'jpg': <... JPEG ...>, ...}
    """

    __slots__ = ()

    def __repr__(self) -> str:
        entries = [
            f"{value_text(str(name))}: {_value_text(name, value)}"
            for name, value in islice(self.items(), MAX_NAMED_FIELDS)
        ]
        if len(self) > len(entries):
            entries.append(f"... {len(self) - len(entries):,} more")
        return f"{{{escaped(', '.join(entries), MAX_LINE_CHARACTERS)}}}"

    def _repr_html_(self) -> str | None:
        from mmstream.display.samples import sample_html

        is_sample = isinstance(self.get("__key__"), str)  # not what a collate function made of it
        return sample_html(self) if is_sample else None

    def copy(self) -> SampleDict:
        """Return a shallow copy."""
        return SampleDict(self)


def _value_text(name: str, value: Any) -> str:
    """Return a value of a sample: the end of the shard's URL, the sample's position in it, ..."""
    if name == "__url__" and isinstance(value, str) and len(value) > MAX_VALUE_CHARACTERS:
        return repr("..." + value[-MAX_VALUE_CHARACTERS:])
    if name == "__lineage__" and hasattr(value, "index") and hasattr(value, "shard"):
        return f"<shard {value.shard}, index {value.index}>"
    return value_text(value)
