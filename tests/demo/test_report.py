"""The report of the demo says what was proven, and when it was not."""

import math
from dataclasses import replace

import pytest

from mmstream.audit.check_log import Proof
from mmstream.converting.convert import ConvertReport
from mmstream.demo.demo import markdown_report

EPOCHS, STEPS, G, KILLED, SAVED = 3, 10, 6, 17, 15
PROOF = Proof(EPOCHS * STEPS, 0, 0, 0, 0, 2.5e-6)


def history(start=0, stop=EPOCHS * STEPS, world_size=1):
    return {
        (n // STEPS, n % STEPS): {
            "loss": 3 * math.exp(-n / 20),
            "keys": [f"{n}-{row}" for row in range(G)],
            "samples_per_s": 100.0 + n,
            "wait_fraction": 0.25,
            "world_size": world_size,
        }
        for n in range(start, stop)
    }


def report(proof):
    return markdown_report(
        ConvertReport(96, 480, 0, 5, 8_000_000, 8_000_000, 1.0),
        proof,
        undisturbed=history(),
        killed=history(stop=KILLED, world_size=2),
        disturbed=history(stop=SAVED, world_size=2) | history(start=SAVED),
    )


def test_the_report_says_what_happened():
    text = report(PROOF)
    assert text.startswith("# mmstream demo: the proof holds\n")
    assert "| steps | 30 of 6 samples, 3 epochs |" in text
    assert "killed at step 17; resumed with one process from the checkpoint of step 15" in text
    assert "96 rows -> 480 samples, 5 shards, 8.0 MB, 0 rejected" in text


@pytest.mark.parametrize("fault", ["lost", "repeated", "unplanned", "different", "loss_difference"])
def test_a_proof_that_fails_is_said_to_fail(fault):
    assert "the proof DOES NOT HOLD" in report(replace(PROOF, **{fault: 1}))
