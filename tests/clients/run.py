"""`make clients`: real clients against a real service, each in a venv of its own; one table, and 0 if all went well.

    python -m tests.clients.run [NAME …]     some of them

What is tried is that they work and count as we do, not speed. The service runs on a free port, and is idle again
after each client: no request left, no block held.

vLLM's load generator needs 3.4 GB of vLLM: it is taken from $PEER_VENV, or set up there by `setup_vllm_cpu.sh` of
$PEERS (a folder beside the repository by default); without these scripts it is skipped, which the table says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.service import MODEL, ROOT, Service, serving

HERE = Path(__file__).parent
VENVS = ROOT / ".venv-clients"
LOGS = VENVS / "logs"
PEERS = Path(os.environ.get("PEERS", ROOT.parent / "shared" / "peers"))
PEER_VENV = Path(os.environ.get("PEER_VENV", Path(tempfile.gettempdir()) / "kvferry-peer"))
TOKENIZER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvferry" / MODEL
INSTALL_LIMIT_S = 1800.0
QUIET = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`passed` is None for what could not be had. `figures` is what the client itself says."""

    passed: bool | None
    figures: str


@dataclass(frozen=True, slots=True)
class Client:
    """`venv` is the name of its venv, or empty for one that is not ours."""

    name: str
    venv: str
    limit_s: float
    run: Callable[[Client, Service], Outcome]

    @property
    def bin(self) -> Path:
        return VENVS / self.venv / "bin"

    def call(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit code (124 past the limit) and all output, which is kept in a log too."""
        log = LOGS / f"{self.name}.log"
        with log.open("w") as out:
            try:
                code = subprocess.run(
                    [str(word) for word in command],
                    cwd=LOGS,
                    env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=self.limit_s,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
        return code, log.read_text(errors="replace")


# ---------------------------------------------------------------- the clients


def run_checks(client: Client, service: Service) -> Outcome:
    code, said = client.call(
        [client.bin / "python", "-m", f"tests.clients.{client.name}_checks", service.url, MODEL]
    )
    return Outcome(code == 0, _last_line(said, "checks"))


DRAIN = "/admin/workers/{worker_id}/drain"
"""Does what it says to the worker that another answer named: nobody would be left to ask. It has tests of its own."""


def run_schemathesis(client: Client, service: Service) -> Outcome:
    report = LOGS / "schemathesis.json"
    code, said = client.call(
        [
            client.bin / "schemathesis", "run", f"{service.url}/openapi.json",
            "--checks", "all", "--max-examples", "20", "--seed", "1", "--workers", "4",
            "--request-timeout", "60", "--max-response-time", "60", "--generation-database", "none", "--no-color",
            "--report-json-path", report, "--exclude-path", DRAIN,
        ],
        {"SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks"},
    )  # fmt: skip
    return Outcome(code == 0, _last_line(said, "generated"))


def run_vllm(client: Client, service: Service) -> Outcome:
    script = PEERS / "load.sh"
    if not script.is_file():
        return Outcome(None, f"no {script}: set PEERS")
    if not (PEER_VENV / "bin" / "vllm").exists():
        code, said = client.call([PEERS / "setup_vllm_cpu.sh", PEER_VENV])
        if code != 0:
            return Outcome(None, f"vLLM cannot be had: {_last_line(said, '')}")
    rate, seed, num_prompts, concurrency, input_tokens, output_tokens = (
        "inf",
        int(time.time()),
        24,
        8,
        128,
        32,
    )
    settings = (rate, seed, num_prompts, concurrency, input_tokens, output_tokens)
    code, said = client.call([script, PEER_VENV, TOKENIZER, service.url, MODEL, *map(str, settings)])
    figures = re.sub(r"\s*;\s*", "; ", _last_line(said, "Failed requests")).rstrip("; ")
    return Outcome(code == 0 and figures.startswith("Failed requests=0;"), figures)


def run_aiperf(client: Client, service: Service) -> Outcome:
    artifacts = LOGS / "aiperf"
    num_requests, output_tokens = 24, 16
    code, said = client.call(
        [
            client.bin / "aiperf", "profile", "--model", MODEL, "--url", service.url,
            "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER,
            "--concurrency", "4", "--request-count", str(num_requests), "--random-seed", "1",
            "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(output_tokens),
            "--extra-inputs", "ignore_eos:true", "--ui", "none", "--no-gpu-telemetry", "--workers-max", "2",
            "--artifact-dir", artifacts,
        ]
    )  # fmt: skip
    if code != 0:
        return Outcome(False, _last_line(said, ""))
    told = json.loads((artifacts / "profile_export_aiperf.json").read_text())
    done, counted = told["completed_request_count"]["avg"], told["total_usage_completion_tokens"]["avg"]
    right = (done, counted, told["error_summary"]) == (num_requests, num_requests * output_tokens, [])
    figures = f"{done:g} of {num_requests} requests, {counted:g} tokens, {told['request_error_rate']['avg']:g} % errors"
    return Outcome(right, f"{figures}, TTFT p50 {told['time_to_first_token']['p50']:.0f} ms")


PACKAGES = {
    "openai": ("openai==3.57.0", "langchain-openai==1.7.4"),
    "schemathesis": ("schemathesis==4.32.5",),
    "aiperf": ("aiperf==0.13.0",),
}
CLIENTS = (
    Client("openai", "openai", 240, run_checks),
    Client("langchain", "openai", 240, run_checks),
    Client("schemathesis", "schemathesis", 600, run_schemathesis),
    Client("vllm", "", 900, run_vllm),
    Client("aiperf", "aiperf", 300, run_aiperf),
)


def _last_line(said: str, holding: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip() and holding in line]
    return lines[-1] if lines else "said nothing"


# ---------------------------------------------------------------- set-up and table


def install(venv: str) -> None:
    """Once: a stamp is written when the install went through."""
    folder, constraints, packages = VENVS / venv, HERE / f"constraints-{venv}.txt", PACKAGES[venv]
    stamp = folder / ".ready"
    wanted = " ".join(packages) + "\n" + constraints.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"== making {folder.relative_to(ROOT)} with {' '.join(packages)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "-c", str(constraints), *packages], check=True, timeout=INSTALL_LIMIT_S)
    stamp.write_text(wanted)


def attempt(client: Client, service: Service) -> Outcome:
    print(f"== {client.name}", flush=True)
    started_s = time.monotonic()
    outcome = client.run(client, service)
    if outcome.passed is False:
        print((LOGS / f"{client.name}.log").read_text(errors="replace")[-6000:])
    busy = "" if outcome.passed is None else _left_behind(service)
    took = f"{time.monotonic() - started_s:.0f} s"
    return Outcome(outcome.passed and not busy, ", ".join(filter(None, (outcome.figures, busy, took))))


def _left_behind(service: Service) -> str:
    try:
        service.until_idle()
    except AssertionError as error:
        return str(error)
    return ""


def main(names: Sequence[str]) -> int:
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        print(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CLIENTS)}")
        return 2
    chosen = [client for client in CLIENTS if client.name in names or not names]
    LOGS.mkdir(parents=True, exist_ok=True)
    for venv in dict.fromkeys(client.venv for client in chosen if client.venv):
        install(venv)
    with serving(LOGS / "service.log", "--prefill", "1", "--decode", "1") as service:
        outcomes = {client.name: attempt(client, service) for client in chosen}
    print("\nclient        result   what it says")
    for name, outcome in outcomes.items():
        word = {True: "pass", False: "FAIL", None: "skipped"}[outcome.passed]
        print(f"{name:<13} {word:<8} {outcome.figures}")
    return 1 if any(outcome.passed is False for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
