"""`python -m bench.kernel_speed`: each kernel, and whole steps, beside a reference and beside what the machine can do.

    linears, output head     1, 16, 256 rows             torch's F.linear
    attention                16 × 512, 256 on 0 / 1024   the torch reference
    norm, rope, SiLU         1, 16, 256 rows             the torch reference
    sampling                 1, 16 rows                  numpy
    decode steps, prompts    batch 1 to 32, 256 / 1024   transformers

A kernel is compared with its reference before it is timed; one that differs ends the run with 1. Times are the least
of many runs on one thread. Caches are as in a step: layers follow each other, so no weight is used twice in a row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.flag_types import count, model_folder, seconds
from bench.kernel_case import Case, Measured, WrongResult, measure
from bench.kernel_cases import Shapes, Sizes, kernel_cases
from bench.kernel_report import draw, table_of, write_json
from bench.kernel_roofs import SQUARES, Roofs, measure_roofs
from bench.kernel_steps import Steps, StepSizes
from bench.load.surroundings import surroundings
from bench.model_costs import weight_bytes
from bench.pictures import why_no_picture
from common.errors import ModelCannotBeLoaded
from kernels.cache import torch_dtype
from kernels.default_model import DefaultModelError, ensure_default_model, terminal_progress
from kernels.model_config import ModelConfig, UnsupportedModel

TINY_SIZES = Sizes(rows=(1, 3), head_rows=(2,), decode=((2, 20),), chunk=((5, 18),))
TINY_STEPS = StepSizes(batches=(1, 3), context=20, prompts=(24,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 a kernel is wrong, 2 bad flags, 4 a model that cannot be had or is not supported."""
    asked = _parser().parse_args(arguments)
    try:
        return _measure_and_report(asked)
    except WrongResult as wrong:
        print(f"kernel_speed: {wrong}", file=sys.stderr)
        return 1
    except (UnsupportedModel, DefaultModelError) as error:
        print(f"kernel_speed: {error}", file=sys.stderr)
        return ModelCannotBeLoaded.exit_code


def _measure_and_report(asked: argparse.Namespace) -> int:
    if no_picture := why_no_picture():
        print(f"kernel_speed: no picture will be drawn, it {no_picture}", file=sys.stderr)
    console = Console(width=None if sys.stdout.isatty() else 200)
    torch.set_num_threads(asked.threads)
    with _model(asked.model, asked.tiny) as folder:
        shapes = Shapes(ModelConfig.from_folder(folder), torch_dtype(asked.dtype), asked.threads)
        squares = (64,) if asked.tiny else SQUARES
        buffer_bytes = weight_bytes(shapes.config, shapes.dtype)
        roofs = measure_roofs(buffer_bytes, shapes.dtype, asked.seconds, squares)
        where = surroundings()
        title = f"{folder.name}, {asked.dtype}, {asked.threads} thread(s), {where['processor']}"
        console.print(f"{title}\n{roofs.describe()}", highlight=False)
        found = list(_measured(_cases(folder, shapes, asked.tiny), roofs, asked.seconds))
        roofs = roofs.or_better(measure_roofs(buffer_bytes, shapes.dtype, asked.seconds, squares))
    found = [one.under(roofs) for one in found]
    console.print(f"at the end: {roofs.describe()}", highlight=False)
    console.print(table_of(found, title), highlight=False)
    out: Path = asked.out or Path("build/bench") / f"kernel-speed-{asked.dtype}"
    settings = {
        "model": folder.name,
        "dtype": asked.dtype,
        "threads": asked.threads,
        "seconds": asked.seconds,
    }
    write_json(out.with_suffix(".json"), found, roofs, settings, where)
    if not no_picture:
        draw(out.with_suffix(".png"), found, f"{title}\n{roofs.describe()}".replace("; ", "\n"))
    console.print(f"wrote {out.with_suffix('.json')} and what could be drawn beside it", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=model_folder, help="a model's folder; without it the default model")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument(
        "--seconds", type=seconds, help="for each kernel, and for each reference (default 0.5)"
    )
    parser.add_argument(
        "--out", type=Path, help="where .json and .png go (default build/bench/kernel-speed-DTYPE)"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a random model of two layers: seconds, for tests"
    )
    parser.set_defaults(seconds=0.5)
    return parser


@contextmanager
def _model(asked: Path | None, tiny: bool) -> Iterator[Path]:
    if tiny:
        with tempfile.TemporaryDirectory() as scratch:
            yield _make_tiny(Path(scratch) / "tiny")
    elif asked is not None:
        yield asked
    else:
        with terminal_progress() as progress:
            folder = ensure_default_model(progress)
        yield folder


def _make_tiny(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _cases(folder: Path, shapes: Shapes, tiny: bool) -> Iterator[Case]:
    yield from kernel_cases(shapes, TINY_SIZES if tiny else Sizes())
    yield from Steps(folder, shapes.dtype, shapes.threads, TINY_STEPS if tiny else StepSizes()).cases()


def _measured(cases: Iterator[Case], roofs: Roofs, seconds: float) -> Iterator[Measured]:
    """One line of progress on a terminal, drawn between two kernels only: never while one is timed."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bars:
        task = bars.add_task("")
        for number, case in enumerate(cases, 1):
            bars.update(task, description=f"{number}: {case.kernel}, {case.size}", refresh=True)
            yield measure(case, roofs, seconds)


if __name__ == "__main__":
    sys.exit(main())
