"""A progress bar on stderr while a run is on, where a person looks.

Drawn once a second from the run's own turn: a thread that draws by itself would take the interpreter from the client
in the middle of answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(total: int | None, *, enabled: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Yields what is told (sent, ended, tokens)."""
    if not enabled or not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bars:
        task = bars.add_task("", total=total, more="")

        def tell(sent: int, ended: int, tokens: int) -> None:
            bars.update(task, completed=ended, more=f"{sent - ended} running, {tokens} tokens", refresh=True)

        yield tell
