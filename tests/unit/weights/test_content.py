import numpy as np
import pytest

from ostinato.core.errors import BadRequest, BadWeights
from ostinato.core.weights import WeightArray
from ostinato.weights.version.content import (
    CHUNK_ELEMENTS,
    check_hash,
    check_ref,
    check_weights,
    hash_chunks,
    is_tensor_name,
    part_of,
    weights_root,
)


def f32(*values) -> WeightArray:
    return WeightArray("F32", (len(values),), np.asarray(values, np.float32).view(np.uint8))


def test_the_root_depends_on_every_bit_name_dtype_and_shape_and_on_nothing_else():
    one = {"a": f32(1.0, 2.0), "b": f32(3.0)}
    root = weights_root(one)
    assert weights_root({"b": f32(3.0), "a": f32(1.0, 2.0)}) == root
    others = [
        {"a": f32(1.0, 2.0), "b": f32(-3.0)},
        {"a": f32(1.0, 2.0), "c": f32(3.0)},
        {"a": f32(1.0, 2.0)},
        {"a": WeightArray("F32", (1, 2), one["a"].data), "b": one["b"]},
        {"a": WeightArray("U32", (2,), one["a"].data), "b": one["b"]},
        {"a": f32(0.0), "b": f32(3.0)},
        {"a": f32(-0.0), "b": f32(3.0)},
    ]
    assert len({root, *map(weights_root, others)}) == len(others) + 1


def test_a_tensor_longer_than_a_chunk_is_hashed_in_parts():
    data = np.zeros(CHUNK_ELEMENTS + 5, np.uint8)
    weights = {"w": WeightArray("U8", (CHUNK_ELEMENTS + 5,), data)}
    part = part_of(weights)
    before = hash_chunks(part)
    data[-1] = 1
    after = hash_chunks(part)
    assert len(before) == 2
    assert before["w", 0] == after["w", 0]
    assert before["w", 1] != after["w", 1]
    assert part.chunks["w", 1].size == 5


@pytest.mark.parametrize(
    ("dtype", "code", "bad"),
    [
        ("BF16", 0x7F80, True), ("BF16", 0xFF80, True), ("BF16", 0x7FC1, True), ("BF16", 0x7F7F, False), ("BF16", 0x8000, False),
        ("F16", 0x7C00, True), ("F16", 0xFE00, True), ("F16", 0x7BFF, False),
        ("F32", 0x7F800000, True), ("F32", 0xFFC00001, True), ("F32", 0xFF7FFFFF, False),
        ("F64", 0xFFF0000000000000, True), ("F64", 0x7FEFFFFFFFFFFFFF, False),
        ("F8_E4M3", 0x7F, True), ("F8_E4M3", 0xFF, True), ("F8_E4M3", 0x7E, False),
        ("F8_E5M2", 0x7C, True), ("F8_E5M2", 0xFD, True), ("F8_E5M2", 0x7B, False),
        ("I32", 0x7F800000, False), ("U16", 0x7FC0, False), ("BOOL", 1, False),
    ],
)  # fmt: skip
def test_nan_and_infinity_are_found_in_every_float_format(dtype, code, bad):
    size = {"BF16": 2, "F16": 2, "U16": 2, "F32": 4, "I32": 4, "F64": 8}.get(dtype, 1)
    data = np.zeros(7, f"<u{size}")
    data[5] = code
    weights = {"layer.w": WeightArray(dtype, (7,), data.view(np.uint8))}
    if bad:
        with pytest.raises(BadWeights, match=r"'layer.w': element 5 is NaN or infinite"):
            check_weights(weights)
    else:
        check_weights(weights)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("../w", f32(1)),
        ("/w", f32(1)),
        ("a/../w", f32(1)),
        ("w\0", f32(1)),
        ("", f32(1)),
        ("__metadata__", f32(1)),
        ("w", WeightArray("F33", (1,), f32(1).data)),
        ("w", WeightArray("F32", (2,), f32(1).data)),
        ("w", WeightArray("F32", (-1,), f32(1).data)),
        ("w", WeightArray("F32", (1,), f32(1).data.view(np.float32))),
    ],
)
def test_weights_of_the_wrong_form_are_refused(name, array):
    with pytest.raises(BadWeights):
        check_weights({name: array})


def test_no_weights_at_all_are_refused():
    with pytest.raises(BadWeights, match="no tensor"):
        check_weights({})


@pytest.mark.parametrize(
    "ref", ["", "/live", "live/", "a//b", "../live", "a/../b", ".", "..", ".live", "Live", "a b", "a\0", "a" * 201]
)
def test_ref_names_that_could_leave_the_store_are_refused(ref):
    with pytest.raises(BadRequest):
        check_ref(ref)


def test_ref_and_tensor_names_in_use_are_accepted():
    for ref in ("live", "canary", "control", "candidate", "version/" + "a" * 64, "runs/2026-11.x_1"):
        assert check_ref(ref) == ref
    assert is_tensor_name("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("text", ["", "a" * 63, "a" * 65, "A" * 64, "../" + "a" * 61, "a" * 63 + "\n", "a" * 64 + "\n"])
def test_only_64_hex_digits_are_a_hash(text):
    with pytest.raises(BadRequest):
        check_hash(text)
