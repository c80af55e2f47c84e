"""`make agents`: installs six unmodified coding agents and the JavaScript clients under .agents/, in the versions measured."""

import subprocess
import sys
from pathlib import Path

from tests.agents.running import AGENTS

CLIENTS = ("openai@7.57.0", "@anthropic-ai/sdk@1.12.0", "ai@7.0.173", "@ai-sdk/openai@4.0.118")
ROOT = Path(__file__).parents[2]
HOME = ROOT / ".agents"


def run(*words, cwd=HOME):
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
    sys.stdout.flush()
    subprocess.run([str(word) for word in words], cwd=cwd, check=True)


def main():
    HOME.mkdir(exist_ok=True)
    (HOME / "package.json").write_text("{}\n")
    packages = ["node@22", *CLIENTS, *(agent.package for agent in AGENTS if agent.script is not None)]
    run("npm", "install", "--no-fund", "--no-audit", *packages)
    node = HOME / "node_modules" / ".bin" / "node"
    for agent in AGENTS:
        if agent.script:  # installs the agent's own binary, which npm does not do without permission
            run(node, agent.script)
    for agent in AGENTS:
        if agent.script is None:
            run(sys.executable, "-m", "venv", agent.name)
            run(HOME / agent.name / "bin" / "pip", "install", "--quiet", *agent.package.split())


if __name__ == "__main__":
    main()
