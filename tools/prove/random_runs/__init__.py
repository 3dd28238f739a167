"""Random runs of random pipelines over random corpora, and what the documentation says of them."""
