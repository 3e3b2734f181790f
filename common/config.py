"""Every setting of every process, declared once.

    ProcessSettings                what each process has (`process_settings.py`)
    ├── EngineSettings             how a worker computes and keeps its cache (`worker_settings.py`)
    │   └── WorkerSettings         … and where it belongs: `kvferry prefill`, `kvferry decode`
    ├── CoordinatorSettings        HTTP (`http_settings.py`), queue, limits: `kvferry coordinator`
    └── ServeSettings              both of them and how many workers: `kvferry serve`

The `parse_…` functions are called by a `__main__` with its command line; what lies below gets the values it
needs and reads no settings, files or environment of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from common.endpoints import checked, is_loopback, parse_endpoint
from common.errors import BadConfiguration
from common.flags import flag, parse, visible_fields
from common.http_settings import API_KEY_VARIABLE, HttpSettings, KeysOfFiles, Strict
from common.process_settings import DEFAULT_CONTROL, DEFAULT_MODEL_NAME, ProcessSettings
from common.worker_settings import EngineSettings, WorkerRole, WorkerSettings

WithKeys = TypeVar("WithKeys", bound="CoordinatorSettings")

MAX_PRIORITY = 2**31 - 1
MAX_TIER_NAME_CHARS = 64
LEAST_WEIGHT = 1e-3
"""What a tier was served is divided by its weight: one next to nothing would never have its turn again."""

NEEDS_COLLOCATED = "forms its batches where prompts are computed and decoded in one place"


class Tier(Strict):
    """A class of service: `[tiers.NAME]` of the file. Targets that are absent are not promised."""

    ttft_ms: float | None = Field(default=None, gt=0)
    itl_ms: float | None = Field(default=None, gt=0)
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    weight: float = Field(default=1, ge=LEAST_WEIGHT, le=1e6)
    max_queue: int | None = Field(default=None, ge=1)  # beside --max-queue
    max_priority_offset: int | None = Field(default=None, ge=0)
    """How far from the tier's class a request's `priority` may move it. Absent: later as far as it likes, sooner to
    just behind the next better tier, and not at all where there is none (`coordinator/tiers.py`)."""
    api_key_file: KeysOfFiles = ()
    """Keys whose requests are of this tier where they name no other; they need not be given anywhere else."""


class CoordinatorSettings(HttpSettings, ProcessSettings):
    seed: int | None = flag(
        None,
        "start of the seeds given to requests that bring none; absent: drawn by the system",
        "model",
        ge=0,
        lt=2**63,
    )
    control: str = flag(
        DEFAULT_CONTROL, "endpoint that workers connect to", "network", metavar="tcp://HOST:PORT"
    )
    tokens_port: int | None = flag(
        None,
        "port beside --control's on which workers deliver tokens; absent: any free one",
        "network",
        ge=1,
        le=65535,
    )
    collocated: bool = flag(
        False, "no prefill pool is expected: decode workers compute prompts themselves", "scheduling"
    )
    admission: Literal["forecast", "queue"] = flag(
        "forecast",
        "forecast: what is not likely to have its first token within its tier's ttft_ms is refused at once, 429 with "
        "Retry-After; queue: only a full queue refuses",
        "scheduling",
    )
    local_prefill: Literal["auto", "never"] = flag(
        "auto",
        "auto: a decode worker computes a prompt itself where that is sooner than by way of a prefill worker (it is "
        "short, or mostly cached, or prefill is behind) and its batch keeps its ITL targets; never: only without "
        "prefill workers",
        "scheduling",
    )
    max_queue: int = flag(1024, "requests that may wait, over all tiers", "scheduling", ge=1)
    max_waiting_tokens: int = flag(
        1_000_000, "prompt tokens that may wait, over all tiers", "scheduling", ge=1
    )
    queue_timeout: float = flag(
        120.0,
        "seconds that a request may wait in the queue; then it ends with 408",
        "scheduling",
        gt=0,
        metavar="SECONDS",
    )
    request_timeout: float = flag(1800.0, "seconds after which any request is ended", "scheduling", gt=0)
    heartbeat_interval: float = flag(
        0.5, "seconds between two heartbeats of a worker", "liveness", gt=0, le=60, metavar="SECONDS"
    )
    worker_timeout: float = flag(
        5.0,
        "seconds without a heartbeat after which a worker counts as lost",
        "liveness",
        gt=0,
        metavar="SECONDS",
    )
    progress_timeout: float = flag(
        60.0, "seconds a worker's step may take before it counts as hung", "liveness", gt=0, metavar="SECONDS"
    )
    config_file: Path | None = flag(None, "where the tiers came from", "process", hidden=True)
    tiers: dict[str, Tier] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        checked("--control", self.control, parse_endpoint, keyed=self.curve_key is not None)
        if self.worker_timeout < 2 * self.heartbeat_interval:
            raise ValueError("--worker-timeout must be at least twice --heartbeat-interval")
        if not self.api_keys and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is reachable from other machines: set --api-key or --api-key-file, "
                "or say --allow-unauthenticated"
            )
        return self

    @model_validator(mode="after")
    def _no_tier_is_auto(self) -> Self:
        if "auto" in self.tiers:
            raise ValueError(
                "tiers.auto: a request that says auto means the tier of its key; name it otherwise"
            )
        return self

    @model_validator(mode="after")
    def _names_of_tiers(self) -> Self:
        """They stand in requests, in labels of metrics and in lines of the log."""
        for name in self.tiers:
            if not (0 < len(name) <= MAX_TIER_NAME_CHARS and name.isprintable() and name == name.strip()):
                shown = name if len(name) <= MAX_TIER_NAME_CHARS else f"{name[:MAX_TIER_NAME_CHARS]}…"
                raise ValueError(
                    f"tiers.{shown!r}: a tier's name is 1 to {MAX_TIER_NAME_CHARS} printable characters, without "
                    "blanks at its ends"
                )
        return self

    @model_validator(mode="after")
    def _a_key_has_one_tier(self) -> Self:
        tier_of: dict[str, str] = {}
        for name, tier in self.tiers.items():
            for key in tier.api_key_file:
                if (other := tier_of.setdefault(key, name)) != name:
                    raise ValueError(
                        f"tiers: one key is in the api_key_file of both {other} and {name}; leave it in one of them"
                    )
        return self

    @property
    def api_keys(self) -> tuple[str, ...]:
        of_tiers = (key for tier in self.tiers.values() for key in tier.api_key_file)
        return tuple(dict.fromkeys((*super().api_keys, *of_tiers)))

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        last_part = (self.model or DEFAULT_MODEL_NAME).rstrip("/").split("/")[-1]
        return self.served_model_name or last_part

    @property
    def all_tiers(self) -> dict[str, Tier]:
        """The tiers of the file, and `default` in any case."""
        return {"default": Tier(), **self.tiers}

    @property
    def one_tenant(self) -> bool:
        """Nothing that was set tells requests apart: no tier, and no second key."""
        return not self.tiers and len(self.api_keys) <= 1

    @property
    def open_to_all(self) -> bool:
        """HTTP listens beyond loopback without keys: to be said at start."""
        return not is_loopback(self.host) and not self.api_keys

    @property
    def keys_in_clear(self) -> bool:
        """Keys cross the network unencrypted: to be said at start."""
        return not is_loopback(self.host) and bool(self.api_keys) and self.ssl_certfile is None


class ServeSettings(CoordinatorSettings, EngineSettings):
    control: str = flag(
        "tcp://127.0.0.1:*",
        "endpoint that workers connect to; *: any free port",
        "network",
        metavar="tcp://HOST:PORT",
    )
    # Follows from --prefill 0 here. In a file it is for a coordinator started by hand.
    collocated: bool = False
    prefill: int = flag(
        1, "prefill workers; 0: collocated, decode workers do both halves", "pools", ge=0, le=64, metavar="N"
    )
    decode: int = flag(1, "decode workers", "pools", ge=1, le=64, metavar="M")

    @model_validator(mode="after")
    def _what_needs_no_prefill(self) -> Self:
        if self.collocated and self.prefill:
            raise ValueError(f"collocated = true contradicts {self.prefill} prefill workers: set prefill = 0")
        if self.batching == "dynamic" and self.prefill:
            raise ValueError(f"--batching dynamic {NEEDS_COLLOCATED}: say --prefill 0")
        return self

    @model_validator(mode="after")
    def _workers_know_where(self) -> Self:
        where = parse_endpoint(self.control)
        self.refuse_untrusted("--control", where)
        if where.on_every_address:
            raise ValueError(
                f"--control {self.control}: name one address of this machine; its workers are told it, and others "
                "reach them at it"
            )
        return self


# --- one function per command ----------------------------------------------------------------------------

FILE_KEYS = (
    visible_fields(ServeSettings)
    | visible_fields(WorkerSettings)
    | visible_fields(CoordinatorSettings)
    | {"tiers"}
)


def parse_worker(argv: Sequence[str], role: WorkerRole) -> WorkerSettings:
    """Settings of one worker. Raises BadConfiguration (exit code 2); `--help` leaves by SystemExit."""
    does = {
        "prefill": "computes prompts and ships their KV blocks",
        "decode": "decodes tokens in a running batch",
    }
    description = f"One {role} worker: {does[role]}."
    settings = parse(
        WorkerSettings, argv, prog=f"kvferry {role}", description=description, file_keys=FILE_KEYS
    )
    if role == "prefill" and settings.batching == "dynamic":
        raise BadConfiguration(f"--batching dynamic {NEEDS_COLLOCATED}: not with prefill workers")
    return settings


def parse_coordinator(argv: Sequence[str], environ: Mapping[str, str]) -> CoordinatorSettings:
    """Settings of the coordinator process."""
    return _with_keys(
        CoordinatorSettings,
        argv,
        environ,
        "kvferry coordinator",
        "The coordinator: HTTP API, queue, admission and routing. Workers connect to it.",
    )


def parse_serve(argv: Sequence[str], environ: Mapping[str, str]) -> ServeSettings:
    """Settings of the whole service on one machine."""
    return _with_keys(
        ServeSettings,
        argv,
        environ,
        "kvferry serve",
        "The whole service on this machine: a coordinator, prefill workers and decode workers.",
    )


def _with_keys(
    model: type[WithKeys], argv: Sequence[str], environ: Mapping[str, str], prog: str, description: str
) -> WithKeys:
    keys = [key.strip() for key in environ.get(API_KEY_VARIABLE, "").split(",")]
    return parse(
        model,
        argv,
        prog=prog,
        description=description,
        file_keys=FILE_KEYS,
        values={"api_key_environment": [key for key in keys if key]},
    )
