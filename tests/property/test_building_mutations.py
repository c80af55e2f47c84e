import ast

from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.tiny_package import MODULE

from ostinato.worlds.building.mutations import faults, functions_of, returning_none, without_body

LINES = [
    "if a < b and not c:\n    a = a + 1\nelse:\n    b = max(a, c)",
    "for i in range(3):\n    if i is None:\n        break\n    a += i",
    "c = [x * 2 for x in (a, b) if x != 3]",
    "# a remark",
    'a = """two\nlines"""',
    "return a",
    "while a >= 2:\n    a -= 1",
    "b = a if c else b[1:]",
    "f(a, b)",
]


@st.composite
def sources(draw):
    """A module with a function, at the top or in a class, indented by spaces or a tab."""
    unit = draw(st.sampled_from(["    ", "\t", "  "]))
    body = [*draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=5)), "a = 1"]
    doc = ['"""Says what."""'] if draw(st.booleans()) else []
    lines = "\n".join(doc + body).replace("    ", unit)
    inside = draw(st.booleans())
    head = draw(st.sampled_from(["def f(a, b=2, *, c: int = 3):", "@g\ndef f(a, b, c):", "async def f(a, b, c):"]))

    def pushed(text: str, by: str) -> str:
        return "\n".join(by + line if line and not line.startswith("lines") else line for line in text.split("\n"))

    function = head + "\n" + pushed(lines, unit)
    return "import os\n\n" + ("class C:\n" + pushed(function, unit) if inside else function) + "\n\nafter = 1\n"


@given(sources())
def test_every_fault_changes_its_function_only_and_can_be_read(source):
    (function,) = functions_of("a.py", source)
    block = function.block(source)
    assert function.replaced(source, block) == source
    lines = source.splitlines()
    for fault in faults(block):
        changed = function.replaced(source, fault.block)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        assert changed.splitlines()[: function.first - 1] == lines[: function.first - 1]
        assert changed.endswith("after = 1\n")


@given(sources())
def test_faults_differ_and_a_draw_is_some_of_them(source):
    (function,) = functions_of("a.py", source)
    block = function.block(source)
    every = {fault.block for fault in faults(block)}
    drawn = faults(block, most=3, seed=5)
    assert len({fault.block for fault in drawn}) == len(drawn) == min(3, len(every))
    assert {fault.block for fault in drawn} <= every
    assert drawn == faults(block, most=3, seed=5)


@given(sources())
def test_a_body_that_is_gone_keeps_signature_and_docstring(source):
    (function,) = functions_of("a.py", source)
    for remove, left in ((without_body, "raise NotImplementedError"), (returning_none, "return None")):
        changed = function.replaced(source, remove(function.block(source)))
        (stub,) = functions_of("a.py", changed)
        assert (stub.name, stub.docstring, stub.signature, stub.first) == (
            function.name,
            function.docstring,
            function.signature,
            function.first,
        )
        assert stub.code_lines == 1
        assert left in stub.block(changed)


def test_functions_within_functions_one_liners_and_parts_of_properties_are_left_out():
    source = (
        "def a(): return 1\n\ndef g(\n    x,\n    y): return x\n\n"
        "def h(x=(1,\n         2)): return (\n    x)\n\ndef b():\n    def c():\n        return 1\n    return c\n\n"
        "class D:\n    @property\n    def e(self):\n        return 1\n\n    @e.setter\n    def e(self, x):\n        self.x = x\n"
    )
    assert [function.name for function in functions_of("a.py", source)] == ["b"]  # e is defined twice
    assert functions_of("a.py", "def broken(:\n") == []
    assert [function.name for function in functions_of("a.py", MODULE)] == [
        "clamp",
        "Bag.__init__",
        "Bag.add",
        "unused",
    ]


def test_a_fault_is_called_what_it_is():
    source = "class C:\n    def f(self, a):\n        if a < 3:\n            return a\n        return a and self\n"
    (function,) = functions_of("a.py", source)
    found = {fault.kind: fault.block for fault in faults(function.block(source))}
    assert set(found) == {"constant", "boundary", "missing case", "logic"}
    assert "a < 4" in found["constant"]
    assert "a <= 3" in found["boundary"]
    assert "if" not in found["missing case"]
    assert "a or self" in found["logic"]


def test_a_signature_tells_its_decorators():
    (function,) = functions_of("a.py", "class C:\n    @property\n    def f(self):\n        return 1\n")
    assert function.signature.split() == ["@property", "def", "f(self):"]


def test_a_signature_ends_at_the_colon_before_the_body():
    for signature in (
        "def f(a,  # one: a\n      b={1: 2}) -> 'x:y':",
        "@d(k=lambda x: x)\ndef f(a: int, *, b=lambda: 1):",
    ):
        (function,) = functions_of("a.py", f"{signature}  # def g():\n    s = '''\nx: 1'''\n    return s\n")
        assert function.signature == signature


def test_nobody_passes_the_object_in_another_place_and_assertions_are_left_alone():
    block = "def f(self, a, b):\n    assert a < b and g(a, b)\n    return g(self, a) + g(a, b)\n"
    kinds = [fault.kind for fault in faults(block)]
    assert sorted(kinds) == ["argument order", "arithmetic"]
