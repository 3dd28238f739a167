"""Conversions measured beside others: ``python -m tools.bench.convert.speed``."""
