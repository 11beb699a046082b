"""What is installed: the client alone without numpy, and both packages from a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLIENT_WITHOUT_NUMPY = """
import importlib.util, pkgutil, sys
import gristmill, gristmill.bulk, gristmill.cli, gristmill.embedded
for name in ("numpy", "onnxruntime", "tokenizers", "yaml", "onnx"):
    assert importlib.util.find_spec(name) is None, name
RQ = ("shards.job", "shards.runs", "shards.submit")
for module in pkgutil.walk_packages(gristmill.__path__, "gristmill."):
    # These need [bulk] and [rq], and are imported for Parquet and in commands with RQ only.
    if module.name not in {f"gristmill.bulk.{name}" for name in ("parquet", *RQ)}:
        __import__(module.name)
from gristmill import scripts
assert all(scripts.source(name) for name in ("submit", "finish", "listen"))
"""


def run(*command: str | Path, code: int = 0) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_client_installs_and_imports_without_numpy_or_an_engine(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("gristmill-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gristmill/py.typed", "gristmill_worker/py.typed", "gristmill/scripts/finish.lua"} <= names
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    bin_folder = tmp_path / "venv" / "bin"
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", wheel)
    run(bin_folder / "python", "-c", CLIENT_WITHOUT_NUMPY)
    assert "score" in run(bin_folder / "gristmill", "--help")
    assert "gristmill[rq]" in run(bin_folder / "gristmill", "bulk", "status", "out.csv", code=4)
    # The worker's command is there too, and says what it lacks.
    assert "gristmill[worker]" in run(
        bin_folder / "gristmill-worker", "serve", "--queue", "q", "--model", "m", code=4
    )


def test_a_worker_tells_onnxruntime_to_send_nothing() -> None:
    code = "import gristmill_worker, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert run(sys.executable, "-c", code).strip() == "1"
