"""Step 1 of a conversion: rows, whatever holds them.

open.py     what the caller named -> a `RowSource`
source.py   what every source gives: `RowSource`, `RowRange`, `Row`
lines.py    JSONL, gzipped JSONL, a JSON array
"""
