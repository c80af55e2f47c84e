"""The page and the table of what a machine was measured at: made from figures, without a measurement."""

import pytest
from benchmarks.machine import ROWS, STREAMS, class_of, report, table


def found(cpu="A CPU", kind="avx2", dtype="float32"):
    def product(inputs, rows):
        gflops = {f"{way} {name}": 10.0 * rows for way in ("ours", "torch") for name in ("bfloat16", "float32")}
        return {"inputs": inputs, "outputs": 8, "rows": rows, "gflops": gflops | {f"ours {dtype}": 7.0 * rows}}

    return {
        "machine": {"cpu": cpu, "cores": 2, "class": kind, "flags": ["avx2"], "masks": {}, "load": [0.1], "torch": "2"},
        "choices": {"numerics": "exact", "why": "", "dtype": dtype, "bf16_times_fp32": 0.25, "engine_threads": 1},
        "copy_gb_per_s": 5.5,
        "products": [product(inputs, rows) for inputs in (16, 8) for rows in ROWS],
        "engine": {str(streams): 100.0 * streams for streams in STREAMS},
        "step": {"seconds": 9.5, "phases": {}},
    }


@pytest.mark.parametrize(
    ("flags", "masks", "name"),
    [
        (["avx2", "avx512f", "avx512_bf16", "amx_bf16"], {}, "amx"),
        (["avx2", "avx512f"], {}, "avx512"),
        (["avx2", "amx_bf16"], {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, "amx_held_to_avx2"),
        (["asimd"], {}, "neon"),
        ([], {}, "other"),
    ],
)
def test_a_class_is_the_best_instructions_and_what_masks_them(flags, masks, name):
    assert class_of(flags, masks) == name


def test_the_page_has_every_product_and_the_engine_where_it_was_measured():
    lines = report(found())
    assert sum(line.startswith("  ours float32") for line in lines) == 2
    assert lines[-2:] == [
        "engine, tokens/s by streams: 100 at 1, 800 at 8, 3200 at 32, 12800 at 128",
        "training step: 9.50 s",
    ]


def test_the_table_has_a_row_per_machine_in_the_order_of_classes():
    text = table([found("Second", "neon"), found("First", "avx2", "bfloat16")])
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[1] for row in rows] == ["First, 2", "Second, 2"]
    assert "| 7, 56, 224, 896, 3584, 14336 | 5.5 | 100, 800, 3200, 12800 | 9.50 |" in rows[0]
