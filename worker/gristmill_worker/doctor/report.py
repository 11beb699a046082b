"""Findings for people, for scripts that read lines, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import orjson
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gristmill_worker.doctor.finding import Finding, Level, worst

_STYLES: Final = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print a table on a terminal, else a line a finding: level, check, found and fix with tabs between."""
    if console.is_terminal:
        table = Table("", *(Column(name, overflow="fold") for name in ("check", "found", "what to do")))
        for finding in findings:
            cells = (finding.check, finding.found, finding.fix)
            table.add_row(Text(finding.level, _STYLES[finding.level]), *map(Text, cells))
        console.print(table)
    else:
        for finding in findings:
            fields = (finding.level, finding.check, finding.found, finding.fix)
            print(*(" ".join(field.split()) for field in fields), sep="\t", file=console.file)
    print(summary(findings), file=console.file)


def summary(findings: Sequence[Finding]) -> str:
    """Return how many there are of each level."""
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{level}: {counts[level]}" for level in reversed(Level))


def as_json(findings: Sequence[Finding]) -> str:
    """Return all findings and the worst level."""
    return orjson.dumps({"worst": worst(findings), "findings": findings}, option=orjson.OPT_INDENT_2).decode()
