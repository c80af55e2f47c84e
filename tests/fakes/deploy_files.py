"""The files below deploy/, read once for all their tests."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.is_file() and not {"__pycache__", "secrets"} & set(path.parts)
)
YAML = [path for path in FILES if path.suffix == ".yaml"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OBJECTS = [
    each for path in YAML if path.parent.name == "kuberay" for each in yaml.safe_load_all(path.read_text()) if each
]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def named(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def of_kind(kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (each for each in OBJECTS if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


CLUSTER = of_kind("RayJob")["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"] | {"groupName": "head"}, *CLUSTER["workerGroupSpecs"]]
IN_CLUSTER: str = of_kind("ConfigMap")["data"]["ostinato.toml"]


def values(tree: Any, key: str) -> Iterator[Any]:
    """Every value under this key, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(tree, list):
        for each in tree:
            yield from values(each, key)


def separated(text: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Split a configuration into a file without `[ray]` and the `[ray]` table, which comes last."""
    rest, mark, ray = text.partition("[ray]")
    path = tmp_path / "ostinato.toml"
    path.write_text(rest)
    return path, tomllib.loads(mark + ray).get("ray", {})
