"""Do kernels compiled for unlike processors give the same log-probabilities to the last bit?

Each class is a process whose compilers and libraries are held to fewer instructions than this CPU has. It samples or scores the same tokens
under the same weights: in the engine's form token by token with a cache of blocks, and in one pass under autograd as the trainer does. The
engine's form in 8-bit integers gives other bits, and those the same in each class.
`python -m tests.examinations.processors.run` writes results/processors.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.model.kernels.processor import cpu_features

RESULTS = Path(__file__).parents[1] / "results" / "processors.json"
NO_FMA = {"NUMBA_CPU_NAME": "nehalem", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""SSE 4.2 alone: fused multiply-adds are computed in software, several times slower, and vectors are four numbers wide."""
MODELS = DEFAULT, DENSE, MIXTURE, GEMMA = "SmolLM2-135M", "tiny dense", "tiny mixture", "tiny Gemma 3"
FORMS = TRAINER, ENGINE, INTEGERS = "trainer", "engine", "engine, int8"
TEXT = 1_001  # tokens of a text
_CUT = 61  # tokens of a call in the engine's form


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A class of CPU, by the environment variables that hold a process to it, and the instruction set that it needs here."""

    name: str
    needs: str
    switches: dict[str, str]
    most: int | None = None
    """Tokens of the default model at most; None: as many as asked for."""


PROCESSORS = (
    Processor(name="this CPU", needs="", switches={}),
    Processor(
        name="AVX-512",
        needs="avx512f",
        switches={
            "NUMBA_CPU_NAME": "skylake-avx512",
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        },
    ),
    Processor(
        name="AVX2",
        needs="avx2",
        switches={"NUMBA_CPU_NAME": "haswell", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ),
    Processor(name="no fused multiply-add", needs="", switches=NO_FMA, most=TEXT),
)


def possible() -> list[Processor]:
    """The classes that this CPU can be held to; one that is narrower than the CPU only."""
    return [each for each in PROCESSORS if not each.needs or each.needs in cpu_features()]


def scored(cases: Sequence[tuple[Path, str, str]], tokens: int, switches: dict[str, str]) -> list[np.ndarray]:
    """The log-probabilities of random tokens, all but the first of each text, from one process of their own under these switches.

    One array for each model, its dtype and its form.
    """
    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", __name__ if __name__ != "__main__" else __spec__.name, "--tokens", str(tokens)]
        words += [word for model, dtype, form in cases for word in ("--score", str(model), dtype, form)]
        words += ["--out", scratch]
        subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"} | switches, check=True)
        return [np.load(Path(scratch) / f"{number}.npy") for number in range(len(cases))]


def score(model_path: Path, dtype: str, form: str, tokens: int) -> np.ndarray:
    """The same in this process, in one of FORMS: an engine's in cuts as streams make them, the trainer's in one pass under autograd."""
    import torch

    from ostinato.engine.embedded.form import prepack
    from ostinato.model.attention import hidden, logits
    from ostinato.model.linear import choose_integers, use_order
    from ostinato.model.load import load_model
    from ostinato.model.logprobs import RowSoftmax
    from ostinato.model.selftest import BlockMemory, SequencePiece, shapes_of, vocabulary_of

    engine, int8 = form != TRAINER, form == INTEGERS
    use_order("blocks")
    torch.set_num_threads(1)
    model = load_model(model_path, getattr(torch, dtype), train=not engine)
    ids = torch.from_numpy(np.random.default_rng(7).integers(0, vocabulary_of(model), tokens))
    if engine:
        prepack(model, choose_integers(shape.inputs for shape in shapes_of(model.base_model)) if int8 else None)
    parts: list[np.ndarray] = []
    for text in ids.split(TEXT):
        memory, cuts = BlockMemory(1, len(text)), [*range(0, len(text), _CUT if engine else TEXT), len(text)]
        for start, end in pairwise(cuts):
            with torch.inference_mode(engine):
                states = hidden(
                    model, text[start:end], torch.arange(start, end), memory([SequencePiece(0, start, end)])
                )
                wanted = text[start + 1 : end + 1]
                for first in range(0, len(wanted), 512):
                    some = wanted[first : first + 512]
                    rows = logits(model, states[first : first + len(some)].detach()).detach()
                    parts.append(RowSoftmax.of(rows, torch.ones(len(some))).logprobs(some.numpy()).numpy())
    return np.concatenate(parts)


def differing(one: np.ndarray, other: np.ndarray) -> int:
    """How many of two arrays of fp32 numbers differ in a bit."""
    return int((one.view(np.uint32) != other.view(np.uint32)).sum())


def models(scratch: Path) -> dict[str, Path]:
    """The default model, and a tiny dense one, a mixture and a Gemma 3."""
    from ostinato.model.load import resolve
    from ostinato.testing.tiny import SUPPORTED, tiny_model, tiny_moe, tiny_of

    return {
        DEFAULT: resolve("smollm2", Path("~/.cache/ostinato"), print),
        DENSE: tiny_model(scratch / "dense"),
        MIXTURE: tiny_moe(scratch / "mixture"),
        GEMMA: tiny_of(scratch / "gemma", SUPPORTED["gemma3"]()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    own = "used by the examination itself: a model, its dtype and a form, that this process scores; may be repeated"
    parser.add_argument("--score", nargs=3, action="append", metavar=("MODEL", "DTYPE", "FORM"), help=own)
    parser.add_argument("--tokens", type=int, default=10 * TEXT)
    parser.add_argument("--only", action="append", choices=MODELS, help="this model; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.score:
        for number, (model, dtype, form) in enumerate(args.score):
            found = score(Path(model), dtype, form, args.tokens)
            np.save(args.out / f"{number}.npy", found)
        return
    rows: list[dict[str, Any]] = []
    left_out = [each.name for each in PROCESSORS if each not in possible()]
    with tempfile.TemporaryDirectory() as scratch:
        paths = models(Path(scratch))
        for name, dtype in product(args.only or MODELS, ("bfloat16", "float32")):
            rows += _compared(name, paths[name], dtype, args.tokens)
            report = {"tokens": args.tokens, "not on this CPU": left_out, "rows": rows}
            args.out.write_text(json.dumps(report, indent=1) + "\n")  # as far as it came
    sys.exit(any(row["differing"] for row in rows))


def _compared(name: str, path: Path, dtype: str, tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    want: dict[bool, np.ndarray] = {}  # in 8-bit integers, and not
    forms = [form for form in FORMS if name != MIXTURE or form != INTEGERS]
    for processor in possible():
        some = min(tokens, processor.most or tokens) if name == DEFAULT else tokens
        for form in forms:
            began = time.perf_counter()
            (found,) = scored([(path, dtype, form)], some, processor.switches)
            same = want.setdefault(form == INTEGERS, found)
            row = {"model": name, "dtype": dtype, "processor": processor.name, "as": form}
            rows.append(row | {"compared": len(found), "differing": differing(found, same[: len(found)])})
            print(*rows[-1].values(), f"{time.perf_counter() - began:.0f} s", sep="  ", flush=True)
    return rows


if __name__ == "__main__":
    main()
