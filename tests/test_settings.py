"""One rule of precedence: flags, variables, file, defaults."""

from pathlib import Path

import pytest
from rq.defaults import DEFAULT_RESULT_TTL

from gristmill.errors import InputFileError, InvalidRequestError
from gristmill_worker.settings import RqSettings, Settings, load_settings

CONFIGS = Path(__file__).parent.parent / "configs"


def test_flags_go_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "{queue: file, model: m, threads: 2, lease_s: 7, batch: {max_items: 8, max_wait_ms: 9}}", "utf-8"
    )
    env = {"GRISTMILL_QUEUE": "env", "GRISTMILL_THREADS": "3", "GRISTMILL_BATCH__MAX_ITEMS": "16"}
    settings = load_settings(path, env, {"queue": "flag", "threads": None})
    assert (settings.queue, settings.threads, settings.lease_s) == ("flag", 3, 7)
    assert (settings.batch.max_items, settings.batch.max_wait_ms) == (16, 9)
    assert settings.result_ttl_s == 3600


def test_variables_of_other_programs_are_left_alone() -> None:
    env = {"GRISTMILL_REDIS_SERVER": "/usr/bin/redis-server", "OTHER": "x", "GRISTMILL_NAME": ""}
    assert load_settings(None, env, {"queue": "q", "model": "m"}) == Settings(queue="q", model=Path("m"))


def test_variables_are_text_and_become_what_is_wanted() -> None:
    env = {
        "GRISTMILL_QUEUE": "2024",
        "GRISTMILL_MODEL": "no",
        "GRISTMILL_TRUNCATE": "false",
        "GRISTMILL_LEASE_S": "7.5",
        "GRISTMILL_CORES": "0,2",
        "GRISTMILL_BATCH__SHAPES": "[[1, 16]]",
    }
    settings = load_settings(None, env, {})
    assert (settings.queue, settings.model) == ("2024", Path("no"))
    assert (settings.truncate, settings.lease_s, settings.cores) == (False, 7.5, (0, 2))
    assert settings.batch.shapes == ((1, 16),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{queue: q}", "model: Field required"),
        ("{queue: q, model: m, thread: 2}", "thread: Extra inputs"),
        ("{queue: q, model: m, batch: {shapes: [[0, 16]]}}", "batch.shapes.0.0"),
        ("{queue: q, model: m, batch: {shapes: []}}", "batch.shapes"),
        ("{queue: q, model: m, batch: 5}", "batch: "),
        ("{queue: q, model: m, threads: many}", "threads: "),
        ("{queue: q, model: m, lease_s: .inf}", "lease_s: "),
        ("{queue: q, model: m, cores: [99999999999]}", "cores.0: "),
        ("{queue: q, model: m, cores: 0-x}", "is not a CPU list"),
        ("queue: 2001-13-45", "cannot be read"),
        ("[" * 3000, "cannot be read"),
        ("- a", "has to be a mapping"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(InputFileError, match=message.replace("[", r"\[")):
        load_settings(path, {}, {})


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://x", "is not a Redis URL"), ("redis+sentinel://x", "name of the service is missing")],
)
def test_a_wrong_redis_url_is_found_before_anything_else_is_done(url: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        load_settings(None, {}, {"queue": "q", "model": "m", "redis": url})


def test_without_a_file_what_is_missing_is_asked_for_as_flags() -> None:
    with pytest.raises(
        InputFileError, match=r"model: Field required\. Give a configuration file, or --queue"
    ):
        load_settings(None, {}, {"queue": "q"})


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(InputFileError, match="GRISTMILL_CORES"):
        load_settings(None, {"GRISTMILL_CORES": "[0"}, {"queue": "q", "model": "m"})
    with pytest.raises(InputFileError, match="exclude each other"):
        load_settings(None, {"GRISTMILL_BATCH": "5", "GRISTMILL_BATCH__MAX_ITEMS": "3"}, {})
    with pytest.raises(InputFileError, match="queue: "):
        load_settings(None, {"GRISTMILL_QUEUE__X": "1"}, {"model": "m"})


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("rq/*.yaml")]), ids=lambda path: path.name
)
def test_every_configuration_that_is_shipped_is_valid(path: Path) -> None:
    assert load_settings(path, {}, {}).model.parent == Path("models")  # where the README makes models


def test_settings_of_rq_are_merged_one_by_one_and_kept_from_other_queues(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{queue: q, model: m, source: rq, rq: {allow_pickle: true, path: a}}", "utf-8")
    env = {"GRISTMILL_RQ__WITH_SCHEDULER": "true", "GRISTMILL_RQ__PATH": "b"}
    flags = {"rq": {"allow_pickle": None, "path": Path("c")}}
    settings = load_settings(path, env, flags)
    assert settings.rq == RqSettings(allow_pickle=True, with_scheduler=True, path=Path("c"))
    with pytest.raises(InputFileError, match="say 'source: rq' as well, or leave them out"):
        load_settings(path, {}, {"source": "streams"})
    with pytest.raises(InputFileError, match="rq: Input should be"):
        load_settings(path, {"GRISTMILL_RQ": "yes"}, {"rq": {"allow_pickle": None}})


def test_rq_jobs_are_kept_and_tried_as_rq_does_it() -> None:
    found = load_settings(None, {}, {"queue": "q", "model": "m", "source": "rq"})
    assert (found.result_ttl_s, found.attempts.max_attempts) == (DEFAULT_RESULT_TTL, 1)
    told = load_settings(None, {"GRISTMILL_RESULT_TTL_S": "9"}, {"queue": "q", "model": "m", "source": "rq"})
    assert told.result_ttl_s == 9
    assert Settings.model_validate(told.model_dump(mode="json")) == told  # as a worker process gets them


@pytest.mark.parametrize("url", ["redis+sentinel://x/mymaster", "redis+cluster://x"])
def test_rq_jobs_come_from_one_server(url: str) -> None:
    with pytest.raises(InputFileError, match="RQ jobs are served from one server"):
        load_settings(None, {}, {"queue": "q", "model": "m", "source": "rq", "redis": url})
