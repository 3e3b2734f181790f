"""`python -m bench.promises beside|overload|swing`: whether what tiers are promised is kept, and what that costs.

In virtual time by default, in seconds; `--real` starts `kvferry serve` on this machine. Ends with 0 where what the
project promises of that load was kept, else with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.flag_types import count, new_file
from bench.pictures import why_no_picture
from bench.promises import report, scenarios
from bench.promises.asked import Asked, Told, judged
from bench.promises.counterfactual import calibrated, would_have_met
from bench.promises.real import RealService, capacity_of, serving
from bench.promises.scenarios import Capacity
from bench.promises.virtual import DECODE_STEPS, PREFILL_STEPS, Service, run
from common.config import Tier
from coordinator.admin_client import wide_console
from coordinator.targets import targets_of

ROWS = 16
FLAGS = ("--max-num-seqs", str(ROWS))
SAMPLE = 200
SETTLES_S = 5.0
WITHOUT_S = 15.0
"""Of load on a service that promises nothing: it takes three times as long to be done with it."""
AT_ONCE_S = 0.25
MAY_BE_OFF = 0.2
"""Of its target a first token, in a replay from what it was: else the replay says nothing."""
ATTAINED, OF_FLOOD, FALSELY_REFUSED = 0.95, 0.85, 0.10
NO_FLOOD = 0.9  # of what is asked for is served of less than that: else it is no flood
Ask = Callable[[Sequence[Asked]], list[Told]]


class Bench:
    """Runs loads on services of some shape, in virtual time or on this machine."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.real = bool(asked.real)
        self.seconds = float(asked.seconds)
        self.seed = int(asked.seed)
        self.plot: Path | None = asked.plot
        self.console = wide_console()
        self.sample = int(asked.sample)
        self.times = int(asked.times)
        self.local_prefill = asked.local_prefill == "auto"

    def on(
        self, stack: ExitStack, tiers: Mapping[str, Tier], *, prefill: int = 1, decode: int = 1,
        refuse_late: bool = True, local_prefill: bool = True,
    ) -> tuple[Ask, Capacity, Service]:  # fmt: skip
        """How to ask it, what it can take, and the same service in virtual time."""
        service = Service(
            prefill=prefill, decode=decode, tiers=tiers, refuse_late=refuse_late, local_prefill=local_prefill
        )
        if not self.real:
            capacity = capacity_of(PREFILL_STEPS, DECODE_STEPS, prefill, decode, ROWS)
            return partial(run, service, until_s=self.seconds), capacity, service
        flags = [*FLAGS, "--prefill", str(prefill), "--decode", str(decode)]
        flags += ["--admission", "forecast" if refuse_late else "queue"]
        flags += ["--local-prefill", "auto" if local_prefill else "never"]
        real: RealService = stack.enter_context(serving(tiers, *flags))
        times = real.step_times()
        service = replace(
            service, prefill_steps=times.get("prefill", times["decode"]), decode_steps=times["decode"]
        )
        return real.run, real.capacity(ROWS), service


def beside(bench: Bench) -> bool:
    """The flood alone, and interactive chat beside it, with targets that suit the machine; that as often as asked."""
    with ExitStack() as stack:
        ask, capacity, service = bench.on(stack, {"batch": scenarios.BATCH})
        alone = ask(scenarios.flood(capacity, bench.seconds, bench.seed))
    tiers = scenarios.beside_tiers(service.prefill_steps, service.decode_steps, ROWS)
    interactive = tiers["interactive"]
    bench.console.print(
        f"a core computes {capacity.prompt_tokens_per_s:.0f} prompt tokens/s, or {capacity.answer_tokens_per_s:.0f} "
        f"answer tokens/s in a batch of {ROWS}; targets: first token {interactive.ttft_ms:.0f} ms, gaps "
        f"{interactive.itl_ms:.0f} ms"
    )
    with ExitStack() as stack:
        ask, _, _ = bench.on(stack, tiers)
        load = scenarios.beside(capacity, bench.seconds, bench.seed)
        kept = [_kept_beside(bench, tiers, alone, ask(load)) for _ in range(bench.times)]
    return all(kept)


def _kept_beside(
    bench: Bench, tiers: Mapping[str, Tier], alone: Sequence[Told], both: Sequence[Told]
) -> bool:
    targets = {name: targets_of(tier) for name, tier in tiers.items()}
    runs = {"flood alone": alone, "both": both}
    bench.console.print(report.table("chat beside a flood", runs, targets, bench.seconds))
    chats = [one for one in both if one.asked.tier == "interactive" and one.outcome != "refused"]
    bench.console.print(report.worst(chats, targets["interactive"].itl_s or float("inf")))
    window = (0.15 * bench.seconds, bench.seconds)
    served = report.tokens_per_s(alone, *window)
    kept = report.tokens_per_s(both, *window) / served
    flooded = served <= NO_FLOOD * sum(one.asked.output_tokens for one in alone) / bench.seconds
    if not flooded:
        bench.console.print("the flood alone was served as fast as it came: this shows nothing")
    chat = judged(both, "interactive", targets["interactive"])
    refused = chat.refused / max(1, chat.asked)
    bench.console.print(
        f"throughput beside it: {kept:.1%} of the flood's alone (at least {OF_FLOOD:.0%}); interactive requests "
        f"refused: {refused:.1%}"
    )
    attained = min(chat.first_tokens.value, chat.gaps.value)
    return flooded and kept >= OF_FLOOD and attained >= ATTAINED and refused <= 1 - ATTAINED


def overload(bench: Bench) -> bool:
    """Three times what the service can take, with admission by forecast, and on one that promises nothing."""
    with ExitStack() as stack:
        ask, capacity, service = bench.on(
            stack, scenarios.UNPROMISED, refuse_late=False, local_prefill=bench.local_prefill
        )
        prompts = scenarios.overload_prompt(capacity, bench.seconds, bench.sample)
        tiers = scenarios.overload_tiers(service.prefill_steps, service.decode_steps, ROWS, prompts)
        tier, targets = tiers["chat"], {"chat": targets_of(tiers["chat"])}
        if bench.local_prefill:
            capacity = scenarios.with_local_prefill(capacity, service.decode_steps, tier, ROWS, prompts)
        load = scenarios.overload(capacity, bench.seconds, bench.seed, prompts)
        without = ask([one for one in load if one.at_s < WITHOUT_S])
    bench.console.print(
        f"it takes {capacity.prompt_tokens_per_s:.0f} prompt tokens/s; targets: first token {tier.ttft_ms:.0f} ms, "
        f"gaps {tier.itl_ms:.0f} ms; {len(load)} requests in {bench.seconds:g} s, of {prompts[0]} to {prompts[1]}"
    )
    probe = Asked(0, 0.0, "chat", "probe", 64, 8)
    over_s = (
        bench.seconds + ((tier.ttft_ms or 0.0) + scenarios.OVERLOAD_OUTPUT[1] * (tier.itl_ms or 0.0)) / 1e3
    )
    with ExitStack() as stack:
        ask, _, service = bench.on(stack, tiers, local_prefill=bench.local_prefill)
        before = ask([probe])
        told = ask([*load, replace(probe, index=len(load), at_s=over_s + SETTLES_S)])
        after, told = [one for one in told if one.asked.tenant == "probe"], told[:-1]
    runs = {"by forecast": told, f"without, {min(WITHOUT_S, bench.seconds):g} s": without}
    bench.console.print(report.table(f"overload times {scenarios.OVERLOAD:g}", runs, targets, bench.seconds))
    took_s = sorted(one.end_s - one.asked.at_s for one in told if one.outcome == "refused") or [0.0]
    mostly_s = took_s[int(0.95 * (len(took_s) - 1))]
    first_ms = [1e3 * (one[0].ttft_s or float("inf")) for one in (before, after)]
    bench.console.print(
        f"95 % of refusals took {mostly_s * 1e3:.0f} ms at most, the slowest {took_s[-1] * 1e3:.0f}; a first token "
        f"before {first_ms[0]:.0f} ms, {SETTLES_S:g} s after the last answer {first_ms[1]:.0f} ms"
    )
    kept = judged(told, "chat", targets["chat"]).whole.value
    as_before = mostly_s <= AT_ONCE_S and first_ms[1] <= 2 * first_ms[0]
    rightly = _refused_rightly(bench, service, told)
    return kept >= ATTAINED and as_before and rightly


def _refused_rightly(bench: Bench, service: Service, told: Sequence[Told]) -> bool:
    """Of those refused hardly one would have met its targets, by a replay that agrees with what was."""
    if bench.real:
        service, factor = calibrated(service, told)
        bench.console.print(f"the replay's steps take {factor:.2f} times what the workers say of theirs")
    verdict = would_have_met(service, told, bench.sample, bench.seed)
    ttft_s = service.targets["chat"].ttft_s or 0.0
    bench.console.print(
        f"of {verdict.sampled} refused ones {verdict.met} would have met their targets (at most "
        f"{FALSELY_REFUSED:.0%}); the replay's first tokens are off by {verdict.usually_off_s * 1e3:+.0f} ms in the "
        f"middle, nine tenths by {verdict.mostly_within_s * 1e3:.0f} ms at most (of a target of {ttft_s * 1e3:.0f})"
    )
    agrees = verdict.mostly_within_s <= MAY_BE_OFF * ttft_s
    return agrees and verdict.met <= FALSELY_REFUSED * verdict.sampled


def swing(bench: Bench) -> bool:
    """Pools that balance against fixed roles and against collocated ones."""
    halves = 1 if bench.real else 2
    with ExitStack() as stack:
        _, _, service = bench.on(stack, scenarios.UNPROMISED, prefill=halves, decode=halves)
    tiers = scenarios.swing_tiers(service.prefill_steps, service.decode_steps, ROWS)
    targets = {name: targets_of(tier) for name, tier in tiers.items()}
    runs: dict[str, list[Told]] = {}
    load: list[Asked] = []
    shapes = {
        "balancing pools": {"prefill": halves, "decode": halves},
        "fixed roles": {"prefill": halves, "decode": halves, "local_prefill": False},
        "collocated": {"prefill": 0, "decode": 2 * halves},
    }
    for name, shape in shapes.items():
        with ExitStack() as stack:
            ask, capacity, _ = bench.on(stack, tiers, **shape)  # type: ignore[arg-type]
            load = load or scenarios.swing(scenarios.swing_rates(capacity), bench.seconds, bench.seed)
            runs[name] = ask(load)
    chat = tiers["chat"]
    bench.console.print(f"targets: first token {chat.ttft_ms:.0f} ms, gaps {chat.itl_ms:.0f} ms")
    bench.console.print(report.table("a mix that swings", runs, targets, bench.seconds))
    if bench.plot is not None:
        curves = {name: report.goodput_over_time(told, targets, bench.seconds) for name, told in runs.items()}
        each_s = bench.seconds / len(scenarios.SWING_PHASES)
        borders = [each_s * number for number in range(1, len(scenarios.SWING_PHASES))]
        report.plot(bench.plot, "goodput of a mix that swings", curves, borders)
    met = {name: sum(one.meets(targets["chat"]) for one in told) for name, told in runs.items()}
    return met["balancing pools"] >= met["fixed roles"]


LOADS: dict[str, Callable[[Bench], bool]] = {"beside": beside, "overload": overload, "swing": swing}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.promises", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("load", choices=list(LOADS))
    parser.add_argument(
        "--real", action="store_true", help="real processes on this machine; absent: virtual time"
    )
    parser.add_argument("--seconds", type=count, default=60, help="of load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sample", type=count, default=SAMPLE, help="refused requests to replay (default: %(default)s)"
    )
    parser.add_argument(
        "--times", type=count, default=1, help="how often in a row `beside` must hold (default: %(default)s)"
    )
    parser.add_argument(
        "--local-prefill", choices=("auto", "never"), default="auto",
        help="of `overload`: never is steadier, so that nearly all keep their promises, of fewer that are taken in",
    )  # fmt: skip
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help="picture of `swing`")
    asked = parser.parse_args(arguments)
    if asked.plot is not None and (why := why_no_picture()):
        parser.error(f"--plot: {why}")
    return 0 if LOADS[asked.load](Bench(asked)) else 1


if __name__ == "__main__":
    sys.exit(main())
