"""Routes seen in one pass are the routes of another, gates stay live, and wrong routes never get in."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, OlmoeConfig, OlmoeForCausalLM

from ostinato.core.errors import BadConfig, BadRoutes
from ostinato.model import routing
from ostinato.model.attention import CausalAttend, hidden
from ostinato.model.load import empty_model, load_model
from ostinato.testing.tiny import tiny_model, tiny_moe

torch.set_num_threads(1)
KINDS = ["qwen3_moe", "olmoe", "mixtral"]
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [8, 12]
N, L, K, E = sum(LENGTHS), 2, 3, 8


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return {kind: tiny_moe(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def path(request, paths):
    return paths[request.param]


def _ids(seed=0):
    return torch.randint(0, 256, (N,), generator=torch.Generator().manual_seed(seed))


def _run(model, ids=None, lengths=LENGTHS):
    positions = torch.cat([torch.arange(length) for length in lengths])
    return hidden(model, _ids() if ids is None else ids, positions, CausalAttend(lengths))


def _routers(model):
    return [layer.mlp.gate for layer in model.model.layers]


def _perturb(model, scale=0.3):
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for router in _routers(model):
            router.weight += (scale * torch.randn(router.weight.shape, generator=source)).to(router.weight.dtype) * 0.1


def _recorded(model):
    with torch.inference_mode(), routing.of(model).record() as seen:
        out = _run(model)
    return out, seen.ids_NLk()


def _loss(model):
    out = _run(model).float()  # normed: a plain square would be constant
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum()


def _gradients(model, ids_NLk=None):
    model.zero_grad()
    if ids_NLk is None:
        _loss(model).backward()
    else:
        with routing.of(model).replay(ids_NLk):
            _loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", DTYPES)
def test_record_then_replay_is_the_same_pass_to_the_bit(path, dtype):
    model = load_model(path, dtype)
    live, ids_NLk = _recorded(model)
    assert ids_NLk.shape == (N, L, K)
    assert ids_NLk.dtype == torch.uint8
    assert (ids_NLk[..., 1:] > ids_NLk[..., :-1]).all()
    assert len(ids_NLk.flatten(0, 1).unique(dim=0)) > 5  # routers with opinions, or this file proves nothing
    with torch.inference_mode(), routing.of(model).replay(ids_NLk) as replay:
        assert torch.equal(_run(model), live)
    assert (replay.flips, replay.routed, replay.implausible) == (0, N * L, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_routes_do_not_depend_on_the_company(path, dtype):
    model = load_model(path, dtype)
    whole, ids_NLk = _recorded(model)
    first, second = _ids().split(LENGTHS)
    with torch.inference_mode(), routing.of(model).record() as seen:
        alone = _run(model, first, [8])
        alone_ids = seen.ids_NLk()
        swapped = _run(model, torch.cat([second, first]), [12, 8])
    assert torch.equal(alone, whole[:8])
    assert torch.equal(alone_ids, ids_NLk[:8])
    assert torch.equal(swapped, torch.cat([whole[8:], whole[:8]]))
    assert torch.equal(seen.ids_NLk(), torch.cat([ids_NLk[8:], ids_NLk[:8]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_on_the_router_flips_and_replay_undoes_it(path, dtype):
    engine, trainer = load_model(path, dtype), load_model(path, dtype)
    _, ids_NLk = _recorded(engine)
    _perturb(trainer)
    _, drifted = _recorded(trainer)
    assert not torch.equal(drifted, ids_NLk)
    with torch.inference_mode(), routing.of(trainer).replay(ids_NLk) as replay:
        _run(trainer)
    assert torch.equal(replay.ids_NLk(), ids_NLk)  # no flip is left in what was used
    assert 0 < replay.flips < replay.routed  # and what was undone is counted


def test_many_experts_and_ties_replay_to_the_bit(tmp_path):
    model = load_model(tiny_moe(tmp_path, experts=300, top_k=10, layers=3), torch.bfloat16)
    live, ids_NLk = _recorded(model)
    assert ids_NLk.dtype == torch.int16
    with torch.inference_mode(), routing.of(model).replay(ids_NLk.flip(-1)) as replay:
        assert torch.equal(_run(model), live)
    assert replay.flips == 0


def _dense_block(block, ids_Nk, normalised):
    """Every expert for every token, weighted by a dense matrix of gates that is zero off the given ids."""

    def forward(x):
        flat = x.reshape(-1, x.shape[-1])
        probabilities = torch.softmax(F.linear(flat, block.gate.weight), -1)
        gates = torch.zeros_like(probabilities).scatter(-1, ids_Nk, 1.0) * probabilities
        if normalised:
            gates = gates / gates.sum(-1, keepdim=True)
        up = torch.einsum("nd,eod->neo", flat, block.experts.gate_up_proj)
        gate, up = up.chunk(2, -1)
        out = torch.einsum("nei,edi->ned", F.silu(gate) * up, block.experts.down_proj)
        return torch.einsum("ned,ne->nd", out, gates).reshape(x.shape)

    return forward


def test_gradients_with_replay_are_those_of_a_dense_gather(path):
    _, ids_NLk = _recorded(load_model(path, torch.float32))
    model = load_model(path, torch.float32, train=True)
    _perturb(model)
    reference = copy.deepcopy(model)
    for layer, ids_Nk in zip(reference.model.layers, ids_NLk.long().unbind(1), strict=True):
        layer.mlp.forward = _dense_block(layer.mlp, ids_Nk, "olmoe" not in model.config.model_type)
    ours, dense = _gradients(model, ids_NLk), _gradients(reference)
    live = _gradients(model)
    assert ours.keys() == dense.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, dense[name], rtol=1e-4, atol=1e-5 * float(dense[name].abs().max()))
        if "gate.weight" in name:
            assert gradient.abs().max() > 0
            assert not torch.allclose(gradient, live[name], rtol=1e-2)  # the replayed routes matter


def _recompute(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_activations_find_the_same_routes(path, dtype):
    _, ids_NLk = _recorded(load_model(path, dtype))
    model = load_model(path, dtype, train=True)
    _perturb(model)
    kept = _gradients(model, ids_NLk)
    _recompute(model)
    calls = []
    handle = _routers(model)[0].register_forward_hook(lambda *_: calls.append(1))
    with routing.of(model).replay(ids_NLk) as replay:
        model.zero_grad()
        _loss(model).backward()
    recomputed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(calls) == 2  # it was recomputed
    assert 0 < replay.flips < N * L  # and counted once
    assert kept.keys() == recomputed.keys()
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)
    handle.remove()


def test_closing_replay_before_a_recomputing_backward_is_an_error(paths):
    model = load_model(paths["qwen3_moe"], torch.float32, train=True)
    _, ids_NLk = _recorded(model)
    _recompute(model)
    with routing.of(model).replay(ids_NLk):
        loss = _loss(model)
    with pytest.raises(BadRoutes, match="after the backward pass"):
        loss.backward()
    _loss(model).backward()  # live passes are not in doubt


def test_tokens_without_routes_keep_their_live_choice(path):
    model = load_model(path, torch.float32)
    live, ids_NLk = _recorded(model)
    other = torch.full((N, L, K), -1)
    other[:6] = (ids_NLk[:6].long() + 1) % E  # distinct still
    with torch.inference_mode(), routing.of(model).replay(other) as replay:
        _run(model)
    used = replay.ids_NLk()
    assert torch.equal(used[:6], other[:6].sort(-1).values.to(torch.uint8))
    assert torch.equal(used[6:, 0], ids_NLk[6:, 0])
    assert replay.routed == 6 * L
    unknown = torch.full((N, L, K), -1)
    with torch.inference_mode(), routing.of(model).replay(unknown) as replay:
        assert torch.equal(_run(model), live)
    assert (replay.routed, replay.flips) == (0, 0)


def test_implausible_experts_give_way_to_the_live_choice(path):
    model = load_model(path, torch.float32)
    live, ids_NLk = _recorded(model)
    routes = ids_NLk.clone()
    logits = []
    handle = _routers(model)[0].register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    with torch.inference_mode():
        _run(model)
    handle.remove()
    worst = logits[0].argsort(-1)[:, :K]
    routes[:5, 0] = worst[:5].sort(-1).values.to(torch.uint8)
    probabilities = torch.softmax(logits[0], -1).sort(-1, descending=True).values
    ratio = probabilities[:5, -1] / probabilities[:5, K - 1]
    between = float(ratio.sort().values[2:4].mean())
    doubted = int((ratio < between).sum())
    assert doubted == 3
    results = {}
    for plausible in (None, 0.0, between, 1.0):
        with torch.inference_mode(), routing.of(model).replay(routes, plausible=plausible) as replay:
            out = _run(model)
        used_first = replay.ids_NLk()[:, 0]
        results[plausible] = replay.implausible, int((used_first != ids_NLk[:, 0]).any(-1).sum()), replay.flips >= 5
        if plausible == 1.0:
            assert torch.equal(out, live)
    assert results == {
        None: (0, 5, True),
        0.0: (0, 5, True),
        between: (results[between][0], 2, True),
        1.0: (5, 0, True),
    }
    assert results[between][0] >= 3  # later layers see other inputs and may doubt too


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: ids[:0], "missing"),
        (lambda ids: ids[0], "missing"),
        (lambda ids: ids.float(), "missing"),
        (lambda ids: ids[:, :1], "stale"),
        (lambda ids: ids[..., :2], "stale"),
        (lambda ids: ids + E, "stale"),
        (lambda ids: torch.where(ids == ids.max(), -1, ids), "stale"),
        (lambda ids: torch.cat([ids, ids]), "stale"),
        (lambda ids: ids[:-1], "stale"),
        (torch.zeros_like, "zero"),
        (lambda ids: torch.cat([ids[:-1], 0 * ids[-1:]]), "zero"),
        (lambda ids: ids[..., [0, 0, 1]], "repeated"),
    ],
)
def test_routes_that_do_not_fit_are_refused_with_a_reason(paths, change, reason):
    model = load_model(paths["olmoe"], torch.float32)
    _, ids_NLk = _recorded(model)
    with pytest.raises(BadRoutes) as error, routing.of(model).replay(change(ids_NLk.long())):
        _run(model)
    assert error.value.reason == reason
    assert torch.equal(_recorded(model)[1], ids_NLk)  # and nothing of it stays behind


def test_routes_from_the_codec_may_be_read_only_numpy(paths):
    model = load_model(paths["olmoe"], torch.float32)
    live, ids_NLk = _recorded(model)
    for dtype in (np.uint8, np.int16, np.uint16):
        array = ids_NLk.numpy().astype(dtype)
        array.flags.writeable = False
        with torch.inference_mode(), routing.of(model).replay(array):
            assert torch.equal(_run(model), live)


def test_a_context_without_a_pass_or_inside_another_is_an_error(paths):
    model = load_model(paths["olmoe"], torch.float32)
    _, ids_NLk = _recorded(model)
    found = routing.of(model)
    with found.record() as seen, pytest.raises(BadRoutes, match=r"layers \[0, 1\]"):
        seen.ids_NLk()
    with pytest.raises(BadRoutes, match="not called"), found.replay(ids_NLk):
        pass
    with found.record(), pytest.raises(RuntimeError, match="already"), found.replay(ids_NLk):
        pass


def test_install_is_idempotent_and_a_copy_has_its_own(paths):
    model = load_model(paths["qwen3_moe"], torch.float32)
    assert routing.install(model) is routing.of(model)
    assert all(len(router._forward_hooks) == 1 for router in _routers(model))
    twin = copy.deepcopy(model)
    with routing.of(twin).record() as seen, torch.inference_mode():
        _run(model)
        with pytest.raises(BadRoutes):
            seen.ids_NLk()
        _run(twin)
        assert seen.ids_NLk().shape == (N, L, K)
    empty = routing.of(empty_model(paths["qwen3_moe"], torch.bfloat16))
    assert (empty.layers, empty.experts, empty.top_k, empty.can_replay) == (L, E, K, True)


def test_installing_draws_nothing_from_the_global_generator(paths):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    empty_model(paths["mixtral"], torch.float32)
    assert torch.equal(torch.rand(3), expected)


def test_a_dense_model_has_no_routing(tmp_path):
    model = load_model(tiny_model(tmp_path), torch.float32)
    assert routing.install(model) is None
    assert routing.of(model) is None


def _small(**more):
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_implementation": "ostinato",
        "experts_implementation": "ostinato",
        **more,
    }


def test_gates_of_another_make_are_recorded_but_not_replayed():
    model = GraniteMoeForCausalLM(GraniteMoeConfig(**_small(num_local_experts=6, num_experts_per_tok=2))).eval()
    found = routing.install(model)
    assert (found.can_record, found.can_replay) == (True, False)
    with torch.inference_mode(), found.record() as seen:
        _run(model, _ids() % 64)
    assert seen.ids_NLk().shape == (N, 2, 2)
    with pytest.raises(BadConfig, match="switch router replay off"), found.replay(seen.ids_NLk()):
        pass


@pytest.mark.parametrize("fault", ["absent", "another answer"])
def test_routers_that_do_not_tell_what_they_chose_are_named(fault, monkeypatch):
    config = OlmoeConfig(**_small(num_experts=6, num_experts_per_tok=2))
    model = OlmoeForCausalLM(config).eval()
    for router in _routers(model):
        if fault == "absent":
            del router.top_k
        else:
            monkeypatch.setattr(router, "forward", lambda x: x)
    found = routing.install(model)
    assert not found.can_record
    assert not found.can_replay
    with pytest.raises(BadConfig, match="cannot be recorded"), found.record():
        pass
    with pytest.raises(BadConfig, match="cannot be recorded"), found.replay(torch.zeros(1, 2, 2)):
        pass
