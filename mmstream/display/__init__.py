"""What notebooks show of datasets, mixtures, samples, batches, pipelines and loaders.

notebook.py    show: anything below as something that a notebook displays
datasets.py    a dataset or a slice of it, with its first samples
mixtures.py    a mixture and its sources
samples.py     samples and batches as contact sheets
pipelines.py   what a pipeline does, and how far a loader has come
contents.py    the pictures, texts and fields of a sample or batch
markup.py      small pieces of HTML

The classes call this package in their ``_repr_html_``, so it imports none of them: it reads the
attributes that it shows. Its output is bounded, however large the dataset is.
"""

from __future__ import annotations

from mmstream.display.datasets import dataset_html, view_html
from mmstream.display.notebook import Shown, show
from mmstream.display.pipelines import loader_html, pipeline_html
from mmstream.display.samples import batch_html, batch_sheet, sample_html, samples_html

__all__ = [
    "Shown",
    "batch_html",
    "batch_sheet",
    "dataset_html",
    "loader_html",
    "pipeline_html",
    "sample_html",
    "samples_html",
    "show",
    "view_html",
]
