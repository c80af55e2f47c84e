"""Bytes and speed of weight deltas: our codec beside others', on pairs of versions from real training.

    python -m benchmarks.weights.chains --run runs/demo-0     # makes the pairs
    python -m benchmarks.weights.codec [--rates 1e-6 3e-6 1e-5 2e-5] [--steps 6 13 26] [--threads 1 2] [--repeats 5]

Each pair is a version and the one before it. *ratio* is the bytes of the whole model in bf16 over the bytes of the payloads;
*GB/s* is bytes of the whole model over the time to encode or decode it, from memory to memory, median of the repeats, without hashing
for any codec. Ours, XOR + zstd, the gap code and COO work tensor by tensor in pieces of 2M elements, on one thread or more; the others
on one. `patch-from`, ZipNN and bsdiff get only a slice because they are slow: their ratios, and *ours* beside them, are of that slice.
*decode* makes new weights beside the old ones; *in place* changes a copy made beforehand. Every decoded result is compared with
the version, bit for bit. Prints a table and writes benchmarks/results/weights.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from benchmarks.contender import PEERS, RESULTS, machine
from numpy.typing import NDArray

from ostinato.core.weights import Weights
from ostinato.weights.delta import codec as delta
from ostinato.weights.follow.follower import Follower
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.version.content import CHUNK_ELEMENTS

CHAINS = PEERS / "chains"
Codes = NDArray[np.uint16]
SLICE = {"zstd --patch-from -3": 1 << 25, "ZipNN delta": 1 << 25, "bsdiff4": 1 << 20}  # elements


@dataclass(frozen=True)
class Peer:
    """`encode(old, new)` gives a payload, `decode(old, payload)` the new codes. `threads`: it may run on several."""

    name: str
    encode: Callable[[Codes, Codes], bytes]
    decode: Callable[[Codes, bytes], Codes]
    threads: bool = True


# ---------------------------------------------------------------- the codecs


def ours_encode(old: Codes, new: Codes) -> bytes:
    coded = delta.encode(old.view(np.uint8), new.view(np.uint8), dtype="BF16")
    return coded.codec.encode().ljust(20) + coded.payload


def ours_decode(old: Codes, payload: bytes) -> Codes:
    target = old.copy()
    delta.decode(payload[:20].rstrip().decode(), target.view(np.uint8), payload[20:], dtype="BF16", old=True)
    return target


def xor_encode(old: Codes, new: Codes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)


def xor_decode(old: Codes, payload: bytes) -> Codes:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint16) ^ old


def coo_encode(old: Codes, new: Codes) -> bytes:
    """Indices as int32 and raw values, like the sparse weight patches of inference engines."""
    places = np.flatnonzero(old != new).astype(np.int32)
    return places.tobytes() + new[places].tobytes()


def coo_decode(old: Codes, payload: bytes) -> Codes:
    count, new = len(payload) // 6, old.copy()
    new[np.frombuffer(payload, np.int32, count)] = np.frombuffer(payload, np.uint16, count, 4 * count)
    return new


ROW = 576  # elements per row; PULSE codes matrices by rows


def gaps_encode(old: Codes, new: Codes) -> bytes:
    """PULSE's layout (2602.03839): gaps between rows in a byte, between columns in 16 bits, raw values, zstd-1."""
    places = np.flatnonzero(old != new)
    rows, columns = places // ROW, places % ROW
    row_gaps = np.diff(rows, prepend=0)
    column_gaps = np.where(row_gaps == 0, np.diff(columns, prepend=0), columns)
    wide = row_gaps >= 255
    parts = [
        np.array([len(places), wide.sum()], np.uint32).tobytes(),
        np.where(wide, 255, row_gaps).astype(np.uint8).tobytes(),
        row_gaps[wide].astype(np.uint32).tobytes(),
        column_gaps.astype(np.uint16).tobytes(),
        new[places].tobytes(),
    ]
    return zstandard.ZstdCompressor(level=1).compress(b"".join(parts))


def gaps_decode(old: Codes, payload: bytes) -> Codes:
    data = zstandard.ZstdDecompressor().decompress(payload)
    count, wide = np.frombuffer(data, np.uint32, 2).tolist()
    row_gaps = np.frombuffer(data, np.uint8, count, 8).astype(np.int64)
    at = 8 + count
    row_gaps[row_gaps == 255] = np.frombuffer(data, np.uint32, wide, at)
    column_gaps = np.frombuffer(data, np.uint16, count, at + 4 * wide).astype(np.int64)
    sums = np.cumsum(column_gaps)  # column gaps accumulate within a row and start again in the next
    starts = np.flatnonzero((row_gaps != 0) | (np.arange(count) == 0))
    before = np.zeros(count, np.int64)
    before[starts] = np.diff(np.concatenate([[0], (sums - column_gaps)[starts]]))
    new = old.copy()
    places = np.cumsum(row_gaps) * ROW + sums - np.cumsum(before)
    new[places] = np.frombuffer(data, np.uint16, count, at + 4 * wide + 2 * count)
    return new


def patch_from(old: Codes) -> dict[str, Any]:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    dictionary = zstandard.ZstdCompressionDict(old.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return {"compression_params": parameters, "dict_data": dictionary}


def patch_encode(old: Codes, new: Codes) -> bytes:
    return zstandard.ZstdCompressor(**patch_from(old)).compress(new.data)


def patch_decode(old: Codes, payload: bytes) -> Codes:
    dictionary = patch_from(old)["dict_data"]
    plain = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=1 << 27).decompress(payload)
    return np.frombuffer(plain, np.uint16)


def peers() -> Iterator[Peer]:
    yield Peer("ours", ours_encode, ours_decode)
    yield Peer("XOR + zstd-1", xor_encode, xor_decode)
    yield Peer("gaps + zstd-1 (PULSE's layout)", gaps_encode, gaps_decode)
    yield Peer("COO int32 + bf16", coo_encode, coo_decode)
    yield Peer("zstd --patch-from -3", patch_encode, patch_decode, threads=False)
    if find_spec("zipnn"):
        import zipnn

        def packed(old: Codes, new: Codes) -> bytes:
            coder = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", delta_compressed_type="byte")
            return bytes(coder.compress(new.tobytes(), delta_second_data=old.tobytes()))

        def unpacked(old: Codes, payload: bytes) -> Codes:
            coder = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", delta_compressed_type="byte")
            plain: Any = coder.decompress(payload, delta_second_data=old.tobytes())
            return np.frombuffer(plain, np.uint16)

        yield Peer("ZipNN delta", packed, unpacked, threads=False)
    if find_spec("bsdiff4"):
        import bsdiff4

        yield Peer(
            "bsdiff4",
            lambda old, new: bsdiff4.diff(old.tobytes(), new.tobytes()),
            lambda old, payload: np.frombuffer(bsdiff4.patch(old.tobytes(), payload), np.uint16),
            threads=False,
        )


# ---------------------------------------------------------------- measuring


def pieces(old: Weights, new: Weights) -> list[tuple[Codes, Codes]]:
    """Pairs of chunks, cut as in the store."""
    found: list[tuple[Codes, Codes]] = []
    for name in sorted(new):
        a, b = old[name].data.view(np.uint16), new[name].data.view(np.uint16)
        found += [(a[i : i + CHUNK_ELEMENTS], b[i : i + CHUNK_ELEMENTS]) for i in range(0, len(a), CHUNK_ELEMENTS)]
    return found


def sliced(parts: Sequence[tuple[Codes, Codes]], elements: int) -> list[tuple[Codes, Codes]]:
    """The middle of the model, as one piece."""
    old, new = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    start = max(0, (len(old) - elements) // 2)
    return [(old[start : start + elements].copy(), new[start : start + elements].copy())]


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    times, result = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - started)
    return float(np.median(times)), result


def measure(peer: Peer, parts: list[tuple[Codes, Codes]], threads: int, repeats: int) -> dict[str, Any]:
    with ThreadPoolExecutor(threads) as pool:

        def each(run: Callable[..., Any], items: Sequence[tuple[Any, ...]]) -> list[Any]:
            return list(pool.map(lambda item: run(*item), items)) if threads > 1 else [run(*item) for item in items]

        encode_s, payloads = timed(lambda: each(peer.encode, parts), repeats)
        items = [(old, payload) for (old, _), payload in zip(parts, payloads, strict=True)]
        decode_s, results = timed(lambda: each(peer.decode, items), repeats)
    if not all(np.array_equal(result, new) for result, (_, new) in zip(results, parts, strict=True)):
        raise SystemExit(f"{peer.name} did not give back the version")
    full, size = sum(new.nbytes for _, new in parts), sum(map(len, payloads))
    placed = {"in_place_gb_s": full / in_place(parts, payloads, threads, repeats) / 1e9} if peer.name == "ours" else {}
    return placed | {
        "codec": peer.name,
        "threads": threads,
        "full_bytes": full,
        "bytes": size,
        "ratio": full / size,
        "encode_gb_s": full / encode_s / 1e9,
        "decode_gb_s": full / decode_s / 1e9,
    }


def in_place(parts: Sequence[tuple[Codes, Codes]], payloads: Sequence[bytes], threads: int, repeats: int) -> float:
    """Seconds that our decoder takes when it may overwrite the old weights, as a follower does after its first link."""
    times: list[float] = []

    def one(target: Codes, payload: bytes) -> None:
        codec = payload[:20].rstrip().decode()
        delta.decode(codec, target.view(np.uint8), payload[20:], dtype="BF16", old=True)

    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            targets = [old.copy() for old, _ in parts]
            started = time.perf_counter()
            if threads > 1:
                list(pool.map(one, targets, payloads))
            else:
                for target, payload in zip(targets, payloads, strict=True):
                    one(target, payload)
            times.append(time.perf_counter() - started)
    return float(np.median(times))


def bound(parts: Sequence[tuple[Codes, Codes]]) -> dict[str, float]:
    """Entropy per changed element under the codec's model: which elements change given the old exponent, and by which step."""
    old, new = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    exponent = (old >> 7) & 255
    changed = old != new
    total, count = np.bincount(exponent, minlength=256), np.bincount(exponent[changed], minlength=256)
    p = np.clip(count / np.maximum(total, 1), 1e-300, 1 - 1e-16)
    mask = float(np.sum(total * -(p * np.log2(p) + (1 - p) * np.log2(1 - p))))
    line = np.where(np.arange(65536) < 32768, np.arange(65536), 32767 - np.arange(65536))
    steps = line[new[changed]] - line[old[changed]]
    value = 0.0
    for e in np.flatnonzero(count):
        share = np.unique(steps[exponent[changed] == e], return_counts=True)[1] / count[e]
        value -= float(count[e] * np.sum(share * np.log2(share)))
    nnz = int(changed.sum())
    return {"changed": nnz / len(old), "mask_bits": mask / nnz, "step_bits": value / nnz, "bytes": (mask + value) / 8}


async def pair(store: Path, step: int) -> tuple[Weights, Weights]:
    follower = Follower(DirectoryStore(store))
    chain = {manifest.number: manifest.policy for manifest in await follower.log("live", limit=10_000)}
    return await follower.fetch(chain[step - 1]), await follower.fetch(chain[step])


def report(rows: list[dict[str, Any]], limits: list[dict[str, Any]]) -> None:
    for limit in limits:
        print(
            f"\nlearning rate {limit['rate']:g}, step {limit['step'] - 1} -> {limit['step']}: {limit['changed']:.3%} changed; "
            f"bound {limit['mask_bits'] + limit['step_bits']:.2f} bits per change ({limit['ratio']:.0f}x)"
        )
        print(
            f"{'codec':<32}{'threads':>8}{'MB of':>9}{'bytes':>12}{'ratio':>9}{'encode':>10}{'decode':>10}{'in place, GB/s':>16}"
        )
        for row in rows:
            if (row["rate"], row["step"]) == (limit["rate"], limit["step"]):
                print(
                    f"{row['codec']:<32}{row['threads']:>8}{row['full_bytes'] / 1e6:>9.0f}{row['bytes']:>12,}"
                    f"{row['ratio']:>8.1f}x{row['encode_gb_s']:>10.2f}{row['decode_gb_s']:>10.2f}"
                    + (f"{row['in_place_gb_s']:>16.2f}" if "in_place_gb_s" in row else "")
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=Path, default=CHAINS)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 2e-5])
    parser.add_argument("--steps", type=int, nargs="+", default=[6, 13, 26])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--slow", action=argparse.BooleanOptionalAction, default=True, help="the codecs that see a slice"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "weights.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    limits: list[dict[str, Any]] = []
    before = machine()
    for rate in args.rates:
        for step in args.steps:
            parts = pieces(*asyncio.run(pair(args.chains / f"{rate:g}", step)))
            about = {"rate": rate, "step": step}
            limit = bound(parts)
            full = sum(new.nbytes for _, new in parts)
            limits.append(about | limit | {"ratio": full / limit["bytes"]})
            for peer in peers():
                if peer.name in SLICE:
                    if args.slow:
                        cut = sliced(parts, SLICE[peer.name])
                        rows.append(about | measure(peer, cut, 1, 1))
                        ours = about | measure(next(peers()), cut, 1, args.repeats)
                        rows.append(ours | {"codec": f"ours, slice of {peer.name.split()[0]}"})
                    continue
                rows += [about | measure(peer, parts, threads, args.repeats) for threads in args.threads]
            report([row for row in rows if (row["rate"], row["step"]) == (rate, step)], limits[-1:])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": before, "rows": rows, "bounds": limits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
