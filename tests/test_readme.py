"""The README's code runs as it is written, against a Redis and a worker of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Server, Workers
from gristmill.errors import ExitCode

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["client", "asyncio", "rq"])
def test_a_snippet_runs(
    own_redis: Server, workers: Workers, tiny_classifier: Path, tmp_path: Path, snippet: str
) -> None:
    workers.queue = "topics"
    command = ["rq", "--queue", "sentiment", "--model", str(tiny_classifier), "--redis", own_redis.url]
    if "import Queue" in snippet:
        process = workers.start_command(command)
    else:
        process = workers.start(tiny_classifier, url=own_redis.url)
    script = tmp_path / "snippet.py"
    script.write_text(snippet.replace("redis://localhost:6379/0", own_redis.url), "utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "label" in done.stdout
    process.terminate()
    assert process.wait(timeout=60) == ExitCode.OK


def test_the_exit_codes_are_the_documented_ones() -> None:
    listed = dict(re.findall(r"^\| (\d+) \| ([a-z ]+) \|", README, flags=re.MULTILINE))
    assert listed == {str(code.value): code.name.lower().replace("_", " ") for code in ExitCode}
