"""Which result columns the output has, and what stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gristmill.errors import InputFileError
from gristmill.wire import Result

DEFAULTS: Final = {"text-classification": ("label", "score"), "embeddings": ("embedding",)}
OF_A_TASK: Final = {"text-classification": ("label", "score", "scores"), "embeddings": ("embedding",)}
OF_ALL: Final = ("error", "model", "tokens", "truncated")
RESULTS: Final = tuple(dict.fromkeys((*(name for names in OF_A_TASK.values() for name in names), *OF_ALL)))


class Layout:
    """The result columns of a run.

    ``chosen`` are their names without the prefix; None: what the task gives, and ``error``.
    """

    def __init__(
        self,
        task: str,
        *,
        queue: str,
        prefix: str,
        top_k: int,
        truncate: bool,
        chosen: Sequence[str] | None = None,
    ) -> None:
        if task not in DEFAULTS:
            raise InputFileError(
                f"queue {queue!r} serves the task {task!r}; files are scored for {' or '.join(DEFAULTS)}"
            )
        self.task = task
        more = ("scores",) if task == "text-classification" and top_k != 1 else ()
        self.names = tuple(chosen) if chosen is not None else (*DEFAULTS[task], *more, "error")
        if other := [name for name in self.names if name not in (*OF_A_TASK[task], *OF_ALL)]:
            listed = ", ".join((*OF_A_TASK[task], *OF_ALL))
            raise InputFileError(f"{task} has no result {', '.join(map(repr, other))}; there are: {listed}")
        self.prefix = prefix
        self.columns = [prefix + name for name in self.names]
        self.line_column = prefix + "line"  # where a row that could not be read is named
        self.taken = {*self.columns, self.line_column}
        self.options: dict[str, Any] = {"truncate": truncate}
        if task == "text-classification":
            self.options["top_k"] = top_k or None

    def cells(self, result: Result) -> dict[str, Any]:
        """Return the result columns of one row, those left out are empty."""
        values: dict[str, Any] = {
            "model": result.model,
            "tokens": result.tokens,
            "truncated": result.truncated,
        }
        if not result.ok:
            code, message = error_of(result)
            values["error"] = f"{code}: {message}"
        elif self.task == "text-classification":
            values |= {**result.value[0], "scores": result.value, "error": ""}
        else:
            values |= {"embedding": result.value, "error": ""}
        return {self.prefix + name: values[name] for name in self.names if name in values}


def error_of(result: Result) -> tuple[str, str]:
    """Return the code and message of a result that is not ok."""
    return result.error or (result.status, "no message")
