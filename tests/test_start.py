"""Command lines that are interrupted while Python still imports what they need."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import wait_until
from gristmill.errors import ExitCode

PACED_S = 0.024  # between two instants
INSTANTS = 20  # half a second: what the imports take on a fast machine

STARTS = {
    "gristmill": "import gristmill.__main__ as it; it.main()",
    "gristmill-worker": "import gristmill_worker.__main__ as it; it.main()",
}


def caught(process: subprocess.Popen[bytes]) -> bool:
    """Say whether the process has a handler for SIGTERM: Python itself has none."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return True
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), -1)
    return process.poll() is not None or bool(mask >> (signal.SIGTERM - 1) & 1)


def interrupted(command: list[str], number: int, after_s: float) -> tuple[int, bytes]:
    """Return the exit code and the errors of a command that gets a signal so long after its entry."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_until(lambda: caught(process))
        time.sleep(after_s)
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_command_that_is_interrupted_at_any_instant_ends_with_130_and_no_traceback(
    number: int, redis_url: str, queue: str
) -> None:
    waits = ["result", queue, "nobody", "--timeout", "50", "--redis", redis_url]
    for instant in range(INSTANTS):
        command = [sys.executable, "-m", "gristmill", *waits]
        code, errors = interrupted(command, number, instant * PACED_S)
        assert (code, errors.strip()) == (ExitCode.INTERRUPTED, b""), f"after {instant * PACED_S} s"


@pytest.mark.parametrize("program", STARTS)
def test_both_programs_start_where_an_interruption_is_looked_for(program: str) -> None:
    # The shell scripts of an installation do just this.
    for instant in range(0, INSTANTS, 2):
        command = [sys.executable, "-c", STARTS[program], "--help"]
        code, errors = interrupted(command, signal.SIGINT, instant * PACED_S)
        # The last is for after the work, when Python has taken its handlers away.
        assert code in (ExitCode.OK, ExitCode.INTERRUPTED, -signal.SIGINT), errors.decode()
        assert not errors.strip(), errors.decode()


def test_the_entry_imports_next_to_nothing() -> None:
    code = "import sys, gristmill_worker.__main__, gristmill.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    found = {*done.stdout.decode().split()}
    assert "gristmill.start" in found
    assert not {"click", "redis", "asyncio", "gristmill.errors", "gristmill.cli"} & found


def test_what_was_ignored_stays_ignored(redis_url: str, queue: str) -> None:
    # Under nohup the end of a terminal's session ends nothing.
    waits = ["result", queue, "nobody", "--timeout", "2", "--redis", redis_url]
    command = ["env", "--ignore-signal=HUP", sys.executable, "-m", "gristmill", *waits]
    code, _ = interrupted(command, signal.SIGHUP, 0.5)
    assert code == ExitCode.TIMEOUT
