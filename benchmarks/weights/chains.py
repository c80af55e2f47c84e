"""Version chains from real training, for codec.py: a recorded live run's batches, trained on again at several learning rates.

    ostinato demo                                    # once: a live loop on the real model, 14 minutes
    python -m benchmarks.weights.chains --run runs/demo-0 [--rates 1e-6 3e-6 1e-5 2e-5] [--steps 26]

Every step of every rate is published to a weight store of its own, `.peers/chains/<rate>`. The batches (turns of simulated users
with their reactions and credits) are the recorded ones. Only the learning rate differs, and the importance weights show how
far each policy is from the policy that sampled. A step takes about 15 seconds on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from benchmarks.contender import PEERS
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ostinato.app.numerics import training
from ostinato.app.storage import model_path, open_log
from ostinato.app.trainer import open_desk
from ostinato.config import Config, load
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.publish.publisher import PublisherConfig, VersionPublisher
from ostinato.weights.store.directory import DirectoryStore

CHAINS = PEERS / "chains"


def recorded(run: Path, scratch: Path, cache: Path) -> Config:
    """The run's configuration over a copy of its log, so that the run itself is not changed."""
    shutil.copytree(run / "log", scratch / "log")
    return load(run / "config.json", [f"run.directory={scratch}", f"model.cache={cache}"])


async def chain(config: Config, rate: float, steps: int, out: Path, progress: Progress) -> None:
    """Publish the versions of `steps` steps at one learning rate; version 0 is the starting model."""
    bar = progress.add_task(f"learning rate {rate:g}", total=steps)
    settings = training(config).model_copy(update={"learning_rate": rate, "kl_beta": 0.0})
    pool = ThreadPoolExecutor(1)  # one thread, because each thread has a heap that keeps the memory that a step freed
    trainer = PolicyTrainer(model_path(config), settings)
    publisher = VersionPublisher(DirectoryStore(out), PublisherConfig(verify=False))
    base = (await publisher.publish(0, trainer.weights(), run=f"{rate:g}", base=None, ref="live")).policy
    with open_log(config) as log:
        async for batch in open_desk(config, log).history():
            learned = await asyncio.wrap_future(pool.submit(trainer.step, batch.samples))
            meta = {"ess": learned.metrics["ess"], "batch": batch.row.step}
            done = await publisher.publish(
                learned.step, learned.weights, run=f"{rate:g}", base=base, ref="live", meta=meta
            )
            base = done.policy
            progress.update(
                bar, advance=1, description=f"learning rate {rate:g}: {done.ratio:.0f}x, ESS {meta['ess']:.2f}"
            )
            if learned.step == steps:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="directory of a recorded live run")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 2e-5])
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato"))
    parser.add_argument("--out", type=Path, default=CHAINS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as scratch, Progress(*columns) as progress:
        config = recorded(args.run, Path(scratch), args.cache.expanduser())
        for rate in args.rates:
            asyncio.run(chain(config, rate, args.steps, args.out / f"{rate:g}", progress))


if __name__ == "__main__":
    main()
