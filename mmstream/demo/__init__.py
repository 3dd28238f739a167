"""``mmstream demo``: from rows to a trained model on an embedded corpus, with a kill and a proof.

demo.py    convert, verify, train with two processes, kill one, resume with one, compare, report
corpus/    96 photographs with five captions each
"""

from mmstream.demo.demo import corpus_rows

__all__ = ["corpus_rows"]
