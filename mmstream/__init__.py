"""Multimodal training data on plain WebDataset tars."""
