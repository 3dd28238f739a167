"""The proof of exact resuming: ``python -m tools.prove.resume`` kills a training run many times."""
