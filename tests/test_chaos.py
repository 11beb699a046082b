"""The chaos test, short: ``make chaos`` is the long one."""

import json
from pathlib import Path

from chaos import KINDS, Chaos, is_clean


def test_under_a_hail_of_faults_every_request_has_exactly_one_right_answer(tmp_path: Path) -> None:
    report = Chaos(tmp_path, requests=10_000, faults=24, seed=1, workers=3).run()
    assert is_clean(report), json.dumps(report)
    assert report["faults"].keys() == KINDS.keys()
    # What names nobody, what crashes workers and what holds them up for ever; nothing else.
    faults = report["faults"]
    assert report["dead_lettered"] == faults["malformed"] + faults["poison"] + faults["hang"]
