"""Replaces a function's body with a stub, to be written again or to test whether doing nothing passes."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

WRAPPER = "if 1:\n"  # makes an indented block a module of its own, without touching its text


def parse_block(block: str) -> tuple[cst.Module, cst.FunctionDef]:
    """Parse a function's lines into a module and the function in it. Raises ValueError if they are not one function."""
    module = cst.parse_module(WRAPPER + block if block[:1] in (" ", "\t") else block)
    node = module.body[0] if len(module.body) == 1 else None
    if isinstance(node, cst.If) and isinstance(node.body, cst.IndentedBlock) and len(node.body.body) == 1:
        node = node.body.body[0]
    if not isinstance(node, cst.FunctionDef) or not isinstance(node.body, cst.IndentedBlock):
        raise ValueError("not the lines of one function with an indented body")
    return module, node


def write_block(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> str:
    """The block's text with one node replaced."""
    code = module.deep_replace(old, new).code  # pyright: ignore[reportAttributeAccessIssue] - a module stays a module
    return code[len(WRAPPER) :] if code.startswith(WRAPPER) else code


def with_body(block: str, statements: Sequence[str]) -> str:
    """The block with its signature and docstring, and `statements` as the rest of its body."""
    module, function = parse_block(block)
    body = function.body
    assert isinstance(body, cst.IndentedBlock)
    kept = [body.body[0]] if function.get_docstring(clean=False) is not None else []
    added = [cst.parse_statement(each) for each in statements]
    return write_block(module, body, body.with_changes(body=[*kept, *added], footer=[]))


def without_body(block: str) -> str:
    """The function as a stub that raises NotImplementedError."""
    return with_body(block, ["raise NotImplementedError\n"])


def doing_nothing(block: str) -> str:
    """The function as the laziest stub, which returns None at once."""
    return with_body(block, ["return None\n"])
