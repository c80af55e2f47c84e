"""JSON without any character at which a reader ends a line, and text that is cut at line feeds alone."""

import json

import pytest

from ostinato.core.lines import json_line, lines_of, one_line, whole_lines

ENDS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\n"]


@pytest.mark.parametrize("end", ENDS)
def test_json_is_one_line_to_every_reader(end):
    value = {f"a{end}": [f"{end}b\\u2028{end}{end}", "é"]}
    line = json_line(value)
    assert len(line.splitlines()) == 1
    assert json.loads(line) == value
    assert "é" in line
    assert json.loads(one_line(json.dumps(value, ensure_ascii=False))) == value


def test_what_json_lacks_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        json_line(float("nan"))


@pytest.mark.parametrize("end", [each for each in ENDS if each not in "\r\n"])
def test_a_text_is_cut_at_line_feeds_alone(end):
    text = f"a{end}b\r\n\nc{end}"
    assert lines_of(text) == [f"a{end}b", "", f"c{end}"]
    assert whole_lines(text) == [f"a{end}b\r\n", "\n", f"c{end}"]


def test_the_last_line_may_lack_its_end():
    assert [lines_of(text) for text in ("", "\n", "a", "a\n", "a\n\n")] == [[], [""], ["a"], ["a"], ["a", ""]]
