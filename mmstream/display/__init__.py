"""What notebooks and pages show of datasets, mixtures, samples, batches, pipelines and loaders.

text.py        numbers, files and values in a few words
contents.py    the texts, images, videos, sounds and tokens that a sample or batch holds
samples.py     mm.show; samples, batches, datasets, statistics: sheets, tables, lines for a terminal
packs.py       batches without padding: the documents of each row, one after the other
html.py        the templates in ``templates/``, which escape all values; images, videos and sounds

The classes call this package in their ``_repr_html_``, so it imports none of them: it reads the
attributes that it shows. Its output is bounded, however large the dataset is.
"""
