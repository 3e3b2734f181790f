"""What every process of ours has among its settings, and the names and addresses that several of them start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from common.flags import flag
from common.http_settings import Strict
from common.ordering import PolicyName

AbsolutePath = Annotated[Path, AfterValidator(Path.absolute)]

DEFAULT_CONTROL = "tcp://127.0.0.1:8701"
DEFAULT_MODEL_NAME = "smollm2-135m-instruct"


class ProcessSettings(Strict):
    model: str | None = flag(
        None,
        f"folder or hub id of a Hugging Face model; absent: {DEFAULT_MODEL_NAME}, fetched on first use",
        "model",
        metavar="MODEL",
    )
    shutdown_timeout: float = flag(
        30.0,
        "seconds that running requests get to finish after SIGTERM or Ctrl-C",
        "process",
        ge=0,
        metavar="SECONDS",
    )
    scheduling_policy: PolicyName = flag(
        "fair",
        "who is next, in the queue and on every worker (give all the same). fcfs: by arrival; priority: by class, then "
        "arrival; fair: by class, then tenant by what it was served, then deadline, then arrival; edf: by class, then "
        "deadline, then arrival",
        "scheduling",
    )
    curve_key: AbsolutePath | None = flag(
        None,
        "the cluster's key (`kvferry keys new FILE`), the same for all its processes: every socket between them is "
        "encrypted, and only who has it is let in. Needed beyond loopback",
        "network",
        metavar="FILE",
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "least severity of log lines", "process"
    )
    parent_fd: int | None = flag(None, "read end of the launcher's pipe", "process", hidden=True, ge=0)
