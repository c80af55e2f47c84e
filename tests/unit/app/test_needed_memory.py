"""The least memory that a run's model needs, and how a run that has less is refused."""

import asyncio
import json

import pytest

from ostinato.app import gateway
from ostinato.app.gateway import branch_versions, open_embedded
from ostinato.app.memory import check_memory, needed, weight_count
from ostinato.app.numerics import compute
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.core.memory import GIB, Room
from ostinato.launch.commands import checks
from ostinato.launch.commands.checks import check_room
from ostinato.model.load import load_model
from ostinato.model.renderer import HFRenderer
from ostinato.testing.tiny import tiny_model


@pytest.fixture
def settings(tmp_path):
    model = tiny_model(tmp_path / "model")
    return lambda *more: load(None, [f"model.source='{model}'", *more])


def test_weights_are_counted_by_the_headers_alone(tmp_path):
    import torch

    model = tiny_model(tmp_path / "model")
    assert weight_count(model) == sum(each.numel() for each in load_model(model, torch.float32).parameters())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert weight_count(tmp_path / "empty") == 0, "what cannot be read is for loading to report"


def test_only_the_files_that_are_loaded_are_counted(tmp_path):
    model = tiny_model(tmp_path / "model")
    count, whole = weight_count(model), (model / "model.safetensors").read_bytes()
    (model / "consolidated.safetensors").write_bytes(whole)
    assert weight_count(model) == count
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"any": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_count(model) == count


@pytest.mark.parametrize("value", [-1, "8", [8], {"a": 1}, True, 1e9, 10**400])
@pytest.mark.parametrize("name", ["num_attention_heads", "num_hidden_layers", "num_key_value_heads"])
def test_what_is_no_count_needs_no_memory(settings, tmp_path, name, value):
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    assert needed(settings(), tmp_path / "model", "serve")["KV cache"] == 0


def test_a_model_of_no_heads_needs_no_memory(settings, tmp_path):
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_attention_heads": 0, "head_dim": None}))
    assert needed(settings(), tmp_path / "model", "serve")["KV cache"] == 0


def test_a_header_with_a_text_for_a_size_is_not_repeated(tmp_path):
    header = json.dumps({"any": {"dtype": "F32", "shape": ["x", 1 << 40], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert weight_count(tmp_path) == 0


def test_each_part_of_the_need_follows_its_setting(settings, tmp_path):
    count = weight_count(tmp_path / "model")
    narrow = needed(settings("engine.kv_tokens=1024"), tmp_path / "model", "serve")
    wide = needed(settings("engine.kv_tokens=2048", "model.dtype='float32'"), tmp_path / "model", "serve")
    assert wide["KV cache"] == 4 * narrow["KV cache"] > 0
    assert narrow["weights of 2 versions"] == 2 * 2 * count
    following = needed(settings("serve.learner_share=0.01"), tmp_path / "model", "serve")
    assert following["weights of 4 versions"] == 4 * 2 * count, (
        "the step that answers users, and the one that is tested"
    )
    training = needed(settings(), tmp_path / "model", "train")
    assert training["fp32 masters, gradients and moments"] == 16 * count
    assert needed(settings("engine.kind='vllm'", "engine.urls=['http://one']"), tmp_path / "model", "serve") == {}


def test_a_lack_is_one_line_with_both_numbers_and_a_remedy(settings, tmp_path):
    room = Room(size=GIB // 4, bound="the control group's limit of 1.0 GiB")
    with pytest.raises(BadConfig) as caught:
        check_memory(settings(), tmp_path / "model", ("serve", "train"), room)
    said = str(caught.value)
    for part in (
        "are needed (",
        f"{room.bound} leaves 0.2 GiB",
        "smaller model",
        "engine.kv_tokens",
        "another machine",
    ):
        assert part in said
    assert "\n" not in said
    check_memory(settings(), tmp_path / "model", ("serve", "train"), Room(size=4 * GIB, bound="the machine"))
    check_memory(settings("model.device=cuda"), tmp_path / "model", ("serve",), room)


def test_tenants_branches_count_a_trainer_and_their_versions_each(settings, tmp_path):
    path, words = tmp_path / "model", ("serve.api_keys=['acme:sk-acme-0123456789abcdef']", "serve.branches=['acme']")
    trained, count = settings(*words, "learn.tenants=['acme']"), weight_count(path)
    assert needed(settings(*words), path, "serve")["weights of 3 versions"] == 3 * 2 * count
    assert needed(trained, path, "serve")["weights of 4 versions"] == 4 * 2 * count
    alone = sum(sum(needed(trained, path, part).values()) for part in ("serve", "train"))
    both = alone + sum(needed(trained, path, "train").values())
    check_memory(trained, path, ("serve", "train"), Room(size=both, bound="the machine"), branches=1)
    for room in (alone, both - 1):
        with pytest.raises(
            BadConfig, match=r"trainers of 1 branches .*fewer branches \(serve.branches, learn.tenants\)"
        ):
            check_memory(trained, path, ("serve", "train"), Room(size=room, bound="the machine"), branches=1)


async def test_a_gateway_starts_without_room_for_what_its_branches_may_come_to(settings, tmp_path, monkeypatch):
    words = ("serve.api_keys=['acme:sk-acme-0123456789abcdef']", "serve.branches=['acme']", "learn.tenants=['acme']")
    config, path = settings(f"run.directory='{tmp_path}/run'", *words), tmp_path / "model"
    width = (await asyncio.to_thread(compute, config)).itemsize
    live, own, judged = ("aa" * 32, "bb" * 32, "cc" * 32)

    async def starts(room):
        monkeypatch.setattr(gateway, "process_limit", lambda: Room(size=room, bound="the machine"))
        with open_run(config) as run:
            await open_embedded(config, path, HFRenderer(path), await branch_versions(run))

    shared = sum(needed(config, path, "serve", width, 0).values())
    each = weight_count(path) * width
    at, held = {}, []
    for roots in ({"live": live, "branch/acme": live}, {"branch/acme": own}, {"branches/acme/evaluation": judged}):
        with open_run(config) as run:
            for ref, root in roots.items():
                await run.store.move_ref(ref, at.get(ref), root)
            held.append(await branch_versions(run))
        at |= roots
        await starts(shared + held[-1] * each)
        with pytest.raises(BadConfig, match=f"weights of {2 + held[-1]} versions .*fewer branches"):
            await starts(shared + held[-1] * each - 1)
    assert held == [0, 1, 2]
    assert needed(config, path, "serve", width) == needed(config, path, "serve", width, 2)


def test_doctor_and_up_count_the_trainers_of_branches(settings, tmp_path, monkeypatch):
    words = ("serve.api_keys=['acme:sk-acme-0123456789abcdef']", "serve.branches=['acme']", "learn.tenants=['acme']")
    alone = sum(sum(needed(settings(*words), tmp_path / "model", part).values()) for part in ("serve", "train"))
    monkeypatch.setattr(checks, "free_memory", lambda: Room(size=alone, bound="the machine"))
    check_room(settings(*words, "learn.tenants=[]"))
    with pytest.raises(BadConfig, match="trainers of 1 branches"):
        check_room(settings(*words))
