"""RQ 2: the same tests with clients and workers of that version, without those that RQ has no part in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAULTS = (
    "test_what_a_killed_worker_held_is_run_by_others_at_once_whatever_the_lease",
    "test_a_job_that_crashes_workers_fails_and_takes_no_neighbour_along",
    "test_plain_rq_workers_maintenance_leaves_batch_workers_alone",
)
MACHINE = (
    "test_the_command_rq_serves_with_a_worker_on_each_core_that_rq_lists",
    "test_a_lazy_model_is_loaded_for_a_scheduled_job_whose_time_has_come",
    "test_the_scheduler_is_one_workers_and_soon_anothers_after_a_reload",
)


@pytest.mark.parametrize("version", ["2.0.0", "2.6.1"])
def test_all_of_it_holds_with_rq_2(version: str, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"rq=={version}"], check=True, timeout=300)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    tests = [str(HERE / "test_rq.py"), *(f"{HERE / 'test_rq_faults.py'}::{name}" for name in FAULTS)]
    tests += [f"{HERE / 'test_rq_machine.py'}::{name}" for name in MACHINE]
    tests += [f"{HERE / 'test_shards.py'}::{name}" for name in ("TestRuns", "TestFaults")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONPATH": path, "RQ_VERSION": version},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
