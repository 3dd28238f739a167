"""Tests of `mmstream/view/`."""
