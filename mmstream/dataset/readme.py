"""The ``README.md`` of a dataset's folder, which says to other readers what its files are.

``datasets.load_dataset(FOLDER)`` and the viewer of Hugging Face's Hub read the YAML at its top.
Without it they would take indexes and reports for data. Format:
https://huggingface.co/docs/hub/datasets-manual-configuration
"""

from __future__ import annotations

from mmstream.storage import Store

README_NAME = "README.md"

_README = """\
---
configs:
- config_name: default
  data_files: "*.tar"
---

Plain WebDataset tars, with indexes and a manifest of mmstream.

- `mmstream.open_dataset(FOLDER)` reads them in any order, and in training.
- `datasets.load_dataset(FOLDER)` and `webdataset` read them as they are.
"""


def write_readme(store: Store) -> None:
    """Write ``README.md`` into a dataset's folder, unless there is one."""
    if not store.exists(README_NAME):
        store.write(README_NAME, _README.encode())
