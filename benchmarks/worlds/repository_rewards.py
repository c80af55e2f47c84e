"""SmolLM2-135M learns from rewards to take notes on repositories longer than its window.

    python -m benchmarks.worlds.repository_rewards --out DIR --steps 12 --minutes 40

One command: a start by imitation (`repository.py`), optimizer steps from rewards, and both models' answers to the same questions about
held-out repositories with the paired differences. Each part is skipped if it is in DIR already, so that a run that was killed,
at any time, goes on: rollouts are in a journal, turns and batches in the log, the trainer in a checkpoint after each step.

A reward is 1 for a right answer at the end of a chain and 0 for another one, or, with `--partial`, so many times the share of the chain's
facts in its last notes; all that was sampled in the chain gets its advantage over its group, notes included (arm `all`) or answers alone
(`nosum`). Rollout worker, gateway, engine, log, reward desk, credit
and trainer are the product's, in one process. Rollouts wait while the trainer computes, so that all tokens are on-policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from benchmarks.worlds.repository import TAUGHT, Measured, beside, measure, short, teach
from benchmarks.worlds.repository_world import Chain, RepositoryReader, tasks_of
from benchmarks.worlds.summaries import ARMS, EXACT, NearGateway, served

from ostinato.core.errors import BadRequest, NoSignal
from ostinato.core.files import write_atomic
from ostinato.core.records import Arm, PolicyVersion, Turn
from ostinato.core.report import ItemScore
from ostinato.core.samples import TrainingBatch
from ostinato.core.weights import Snapshot
from ostinato.evaluate.statistics import mcnemar, mean_difference, paired_items
from ostinato.model.load import resolve
from ostinato.record.log import SqlLog
from ostinato.reward.config import RewardConfig
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import asker_of
from ostinato.train.trainer import PolicyTrainer
from ostinato.weights.follow.export import write_model
from ostinato.worlds.grading.grade import Grade, PatternGrader
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.rollout import Rollout
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.rollout.finished import Finished
from ostinato.worlds.rollout.groups import EventFile, SpentGroups
from ostinato.worlds.rollout.rollout_worker import Rollouts
from ostinato.worlds.tasks.task import Task
from ostinato.worlds.tasks.tasksets import taskset_of

GROUP = 8
SIZES, LINKS = ((400, 900), 2), (1, 1, 2)  # as in `repository.py`, with fewer questions and shorter windows
REPOSITORIES = 256  # that are learned from, with three questions each
HELD_OUT, LEARNED_FROM = 10_000, 30_000  # added to the seed
KV_TOKENS = 1 << 13
TRAINING = TAUGHT.model_copy(update={"microbatch_tokens": 512, "recompute_tokens": 1024})  # for less memory
SHOWN = "learning_rate", "signal", "grad_norm", "turns", "tokens", "tokens_sampled", "seconds", "mismatch_differing"


class NotesGrader:
    """Implements `Grader`: 1 for a right answer, else `partial` times the share of the chain's facts in the notes that it had."""

    def __init__(self, known: Mapping[str, tuple[Task, Chain]], partial: float) -> None:
        self._known, self._partial = known, partial

    async def grade(self, task: Task, rollout: Rollout) -> Grade:
        """Raises as `PatternGrader.grade`."""
        grade = await PatternGrader().grade(task, rollout)
        if grade.solved or not self._partial:
            return grade
        notes = rollout.messages[-3].text  # then the question and the answer
        facts = self._known[task.id][1].seen(len(task.spec.files))
        return Grade(value=self._partial * sum(fact in notes for fact in facts) / len(facts))


class Learning:
    """One arm's run, opened in a directory where it may have been killed before."""

    def __init__(
        self, base: Path, arm: str, place: Path, *, seed: int, groups: int, rate: float, partial: float = 0.0
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.place, self.seed, self.groups = place, seed, groups
        self.known = dict[str, tuple[Task, Chain]]()
        for number, (repository, reader) in enumerate(islice(short(LEARNED_FROM + seed, SIZES, LINKS), REPOSITORIES)):
            tasks = tasks_of(f"l{number}", repository, characters=reader.characters)
            self.known |= {task.id: (task, chain) for task, chain in zip(tasks, repository.chains, strict=True)}
        self.reader, self.grader = RepositoryReader(SIZES[0][1]), NotesGrader(self.known, partial)
        self.log = SqlLog.open(place / "log")
        self.engine, self.app = served(base, self.log, kv_tokens=KV_TOKENS)
        reward = RewardConfig(purposes=ARMS[arm], settle_s=0.0)
        taught = Taught(people=False, groups=groups)
        self.desk = RewardDesk(self.log, asker_of(reward), time.time, reward, taught=taught)
        self.trainer = PolicyTrainer(base, TRAINING.model_copy(update={"learning_rate": rate}), EXACT)
        self.trainer.resume(place / "checkpoints")

    async def load(self) -> None:
        """Have the engine sample with the trainer's weights."""
        number = self.trainer.step_count
        policy = PolicyVersion(number=number, hash=f"v{number}")
        await self.engine.load(Arm.WORLD, Snapshot(policy=policy, weights=self.trainer.weights()))

    async def step(self, gateway: WorldGateway) -> None:
        """Sample groups until as many differ as a step takes, and take the step. A step that the log holds already is taken as recorded."""
        began, wall = time.process_time(), time.time()
        batch = await self._batch() or await self._sampled(gateway)
        sampled = time.process_time() - began
        learned = await asyncio.to_thread(self.trainer.step, batch.samples)
        told = {name: learned.metrics[name] for name in SHOWN if name in learned.metrics}
        told |= {"cpu_s": time.process_time() - began, "sampling_cpu_s": sampled, "wall_s": time.time() - wall}
        found = await self.rollouts(learned.step - 1)
        line = json.dumps({"step": learned.step, **told, **found.told(), "questions": found.questions})
        with (self.place / "steps.jsonl").open(
            "a"
        ) as file:  # a step that is killed here is taken again, and told again
            file.write(line + "\n")
        self.trainer.save(self.place / "checkpoints", cursor=0, keep=1)
        await self.load()
        rounded = {name: float(f"{value:.3g}") for name, value in told.items()}
        print(f"step {learned.step}: {rounded} {found.told()}", flush=True)

    async def _batch(self) -> TrainingBatch | None:
        try:
            at = self.trainer.step_count
            return await self.desk.batch(at + 1, 1, PolicyVersion(number=0, hash="v0"))
        except NoSignal:
            return None

    async def _sampled(self, gateway: WorldGateway) -> TrainingBatch:
        """Roll out until the desk has a batch; then no rollout goes on."""
        journal, events = EventFile.open(self.place / "rollouts.jsonl")
        config = WorldsConfig(
            group=GROUP,
            groups=self.groups,
            group_first=0,
            lead=1,
            window=2 * self.groups,
            concurrency=2 * GROUP * self.groups,
            curriculum=False,
            epochs=0,
            seed=self.seed,
        )
        shop = Workshop(harnesses={self.reader.name: self.reader}, backend=None, grader=self.grader, gateway=gateway)
        tasks = taskset_of("repositories", [task for task, _ in self.known.values()])
        with (self.place / "finished.jsonl").open("a") as kept:
            print(file=kept)  # a kill may have cut the last line

            def keep(finished: Finished) -> None:
                print(finished.line(), file=kept, flush=True)

            worker = Rollouts(
                tasks, shop, journal, events, SpentGroups(self.log, after=0), config, lambda *_, **__: None, keep
            )
            work = asyncio.create_task(worker.run())
            try:
                while (batch := await self._batch()) is None:
                    if work.done():
                        work.result()
                    await asyncio.sleep(0.25)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                journal.close()
        return batch

    async def rollouts(self, policy: int) -> Measured:
        """All rollouts that ended under a policy version, flat groups included."""
        found = Measured()
        for line in (self.place / "finished.jsonl").read_text().splitlines():
            try:
                each = Finished.read(line)
            except BadRequest:  # an empty line, or one that a kill cut
                continue
            if each.value is None or each.policy is None or each.policy.number != policy:
                continue
            task, chain = self.known[each.task]
            turns = {turn.id: turn for turn in await self.log.find(Turn, [(name,) for name in each.turns])}
            own = [turns[name] for name in each.turns]
            found.take(task, chain, each.effort, own, self.reader.parts(task), each.value)
            found.questions[each.episode] = found.questions.pop(task.id) | {"task": task.id}
        return found

    async def close(self) -> None:
        """Close the files and end the engine."""
        await self.engine.close()
        self.log.close()
        self.trainer.close()


async def learn(base: Path, arm: str, place: Path, *, steps: int, minutes: float, **options: Any) -> int:
    """Take steps until there are so many, or the minutes are over, and write the model. Returns how many there are. For `options` see
    `Learning`.
    """
    until = time.time() + 60 * minutes
    run = Learning(base, arm, place, **options)
    try:
        await run.engine.start()
        await run.load()
        async with NearGateway(run.app) as gateway, run.app.router.lifespan_context(run.app):
            while run.trainer.step_count < steps and time.time() < until:
                await run.step(gateway)
        write_model(run.trainer.weights(), place / "model", beside(base), {"format": "pt"})
        return run.trainer.step_count
    finally:
        await run.close()


# ---------------------------------------------------------------- measuring


def measured_once(model: Path, to: Path, *, seed: int, count: int, temperature: float) -> dict[str, Any]:
    """The held-out questions, asked of a model, unless the file has their answers."""
    if not to.exists():
        given = list(islice(short(HELD_OUT + seed, SIZES, LINKS), count))
        began = time.process_time()
        found = asyncio.run(measure(model, given, temperature, kv_tokens=KV_TOKENS))
        told = found.told() | {"cpu_s": round(time.process_time() - began, 1)}
        write_atomic(to, json.dumps({**told, "questions": found.questions}), durable=True)
        print(to.stem, json.dumps(told), flush=True)
    return json.loads(to.read_text())


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What changed from one measurement to another of the same questions, with 95% intervals over repositories, whose questions are
    averaged. `gained` and `lost` are questions.
    """

    def kept(question: Mapping[str, Any]) -> float:
        return question["kept"] / question["known"]

    def right(question: Mapping[str, Any]) -> float:
        return question["right"]

    told = dict[str, Any]()
    for name, score in (("right", right), ("facts kept", kept)):
        sides = [
            [
                ItemScore(item=task.rpartition("-")[0], draw=int(task.rpartition("-")[2]), score=score(question))
                for task, question in side["questions"].items()
            ]
            for side in (after, before)
        ]
        _, differences, _ = paired_items(*sides)
        found = mean_difference(differences, lower_alpha=0.025, upper_alpha=0.025)
        told[name] = f"{found.mean:+.3f} [{found.lower:+.3f}, {found.upper:+.3f}] over {found.n} repositories"
    pairs = [(before["questions"][task]["right"], each["right"]) for task, each in after["questions"].items()]
    gained, lost = pairs.count((0.0, 1.0)), pairs.count((1.0, 0.0))
    return told | {"gained": gained, "lost": lost, "mcnemar": round(mcnemar(gained, lost), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="what is done is kept here; the same command goes on with it"
    )
    parser.add_argument("--base", type=Path, default=None, help="the model directory; SmolLM2-135M-Instruct")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/ostinato").expanduser())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitate", type=int, default=12, help="steps of the start by imitation")
    parser.add_argument("--imitation-rate", type=float, default=3e-4, help="its learning rate")
    parser.add_argument("--arm", choices=sorted(ARMS), default="all")
    parser.add_argument("--groups", type=int, default=6, help="groups of eight chains a step")
    parser.add_argument("--rate", type=float, default=3e-5, help="learning rate of the steps from rewards")
    parser.add_argument(
        "--partial", type=float, default=0.0, help="reward of all facts in the last notes without the answer"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further step from rewards begins")
    parser.add_argument("--count", type=int, default=16, help="held-out repositories, with three questions each")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the measurements")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base = args.base or resolve("smollm2", args.cache)
    args.out.mkdir(parents=True, exist_ok=True)
    start, place = args.out / "start", args.out / args.arm
    if not (start / "model.safetensors").exists():
        training = TRAINING.model_copy(update={"learning_rate": args.imitation_rate})
        wanted = {"steps": args.imitate, "minutes": 1e9, "seed": args.seed}
        teach(base, start, **wanted, training=training, sizes=SIZES, links=LINKS)
    at = f"{args.count}-{args.temperature:g}"
    asked = {"seed": args.seed, "count": args.count, "temperature": args.temperature}
    taken = asyncio.run(
        learn(
            start,
            args.arm,
            place,
            seed=args.seed,
            groups=args.groups,
            rate=args.rate,
            partial=args.partial,
            steps=args.steps,
            minutes=args.minutes,
        )
    )
    before = measured_once(start, args.out / f"start-{at}.json", **asked)
    after = measured_once(place / "model", args.out / f"{args.arm}-after-{taken}-{at}.json", **asked)
    print(json.dumps(compared(before, after)), flush=True)


if __name__ == "__main__":
    main()
