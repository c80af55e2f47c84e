"""The contract's id: the same for the same arithmetic, another for any other, and readable back."""

import json
from dataclasses import fields, replace

import pytest

from ostinato.core.errors import BadConfig, Corrupt
from ostinato.core.numerics import Contract, differences, same_arithmetic
from ostinato.testing.engine import CONTRACT

OTHER = {
    "mode": "fast",
    "torch": "2.14",
    "blas": "x",
    "isa": "x",
    "threads": 2,
    "block": 64,
    "dtype": "bfloat16",
    "quantisation": "fp8",
    "kernels": "2",
    "order": "blocks 1",
}


def test_the_id_is_sixteen_hex_digits_of_the_canonical_json():
    assert CONTRACT.id == "da7a8ef721d8c27c"  # a change here makes every stored turn foreign: change it knowingly
    told = {field.name: getattr(CONTRACT, field.name) for field in fields(Contract)}
    assert json.loads(CONTRACT.to_json()) == {name: value for name, value in told.items() if name != "order"}
    ordered = replace(CONTRACT, order="blocks 1")
    assert json.loads(ordered.to_json()) == told | {"order": "blocks 1"}


def test_every_field_is_part_of_the_id():
    assert set(OTHER) == {field.name for field in fields(Contract)}
    ids = {replace(CONTRACT, **{name: value}).id for name, value in OTHER.items()}
    assert len(ids | {CONTRACT.id}) == len(OTHER) + 1


def test_it_comes_back_equal_from_its_json():
    contract = replace(CONTRACT, blas='naïve "quoted"\n')
    assert Contract.from_json(contract.to_json()) == contract
    shuffled = json.dumps(dict(reversed(json.loads(contract.to_json()).items())), indent=1)
    assert Contract.from_json(shuffled).id == contract.id


@pytest.mark.parametrize("rows", [1, 8])
def test_a_stored_row_rule_is_left_out(rows):
    assert Contract.from_json(json.dumps(json.loads(CONTRACT.to_json()) | {"rows": rows})) == CONTRACT


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d.pop("block"), "'block'"),
        (lambda d: d.update(pad=4), "'pad'"),
        (lambda d: d.update(threads="1"), "threads is '1', not int"),
        (lambda d: d.update(threads=True), "threads is True, not int"),
        (lambda d: d.update(torch=2.13), "torch is 2.13, not str"),
        (lambda d: d.update(mode="quick"), "'quick'"),
        (lambda d: d.update(block=0), "block >= 1"),
    ],
)
def test_what_is_no_contract_is_refused_by_name(change, match):
    values = json.loads(CONTRACT.to_json())
    change(values)
    with pytest.raises(Corrupt, match=match):
        Contract.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 4000, '{"a":"' + "x" * 5000 + '"}'])
def test_what_is_no_json_object_is_refused(text):
    with pytest.raises(Corrupt):
        Contract.from_json(text)


def test_a_contract_with_impossible_numbers_cannot_be_made():
    with pytest.raises(BadConfig, match="threads >= 1"):
        replace(CONTRACT, threads=0)


def test_only_the_block_may_differ_and_only_in_exact_mode():
    for name, value in OTHER.items():
        other = replace(CONTRACT, **{name: value})
        assert differences(CONTRACT, other) == (name,)
        assert same_arithmetic(CONTRACT, other) == (name == "block")
    assert same_arithmetic(CONTRACT, CONTRACT)
    fast = replace(CONTRACT, mode="fast")
    assert not same_arithmetic(fast, fast)
