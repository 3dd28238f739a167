"""What notebooks and pages show of datasets, mixtures, samples, batches, pipelines and loaders.

notebook.py    show: anything below as something that a notebook displays, or as a page
sample_dict.py the dict that users get as a sample: it shows itself in one line
datasets.py    a dataset or a slice of it, and which samples stand for it
samples.py     samples and batches as contact sheets, and whole samples
recordings.py  videos and sounds, raw or decoded: frames, waveforms, players, what files hold
cards.py       whole samples one below the other or in pairs, as a page or for a terminal
packs.py       batches without padding: the documents of each row, one behind the other
tokens.py      text as a model gets it, with the masked labels apart
statistics.py  statistics of a dataset as a table and bars
pipelines.py   what a pipeline or a mixture does, and how far a loader has come
contents.py    the pictures, texts and fields of a sample or batch; what a file is
markup.py      small pieces of HTML, and the page around them
run_drawing.py the metrics of runs in charts, by matplotlib

The classes call this package in their ``_repr_html_``, so it imports none of them: it reads the
attributes that it shows. Its output is bounded, however large the dataset is.
"""
