"""What notebooks and pages show of datasets, mixtures, samples, batches, pipelines and loaders.

notebook.py    show: anything below as something that a notebook displays, or as a page
sample_dict.py the dict that users get as a sample: it shows itself in one line
datasets.py    a dataset or a slice of it, with some samples
spread.py      which samples stand for a dataset
mixtures.py    a mixture and its sources
samples.py     samples and batches as contact sheets, and whole samples
recordings.py  videos and sounds of samples and batches, raw or decoded
clips.py       frames of a video
sounds.py      a waveform, a player, a picture of features
media_files.py files of videos and sounds: what they hold, and a part of it drawn
cards.py       whole samples one below the other, as a page or for a terminal
pairs.py       pairs of samples side by side
packs.py       batches without padding: the documents of each row, one behind the other
tokens.py      text as a model gets it, with the masked labels apart
statistics.py  statistics of a dataset as a table and bars
pipelines.py   what a pipeline does, and how far a loader has come
contents.py    the pictures, texts and fields of a sample or batch
file_kinds.py  what a file is, from its first bytes
markup.py      small pieces of HTML, and the page around them
drawing.py     charts, by matplotlib
run_drawing.py the metrics of runs in charts

The classes call this package in their ``_repr_html_``, so it imports none of them: it reads the
attributes that it shows. Its output is bounded, however large the dataset is.
"""
