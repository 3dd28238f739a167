"""What a pipeline makes of small corpora of every kind, as digests: ``tools.prove.digests``."""
