"""Every causal language model of the installed transformers, tiny and random: is it computed as the library does, or refused?

    python -m tests.examinations.architectures.run [--only NAME ...] [--out DIR]

Each is made by its class of configuration, saved, and loaded by `load_model`, in a child process. If it loads, the logits of three
sequences in one pass, longer than any window, are compared with those of the library's own forward pass, in fp32. The states:

    equal     the same logits, up to rounding
    refused   by an error of ours, with its reason
    crash     by any other error, or the end of the process
    wrong     loaded, and other logits
    untried   the class makes no tiny model, or the library cannot compute it

Ends with code 1 if there is a crash or a wrong one. Writes tests/examinations/results/architectures.json, from which
`python -m tests.examinations.architectures.table` makes docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.progress import Progress
from tests.examinations.architectures.kinds import WINDOW, every_kind, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as library_logging

from ostinato.core.errors import OstinatoError
from ostinato.model.attention import CausalAttend, hidden, logits
from ostinato.model.load import load_model
from ostinato.testing.tiny import byte_tokenizer

RESULT = Path(__file__).parents[1] / "results" / "architectures.json"
LENGTHS = [WINDOW + 5, 1, 3 * WINDOW]
TOLERANCE = 1e-4
"""The largest difference of a logit, as a share of the largest logit."""
LARGEST = 30_000_000
"""Parameters above which a model does not count as tiny."""
LIMIT_S = 300
STATES = ("equal", "refused", "crash", "wrong", "untried")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one architecture fared. `difference`: the largest of a logit as a share of the largest logit, None if nothing was compared."""

    kind: str
    state: str
    reason: str = ""
    difference: float | None = None


def examine(kind: str) -> Outcome:
    """Try one architecture, in this process."""
    try:
        model = _tiny(kind)
        want = _by_the_library(model)
    except Exception as error:  # noqa: BLE001 (whatever a class says of sizes that it was not made for)
        return Outcome(kind=kind, state="untried", reason=_line(error))
    if not want.isfinite().all() or not want.std() > 0:
        return Outcome(kind=kind, state="untried", reason="random weights give no logits that could be compared")
    with tempfile.TemporaryDirectory() as place:
        try:
            model.save_pretrained(place)
            byte_tokenizer().save_pretrained(place)
        except Exception as error:  # noqa: BLE001
            return Outcome(kind=kind, state="untried", reason=f"cannot be saved: {_line(error)}")
        return _compared(kind, Path(place), want)


def _compared(kind: str, place: Path, want: Tensor) -> Outcome:
    try:
        ours = load_model(place, torch.float32)
        ids, positions = torch.cat(_ids()), torch.cat([torch.arange(length) for length in LENGTHS])
        with torch.inference_mode():
            got = logits(ours, hidden(ours, ids, positions, CausalAttend(LENGTHS)))
    except OstinatoError as error:
        return Outcome(kind=kind, state="refused", reason=str(error).replace(f"{place}/", ""))
    except Exception as error:  # noqa: BLE001 (what this looks for)
        return Outcome(kind=kind, state="crash", reason=_line(error))
    apart = float((got - want).abs().max() / want.abs().max())
    return Outcome(kind=kind, state="equal" if apart <= TOLERANCE else "wrong", difference=apart)


def _tiny(kind: str) -> PreTrainedModel:
    config = tiny_config(kind)
    with torch.device("meta"):
        count = sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"the smallest model that the tables make has {count:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _by_the_library(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in _ids()])


def _ids() -> list[Tensor]:
    drawn = torch.randint(1, 250, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return list(drawn.split(LENGTHS))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def apart(kind: str, work: Callable[[str], Outcome] = examine, limit_s: float = LIMIT_S) -> Outcome:
    """`work(kind)` in a child process, whose death is an outcome too."""
    context = multiprocessing.get_context("fork")  # imports are not paid again
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(work, kind, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        if ours.poll(limit_s):
            return ours.recv()
        return Outcome(kind=kind, state="crash", reason=f"no answer within {limit_s:g} s")
    except EOFError:
        child.join()
        return Outcome(kind=kind, state="crash", reason=f"the process ended with code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def _tell(work: Callable[[str], Outcome], kind: str, answer: Connection) -> None:
    answer.send(work(kind))


def main() -> int:
    """Run the examination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=every_kind(), help="these model types alone")
    parser.add_argument("--out", type=Path, default=RESULT.parent)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    chosen: list[str] = args.only or every_kind()
    found: list[Outcome] = []
    with Progress() as progress:
        bar = progress.add_task("architectures", total=len(chosen))
        for kind in chosen:
            progress.update(bar, description=f"{kind:24}")
            found.append(apart(kind))
            last = found[-1]
            measured = "" if last.difference is None else f"{last.difference:.1e}"
            progress.console.print(f"{last.state:8} {kind:24} {measured}{last.reason}", markup=False, soft_wrap=True)
            progress.advance(bar)
    totals = Counter(outcome.state for outcome in found)
    print(", ".join(f"{totals[state]} {state}" for state in STATES))
    if not args.only:
        _write(args.out, found, totals)
    return 1 if totals["crash"] or totals["wrong"] else 0


def _write(out: Path, found: list[Outcome], totals: Counter[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "totals": {state: totals[state] for state in STATES},
        "architectures": [asdict(outcome) for outcome in found],
    }
    (out / RESULT.name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
