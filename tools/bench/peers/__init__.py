"""The other loaders: their environments, the pinned versions, and a runner for each of them."""
