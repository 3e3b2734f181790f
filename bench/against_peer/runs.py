"""Runs the sessions of a plan and keeps each finished run in a folder, so that a broken one goes on where it was."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.against_peer import clients, figures
from bench.against_peer.asked import PROMISED, Asked
from bench.against_peer.figures import Cell, load_name
from bench.against_peer.plan import BATCH, Part, Session, Side, Sizes, sessions_of
from bench.against_peer.search import next_rate, pooled
from bench.against_peer.servers import Target, free_port, kvferry_command, running, vllm_command

POINT_LIMIT_S = 90.0  # times the time scale: at low rates a goodput point has fewer requests …
LEAST_REQUESTS = 20  # … but at least so many
OPENVINO_LIMIT_S = 600.0


class OtherSettings(Exception):
    """The folder has runs of something else."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything is."""

    peers: Path | None
    vllm_venv: Path | None
    peer_url: str | None
    peer_model: str
    openvino_python: Path | None
    gguf: Path | None
    model: Path
    our_flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """Finished runs: `cells/` has their figures, `runs/` all that our client said, `logs/` what servers did; `seed` is
    what those of their loads are made from."""

    path: Path
    identity: dict[str, object]

    @classmethod
    def open(cls, path: Path, identity: dict[str, object]) -> Folder:
        """Raises OtherSettings where it has runs that these would not fit to."""
        for name in ("cells", "runs", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)
        known = path / "settings.json"
        if known.exists() and json.loads(known.read_text()) != identity:
            raise OtherSettings(f"{path} has runs with other settings ({known}): name another --out")
        known.write_text(json.dumps(identity, indent=1) + "\n")
        if not (path / "seed").exists():
            (path / "seed").write_text(f"{secrets.randbits(31)}\n")
        return cls(path, identity)

    def seed_of(self, alternation: int, load: str) -> int:
        """The same for all sides and settings: at few requests one Poisson draw has half again the rate of another."""
        return zlib.crc32(f"{self.path.joinpath('seed').read_text()} {alternation} {load}".encode())

    def cells(self) -> list[Cell]:
        return [Cell(**json.loads(file.read_text())) for file in sorted((self.path / "cells").glob("*.json"))]

    def keep(self, session: Session, cell: Cell) -> None:
        """By one rename: a broken run leaves no half of a cell."""
        target = self._cell(session, cell.load)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(cell)) + "\n")
        partial.rename(target)

    def has(self, session: Session, load: str) -> bool:
        return self._cell(session, load).exists()

    def of_run(self, session: Session, load: str) -> Path:
        return self.path / "runs" / f"{session.name}-{load}.json"

    def log(self, session: Session) -> Path:
        return self.path / "logs" / f"{session.name}.log"

    def _cell(self, session: Session, load: str) -> Path:
        return self.path / "cells" / f"{session.name}-{load}.json"


class Runner:
    def __init__(
        self,
        folder: Folder,
        places: Places,
        sizes: Sizes,
        asked: Asked,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._places = places
        self._sizes = sizes
        self._asked = asked
        self._curve_rates = asked.curve_rates
        self._say = say

    def run(self, parts: Sequence[Part], vllm: Sequence[str], openvino: Sequence[str]) -> None:
        """All alternations. Raises ServerFault, LoadFault."""
        for alternation in range(1, self._sizes.alternations + 1):
            if alternation == 2 and self._sizes.winners_only:
                vllm = self._winners("vllm", vllm)
                openvino = self._winners("openvino", openvino)
            for session in sessions_of(alternation, parts, vllm, openvino):
                self._session(session)

    def _winners(self, side: Side, settings: Sequence[str]) -> list[str]:
        first = [cell for cell in self._folder.cells() if cell.alternation == 1]
        best = figures.winners(first, side, self._curve_rates)
        return [setting for setting in settings if setting in best] or list(settings)

    # ------------------------------------------------------------ one session

    def _session(self, session: Session) -> None:
        if self._next(session) is None:
            return
        self._say(f"{time.strftime('%H:%M:%S')} {session.name}")
        if session.side == "openvino":
            self._keep(session, self._openvino(session))
            return
        with self._server(session) as target:
            clients.warm(target, self._folder.of_run(session, "warm"), self._asked.targets)
            while (load := self._next(session)) is not None:
                self._keep(session, self._measure(session, target, load))

    def _keep(self, session: Session, cell: Cell) -> None:
        self._folder.keep(session, cell)
        said = f"    {cell.load:<14}{cell.requests_per_s:6.2f} req/s"
        if cell.ttft_p50_ms:
            said += f", TTFT p50 {cell.ttft_p50_ms:.0f}, ITL p50 {cell.itl_p50_ms:.1f} p99 {cell.itl_p99_ms:.1f} ms"
        if cell.judged:
            said += f", {cell.attained / cell.judged:.0%} in time"
        self._say(said)

    @contextmanager
    def _server(self, session: Session) -> Iterator[Target]:
        places, port = self._places, free_port()
        url = f"http://127.0.0.1:{port}"
        if session.side == "vllm" and places.peer_url is not None:
            yield Target(places.peer_url.rstrip("/"), places.peer_model)
            return
        if session.side == "kvferry":
            target = Target(url, places.model.name, PROMISED)
            config = self._folder.path / "tiers.toml"
            config.write_text(self._asked.tiers)
            flags = ["--dtype", self._asked.dtype, *places.our_flags, *session.flags]
            command = kvferry_command(places.model, port, config, flags)
        else:
            assert places.peers is not None and places.vllm_venv is not None
            target = Target(url, "peer")
            flags = ["--dtype", self._asked.dtype, *session.flags]
            command = vllm_command(places.peers, places.vllm_venv, places.model, port, flags)
        with running(command, target, self._folder.log(session)) as ready:
            yield ready

    # ------------------------------------------------------------ its loads

    def _next(self, session: Session) -> str | None:
        """The session's first load that is not measured yet."""
        return next((load for load in self._loads(session) if not self._folder.has(session, load)), None)

    def _loads(self, session: Session) -> Iterator[str]:
        if "openvino" in session.parts:
            yield "openvino"
        if "saturated" in session.parts:
            yield "saturated"
            if self._has_witness and (session.alternation == 1 or not self._sizes.winners_only):
                yield "witness"
        if "curve" in session.parts:
            yield from (load_name("curve", rate) for rate in self._curve_rates)
        if "goodput" in session.parts:
            by_alternation = figures.goodput_points(self._folder.cells(), session.side, session.setting)
            mine = by_alternation.get(session.alternation, {})
            earlier = pooled(points for n, points in by_alternation.items() if n < session.alternation)
            rate = next_rate(mine, earlier, self._asked.first_goodput_rate, self._asked.grid)
            if rate is not None:
                yield load_name("goodput", rate)

    @property
    def _has_witness(self) -> bool:
        return self._places.peers is not None and self._places.vllm_venv is not None

    def _measure(self, session: Session, target: Target, load: str) -> Cell:
        if load == "witness":
            return self._witness(session, target)
        rate, prompts, concurrency = self._load_of(load)
        path = self._folder.of_run(session, load)
        result = clients.measure(
            target,
            path,
            rate=rate,
            prompts=prompts,
            concurrency=concurrency,
            targets=self._asked.targets,
            extra_body="" if load == "saturated" else target.promised,
            seed=self._folder.seed_of(session.alternation, load),
        )
        return figures.cell_of(session, load, result)

    def _load_of(self, load: str) -> tuple[float, int, int | None]:
        """Rate, number of requests, most at once."""
        if load == "saturated":
            return float("inf"), self._sizes.saturated, BATCH
        rate = figures.rate_of(load)
        if load.startswith("curve"):
            return rate, self._sizes.curve, None
        limit_s = POINT_LIMIT_S * self._asked.time_scale
        return rate, min(self._sizes.goodput, max(LEAST_REQUESTS, int(rate * limit_s))), None

    def _witness(self, session: Session, target: Target) -> Cell:
        peers, venv = self._places.peers, self._places.vllm_venv
        assert peers is not None and venv is not None
        prompts = self._sizes.saturated
        rate, failed = clients.witness(
            peers, venv, self._places.model, target, prompts=prompts, concurrency=BATCH
        )
        return Cell(
            session.side, session.setting, session.alternation, "witness", rate, prompts - failed, prompts
        )

    def _openvino(self, session: Session) -> Cell:
        python, gguf = self._places.openvino_python, self._places.gguf
        assert python is not None and gguf is not None
        script = Path(__file__).with_name("openvino_in_process.py")
        command = [str(python), str(script), str(gguf), session.setting, str(self._sizes.saturated)]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=OPENVINO_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise clients.LoadFault(f"OpenVINO was not done within {OPENVINO_LIMIT_S:g} s") from None
        if ended.returncode != 0:
            raise clients.LoadFault(f"OpenVINO ended with {ended.returncode}: {ended.stderr[-600:]}")
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        requests = found.pop("requests")
        return Cell(
            session.side,
            session.setting,
            session.alternation,
            "openvino",
            ok=requests,
            sent=requests,
            **found,
        )
