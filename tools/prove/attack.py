"""Attack mmstream with everything that a stranger can write, and see whether it holds.

    python -m tools.prove.attack                   # all attacks, about two minutes
    python -m tools.prove.attack manifest "row: "  # those whose names contain one of these words

Each attack runs in a process of its own, with limits on time and memory (`attacks/attack.py`). The
exit code is 1 if an attack succeeds. SECURITY.md says what is promised.
"""

from __future__ import annotations

import argparse
import sys

import torch
from tqdm import tqdm

from tools.prove.attacks import folders, rows, samples, states, tars
from tools.prove.attacks.attack import MAX_SECONDS, Attack, run_attack

ATTACKS: tuple[Attack, ...] = (
    *tars.ATTACKS,
    *folders.ATTACKS,
    *states.ATTACKS,
    *rows.ATTACKS,
    *samples.ATTACKS,
)


def main() -> int:
    """Run the attacks, print those that succeed, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of attacks; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th of them")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, help="of an attack (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="print all results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has no other threads
    wanted = [
        attack
        for attack in ATTACKS
        if not arguments.words or any(word in attack.name for word in arguments.words)
    ][:: arguments.every]
    num_failures = 0
    for attack in tqdm(wanted, disable=None):
        result = run_attack(attack, max_seconds=arguments.max_seconds)
        if result.failure or arguments.verbose:
            verdict = f"SUCCEEDED: {result.failure}" if result.failure else result.message
            tqdm.write(
                f"{result.name}: {verdict} "
                f"({result.seconds:.1f} s, {result.memory_bytes / 1e6:,.0f} MB)"
            )
        num_failures += bool(result.failure)
    print(f"{len(wanted)} attacks, {num_failures} succeeded")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
