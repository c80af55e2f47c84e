"""The settings of each host of the run as `--set` words: the same for all but for the host's own address."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.examinations.hosts.lab import PLACE, Host, Lab

from ostinato.launch.commands.demo import demo_overrides
from ostinato.model.load import resolve
from ostinato.testing.tiny import tiny_model

LIKED = "^[a-z]"
LETTERS = {"max_tokens": 6, "temperature": 1.0}
FOLLOWERS = tuple(f"follower-{number}" for number in (1, 2, 3, 4))
GATEWAYS = ("gateway-1", "gateway-2")
TRAINERS = ("trainer-1", "trainer-2")
HOSTS = ("log", "bucket", *GATEWAYS, *TRAINERS, "release", *FOLLOWERS, "users", "operator")
CREWS = {
    **dict.fromkeys(GATEWAYS, ("serve",)),
    **dict.fromkeys(TRAINERS, ("train",)),
    "release": ("release", "housekeeping"),
}
MODELS = (*GATEWAYS, *TRAINERS, "users", "operator")
"""The hosts that have the model's files."""
CLIENT_KEY, ADMIN_KEY = "examination-client-0123", "examination-operator-0123"
SECRETS = {
    "LOG_PASSWORD": "examination-log-0123",
    "AWS_ACCESS_KEY_ID": "examination",
    "AWS_SECRET_ACCESS_KEY": "examination-bucket-0123",
}
PORT, BUCKET_PORT = 8321, 5000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run's size, model and timing. `minutes` is the duration of traffic."""

    tiny: bool
    minutes: float
    users: int
    seed: int
    replay: bool

    @property
    def lease_s(self) -> float:
        return 4.0 if self.tiny else 15.0

    @property
    def window_s(self) -> float:
        """Seconds that people have to react."""
        return 3.0 if self.tiny else 10.0

    @property
    def model(self) -> str:
        return str(PLACE / "model") if self.tiny else "smollm2"


def url(host: Host) -> str:
    return f"http://{host.address}:{PORT}"


def words(lab: Lab, host: Host, plan: Plan) -> list[str]:
    """The settings of a host's processes."""
    demo = demo_overrides("copilot", plan.seed, PLACE / "run")
    return [
        *(_quick(plan) if plan.tiny else demo),
        f"run.directory='{PLACE / 'run'}'",
        f"model.source='{plan.model}'",
        f"listen.host='{host.address}'",
        f"listen.port={PORT}",
        f"serve.api_keys=['demo:{CLIENT_KEY}']",
        f"serve.admin_key='{ADMIN_KEY}'",
        f"record.url='postgresql://loop@{lab['log'].address}/loop'",
        "record.password_env='LOG_PASSWORD'",
        "record.allow_unverified=true",
        f"record.lease_s={plan.lease_s}",
        "weights.url='s3://weights/run'",
        f"weights.options={{aws_endpoint='http://{lab['bucket'].address}:{BUCKET_PORT}', aws_region='us-east-1'}}",
        f"evaluate.gateway='{url(lab[GATEWAYS[1]])}'",
        "evaluate.gate.sample_best=false",  # each gateway holds one copy of the model less: 24 GB have to do for all hosts
    ]


def _quick(plan: Plan) -> list[str]:
    return [
        "model.name='tiny'",
        "model.dtype='float32'",
        f"serve.arm_salt='hosts-{plan.seed}'",
        "serve.control_share=0.25",
        f"reward.options={{window={plan.window_s}}}",
        "reward.settle_s=0.2",
        "reward.max_staleness=12",
        "learn.batch=32",
        "learn.checkpoint_every=3",
        "learn.publish_every=2",
        "learn.max_lead=8",
        "learn.poll_s=0.2",
        "train.compute='fp32'",
        "train.publish='fp32'",
        "train.learning_rate=2e-3",
        "train.turn_tokens=6",
        f"evaluate.suite='{PLACE / 'suite.jsonl'}'",
        "evaluate.gate.margin=0.2",
        "evaluate.gate.total_margin=0.3",
        "evaluate.gate.candidates_per_week=1",
        "evaluate.gate.sealed_share=0.0",
        "evaluate.gate.first_draws=2",
        "release.poll_s=0.5",
        "release.cooldown_s=5.0",
        f"release.outcomes.maturity_s={plan.window_s}",
        "follow.interval_s=0.5",
        "supervise.longest_wait_s=2.0",
    ]


def letters(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {number % 7}"}]


def furnish(lab: Lab, plan: Plan) -> None:
    """Put on each host the files that an operator would install: the model and the suite. No two hosts share a file."""
    item = {"family": "letters", "sampling": LETTERS, "grader": "pattern", "pattern": LIKED}
    suite = "".join(json.dumps(item | {"id": f"i{n}", "messages": letters(n)}) + "\n" for n in range(40))
    for host in lab.hosts.values():
        (host.directory / "suite.jsonl").write_text(suite)
    if plan.tiny:
        for name in MODELS:
            tiny_model(lab[name].directory / "model", seed=plan.seed)
        return
    found = resolve("smollm2", Path("~/.cache/ostinato"), print)
    for name in MODELS:
        shutil.copytree(found, lab[name].directory / "home" / ".cache" / "ostinato" / found.name)
