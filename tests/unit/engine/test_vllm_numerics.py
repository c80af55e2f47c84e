"""The numerics contract of vLLM servers names them, so that turns of other servers are told apart."""

from tests.fakes.vllm_engine import vllm_engine
from tests.fakes.vllm_tokens import TokenVllm

from ostinato.core.numerics import Contract


async def contract(*fakes) -> Contract:
    async with vllm_engine(*fakes) as engine:
        assert engine.numerics() == engine.contract().id
        return engine.contract()


def server(**settings):
    fake = TokenVllm("an answer")
    for name, value in settings.items():
        setattr(fake, name, value)
    return fake


async def test_it_names_version_dtype_and_device_and_promises_no_bits():
    found = await contract(server())
    assert (found.mode, found.kernels, found.dtype, found.isa) == ("fast", "vllm 0.32.0", "bfloat16", "NVIDIA H100")
    assert (await contract(server())).id == found.id
    assert Contract.from_json(found.to_json()) == found


async def test_another_version_or_device_is_another_contract():
    kinds = [server(), server(version="0.33.0"), server(gpu="NVIDIA B200"), server(gpu=None)]
    found = [await contract(kind) for kind in kinds]
    assert len({each.id for each in found}) == 4
    assert found[-1].isa == "cuda"


async def test_servers_that_differ_are_all_named_in_any_order():
    one, other = server(gpu="GPU 0: H100\nGPU 1: H100"), server(gpu="B200")
    found = await contract(one, other)
    assert found.isa == "B200 or GPU 0: H100 GPU 1: H100"
    assert (await contract(other, one)).id == found.id
