"""Loaders beside each other on one S3 server, behind a slow or faulty link.

Run as ``python -m tools.bench.storage``; `tools.bench.storage.__main__` says what is measured.
"""
