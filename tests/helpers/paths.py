"""Folders and files of the repository that several tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
DOCS = ROOT / "docs"
DEMO_CORPUS = ROOT / "mmstream" / "train" / "corpus"
PHOTOS = sorted((DEMO_CORPUS / "images").glob("*.jpg"))
"""The photographs of the demo corpus: JPEGs of a real camera, a few hundred pixels a side."""
