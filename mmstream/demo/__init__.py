"""``mmstream demo``: the main job on an embedded corpus, with a kill and a proof.

demo.py  convert, verify, train on two processes, kill one, resume on one, compare
corpus/  a hundred real images with captions
"""

from mmstream.demo.demo import corpus_rows

__all__ = ["corpus_rows"]
