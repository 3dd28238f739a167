"""Benchmarks, each run as ``python -m tools.bench.NAME``.

Beside other loaders:
    loader          decoded samples per second (with `loader_tables`, `loader_runs`,
                    `loader_turns`, `loader_report`)
    raw             samples per second without decoding
    resume          time to the first batch after a resume
    index           indexing tars of small samples
    compare_grid    steps and samples of every rank on a grid of topologies (with `grid_cells`)
    shuffle         how far from a uniform permutation an order is (with `shuffle_streams`)

mmstream alone:
    decode          ways from JPEG bytes to 224x224
    device          ways of images to a GPU
    measuring       how fast the lengths of samples are measured
    mixture         tokens per batch of a mixture
    order           an order over 10^9 samples
    profile_loader  CPU time of a decoded sample, stage by stage

Shared: `corpus` and `conversations` (the data), `process_tree` (CPU time and memory of a run),
`peers/` (the other loaders).
"""
