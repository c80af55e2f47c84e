"""The cost of the gateway: our gateway, a bare Starlette server and LiteLLM's proxy, one core each, with the same calls.

    python -m benchmarks.peers litellm
    python -m benchmarks.serving.gateway [--repeats 5] [--seconds 5] [--directory DIR] [--contenders echo gateway gateway-memory litellm]
    python -m benchmarks.serving.gateway --messages 80000 [--path /v1/responses] --contenders gateway litellm --out FILE

Every server is pinned to one core and the load to another. Latency: one connection, one call after the other. Throughput: 32
connections. Rounds alternate, an idle server is stopped (SIGSTOP), and figures are medians over rounds. No model is computed: our
engine answers a letter at once, and LiteLLM a mocked text. Ours writes each turn to its log on disk before the answer ends; the
others keep nothing. With one connection each of our calls waits for the disk, so the time of an fdatasync is measured first and
printed too. --directory chooses the disk (/dev/shm is no disk). Writes benchmarks/results/gateway.json.

With --messages the calls are agents', in Anthropic's dialect or that of --path, with bodies of that many bytes: tools, calls and results.
Each connection is an agent whose conversation goes on for 40 calls, each with the answer and a new message of 300 bytes added, before it
begins another one. LiteLLM translates them to OpenAI's dialect and back; ours renders them with a byte tokenizer, so that 80 KB are 80,000
tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import uvloop
from benchmarks.contender import PEERS, RESULTS, machine
from benchmarks.serving.dialects import ARGUMENTS, LINE, SHAPES, messages_body
from benchmarks.serving.load import Source, load, request
from benchmarks.serving.servers import KEY

NAMES = ("echo", "gateway", "gateway-memory", "litellm")
FIRST_PORT = 18_400
CONNECTIONS = 32
WARM_UP_S = 2.0
CALLS_EACH = 40
ASK = {
    "model": "m",
    "user": "u42",
    "max_tokens": 2,
    "messages": [
        {"role": "system", "content": "You complete code."},
        {"role": "user", "content": "Write a function that says hello to Ann."},
    ],
}
LITELLM = {
    "model_list": [
        {"model_name": "m", "litellm_params": {"model": "openai/m", "api_key": "none", "mock_response": "h"}}
    ],
    "general_settings": {"master_key": KEY},
    "litellm_settings": {"telemetry": False},
}


def chats(stream: bool) -> Source:
    """One chat again and again."""
    data = request("/v1/chat/completions", json.dumps(ASK | {"stream": stream}).encode(), KEY)
    return lambda connection: itertools.repeat(data)


def agents(size: int, stream: bool, path: str) -> Source:
    """Conversations of agents that begin with a body of at least `size` bytes, as Anthropic's dialect has them."""
    make, _ = SHAPES[path]
    items = "input" if path == "/v1/responses" else "messages"
    budget = "max_output_tokens" if path == "/v1/responses" else "max_tokens"

    def calls(connection: int) -> Iterator[bytes]:
        for number in itertools.count():
            name = f"{connection} {number} {time.time_ns()}"
            body = make(translated(history(name, size), path)) | {budget: 2, "stream": stream}
            user = {"metadata": {"user_id": f"u{connection}"}} if path == "/v1/messages" else {"user": f"u{connection}"}
            listed = body.pop(items)  # it comes last
            written = json.dumps(body | user | {items: listed})
            open_end = written.removesuffix("]}").encode()
            for step in range(CALLS_EACH):
                yield request(path, open_end + b"]}", KEY)
                more = ({"role": "assistant", "content": "h"}, {"role": "user", "content": f"{step}: {LINE * 4}"})
                open_end += b"".join(b", " + json.dumps(message).encode() for message in more)

    return calls


def history(name: str, size: int) -> list[dict[str, Any]]:
    """Messages that make a body of at least `size` bytes, different for each name."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name}\n{LINE}"}]
    length = len(json.dumps(messages_body(messages)))
    while length < size:
        use = {"type": "tool_use", "id": f"toolu_{len(messages)}", "name": "write", "input": ARGUMENTS}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "written\n" + LINE}
        more = [
            {"role": "assistant", "content": [{"type": "text", "text": "Let me write it."}, use]},
            {"role": "user", "content": [result]},
        ]
        messages += more
        length += len(json.dumps(more))
    return messages


def translated(messages: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """The messages of `history` in the dialect of a path."""
    return messages if path == "/v1/messages" else [item for each in messages for item in _translated(each, path)]


def _translated(message: dict[str, Any], path: str) -> list[dict[str, Any]]:
    content = message["content"]
    if isinstance(content, str):
        return [message]
    if message["role"] == "user":
        (result,) = content
        call, text = result["tool_use_id"], result["content"]
        if path == "/v1/responses":
            return [{"type": "function_call_output", "call_id": call, "output": text}]
        return [{"role": "tool", "tool_call_id": call, "content": text}]
    text, use = content
    called = {"name": use["name"], "arguments": json.dumps(use["input"])}
    if path == "/v1/responses":
        said = {"role": "assistant", "content": [{"type": "output_text", "text": text["text"]}]}
        return [{"type": "message", **said}, {"type": "function_call", "call_id": use["id"], **called}]
    calls = [{"id": use["id"], "type": "function", "function": called}]
    return [{"role": "assistant", "content": text["text"], "tool_calls": calls}]


def command(name: str, port: int, directory: Path) -> list[str]:
    if name != "litellm":
        return [sys.executable, "-m", "benchmarks.serving.servers", name, str(port), str(directory)]
    config = directory / "litellm.json"
    config.write_text(json.dumps(LITELLM))
    program = PEERS / "litellm" / "bin" / "litellm"
    if not program.exists():
        raise SystemExit(f"{program} does not exist: run `python -m benchmarks.peers litellm`, or leave litellm out")
    return [str(program), "--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]


@contextmanager
def running(name: str, port: int, core: int, directory: Path) -> Generator[subprocess.Popen[bytes]]:
    """Start a server, wait until it answers, and stop it until it is measured."""
    directory.mkdir()
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}
    with (directory / "output.log").open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command(name, port, directory)],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        wait(name, process, port, directory / "output.log")
        os.killpg(process.pid, signal.SIGSTOP)
        yield process
    finally:
        for sign in (signal.SIGCONT, signal.SIGTERM):
            os.killpg(process.pid, sign)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait(name: str, process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    ends = time.monotonic() + 180
    ask = Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(ASK).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urlopen(ask, timeout=20) as response:
                response.read()
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{name} does not answer. Its output:\n{output.read_text(errors='replace')[-3000:]}")


def measure(
    process: subprocess.Popen[bytes],
    port: int,
    source: Source,
    *,
    connections: int,
    seconds: float,
) -> dict[str, Any]:
    os.killpg(process.pid, signal.SIGCONT)
    try:
        uvloop.run(load(port, source, connections=connections, seconds=WARM_UP_S if connections > 1 else 0.5))
        began = cpu_seconds(process.pid)
        tally = uvloop.run(load(port, source, connections=connections, seconds=seconds))
        used = cpu_seconds(process.pid) - began
    finally:
        os.killpg(process.pid, signal.SIGSTOP)
    if tally.failures or not tally.seconds:
        raise SystemExit(f"{tally.failures} calls failed, the first with {tally.first_failure!r}")
    ordered = sorted(tally.seconds)
    return {
        "calls": len(ordered),
        "calls_per_s": len(ordered) / seconds,
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "cpu_ms_per_call": 1e3 * used / len(ordered),
    }


def cpu_seconds(group: int) -> float:
    """CPU time that a process group has used so far."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def sync_seconds(directory: Path) -> float:
    """The disk's median time for the fdatasync of a page, over 200 pages."""
    seconds: list[float] = []
    with (directory / "probe").open("wb", buffering=0) as file:
        for _ in range(200):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contenders", nargs="+", choices=NAMES, default=["echo", "gateway", "gateway-memory", "litellm"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--directory",
        type=Path,
        default=None,
        help="where our log is written (default: the system's for temporary files)",
    )
    parser.add_argument(
        "--messages", type=int, default=0, metavar="BYTES", help="an agent's calls of this size instead"
    )
    parser.add_argument("--path", choices=SHAPES, default="/v1/messages", help="the dialect of an agent's calls")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.load_core})
    before = machine()
    kinds = [(stream, connections) for stream in (False, True) for connections in (1, CONNECTIONS)]
    taken: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        disk_ms = 1e3 * sync_seconds(Path(directory))
        print(f"an fdatasync of 4 KiB takes {disk_ms:.2f} ms (median) in {directory}")
        _rounds(args, Path(directory), kinds, taken)
    table = {name: {**medians(rounds), "rounds": rounds} for name, rounds in taken.items()}
    for name, row in table.items():
        print(
            f"{name:42} {row['calls_per_s']:8.0f} calls/s   p50 {row['p50_ms']:7.2f} ms   p99 {row['p99_ms']:7.2f} ms   "
            f"{row['cpu_ms_per_call']:6.3f} ms CPU a call"
        )
    args.out.write_text(
        json.dumps(
            {
                "machine": before,
                "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "directory")},
                "fdatasync_ms": disk_ms,
                "figures": table,
            },
            indent=1,
            default=str,
        )
    )


def _rounds(
    args: argparse.Namespace, directory: Path, kinds: list[tuple[bool, int]], taken: dict[str, list[dict[str, Any]]]
) -> None:
    for number in range(args.repeats):
        for place, name in enumerate(args.contenders):
            port = FIRST_PORT + place
            with running(name, port, args.server_core, directory / f"{name}-{number}") as process:
                for stream, connections in kinds:
                    kind = f"{name}, {'streamed' if stream else 'at once'}, {connections} open"
                    source = agents(args.messages, stream, args.path) if args.messages else chats(stream)
                    got = measure(process, port, source, connections=connections, seconds=args.seconds)
                    taken.setdefault(kind, []).append(got)
                    print(f"round {number + 1}: {kind}: {got['calls_per_s']:.0f} calls/s", file=sys.stderr)


if __name__ == "__main__":
    main()
