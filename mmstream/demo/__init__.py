"""``mmstream demo``: the main job on an embedded corpus, with a kill and a proof.

demo.py    convert, verify, train on two processes, kill one, resume on one, compare
report.py  the evidence as one HTML page and as Markdown
charts.py  line charts in SVG, for the report
corpus/    a hundred real images with captions
"""

from mmstream.demo.demo import corpus_rows

__all__ = ["corpus_rows"]
