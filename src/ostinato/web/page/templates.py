"""Templates with their filters for figures, times and people's text. Everything is escaped; no text becomes markup.

Also the tokens of a turn with their shades of log-probability, and the static files, whose URLs contain their hash so that browsers may
cache them for ever.
"""

from __future__ import annotations

import codecs
import hashlib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response

from ostinato.core import durations
from ostinato.core.report import headline
from ostinato.status.run_facts import TurnDetail

# ---------------------------------------------------------------- static files


_STATIC = Path(__file__).parents[1] / "static"
_MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


class StaticFiles:
    """The files in `web/static`, read once."""

    def __init__(self) -> None:
        found = {
            path.relative_to(_STATIC).as_posix(): path for path in _STATIC.rglob("*") if path.suffix in _MEDIA_TYPES
        }
        self._bodies = {name: path.read_bytes() for name, path in sorted(found.items())}
        self._hashes = {name: hashlib.sha256(body).hexdigest()[:8] for name, body in self._bodies.items()}

    def url(self, name: str) -> str:
        """Return a file's URL. Raises KeyError if there is no such file."""
        return f"/static/{self._hashes[name]}/{name}"

    def text(self, name: str) -> str:
        """Return a file's text. Raises KeyError if there is no such file."""
        return self._bodies[name].decode()

    async def serve(self, request: Request) -> Response:
        """Answer `GET /static/{digest}/{name}`."""
        name, digest = request.path_params["name"], request.path_params["digest"]
        if self._hashes.get(name) != digest:
            return Response("There is no such file.", 404, media_type="text/plain")
        tag = f'"{digest}"'
        headers = {
            "etag": tag,
            "cache-control": "public, max-age=31536000, immutable",
            "x-content-type-options": "nosniff",
        }
        if is_known(request, tag):
            return Response(status_code=304, headers=headers)
        return Response(self._bodies[name], headers=headers, media_type=_MEDIA_TYPES[Path(name).suffix])


def is_known(request: Request, tag: str) -> bool:
    """Return True if the request's If-None-Match has this ETag."""
    bare = tag.removeprefix("W/")
    return bare in (each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(","))


# ---------------------------------------------------------------- tokens


WINDOW = 2_000
"""Tokens per page."""
LONGEST_PROMPT = 20_000
SHADES = (-0.1, -0.7, -2.3, -4.6)
"""Log-probabilities between the shades: 90%, 50%, 10%, 1%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One sampled token. `shade`: 0 (most likely) to 4; `place`: its version's index in the turn, at most 3; `text`: its part of the
    answer.
    """

    at: int
    id: int
    text: str
    logprob: float
    shade: int
    version: int
    place: int


def cells(found: TurnDetail, start: int) -> list[Cell]:
    """Return the tokens from `start` on, at most `WINDOW`."""
    turn = found.line.turn
    by_token = turn.versions_T()
    places = {policy: number for number, policy in enumerate(turn.versions)}
    texts = list(spelt(found.sampled, turn.sampled_ids))
    return [
        Cell(
            at=at,
            id=turn.sampled_ids[at],
            text=texts[at],
            logprob=turn.logprobs[at],
            shade=shade(turn.logprobs[at]),
            version=by_token[at].number,
            place=min(places[by_token[at]], 3),
        )
        for at in range(start, min(start + WINDOW, len(turn.sampled_ids)))
    ]


def shade(logprob: float) -> int:
    """Return 0 for a nearly certain token, up to 4 for one with a probability below 1%."""
    return sum(logprob < bound for bound in SHADES)


def spelt(pieces: Iterable[bytes], ids: Sequence[int]) -> Iterable[str]:
    """Yield the text that each token adds: a character of several tokens comes with the last one, a control token is shown as its id."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece, token in zip(pieces, ids, strict=True):
        yield decoder.decode(piece) if piece else f"⟨{token}⟩"


def prompt_text(pieces: Sequence[bytes]) -> str:
    """Return a prompt's text with a mark for each control token. A long one is cut in the middle."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return shortened("".join(decoder.decode(piece) if piece else "⟨·⟩" for piece in pieces), LONGEST_PROMPT)


def shortened(text: str, most: int) -> str:
    """Return the text, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters are not shown …\n{text[-half:]}"


# ---------------------------------------------------------------- templates


_FOLDER = Path(__file__).parents[1] / "templates"
DASH = "\N{EN DASH}"
"""Stands for an unknown figure (0 is not unknown)."""
_VISIBLE_CONTROLS = "\n\t"
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Unicode categories of invisible characters: controls, bidi controls, joiners, private use."""
LONGEST_TEXT = 40_000
"""Characters beyond which a page cuts a text."""
_MOST_MARKS = 200
"""Limit of spelled-out runs of invisible characters in one text; further characters become U+FFFD, which bounds the markup."""


class Templates:
    """The page's Jinja templates. `files` gives the URLs of the static files."""

    def __init__(self, files: StaticFiles) -> None:
        self._env = Environment(
            loader=FileSystemLoader(_FOLDER),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._file = files.url
        filters = (ago, when, count, percent, size, marked, told, headline, bare, figure, flat, capital)
        self._env.filters.update({each.__name__: each for each in filters}, pp=points)

    def render(self, name: str, facts: Mapping[str, Any]) -> str:
        """Render a template with this context."""
        return self._env.get_template(name).render({**facts, "file": self._file})


def ago(seconds: float | None) -> str:
    """Format a time span; a dash if it is not known. Example: ``ago(200) == "3 min"``"""
    return DASH if seconds is None else durations.ago(seconds)


def when(at: float | None) -> Markup:
    """Format a Unix time in UTC. The page's script also shows it in local time."""
    if at is None:
        return Markup(DASH)
    moment = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), moment.strftime("%d %b %Y %H:%M:%S")
    )


def count(number: float | None) -> str:
    """Format a whole number with thousands separators; a dash if it is not known."""
    return DASH if number is None else f"{number:,.0f}"


def figure(number: float | None) -> str:
    """Format a number with four significant digits; a dash if it is not known."""
    return DASH if number is None else f"{number:.4g}"


def points(difference: float | None) -> str:
    """Format a difference of shares in percentage points, with its sign; a dash if it is not known."""
    return DASH if difference is None else f"{100 * difference:+.1f}".replace("-", "\N{MINUS SIGN}")


def percent(share: float | None) -> str:
    """Format a share in percent; a dash if it is not known."""
    return DASH if share is None else f"{100 * share:.1f}%"


def size(number: float | None) -> str:
    """Format bytes with decimal units; a dash if they are not known."""
    if number is None:
        return DASH
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= length:
            return f"{number / length:.1f} {unit}"
    return f"{number:.0f} B"


def marked(text: object, most: int = LONGEST_TEXT) -> Markup:
    """Escape people's text and spell out invisible characters, so that none can e.g. reverse the text's direction.

    A text of more than `most` characters is cut in the middle.
    """
    parts, marks = list[Markup](), 0
    for hidden, run in groupby(shortened(str(text), most), _is_hidden):
        if not hidden:
            parts.append(escape("".join(run)))
            continue
        for character, same in groupby(run):
            number, marks = sum(1 for _ in same), marks + 1
            if marks > _MOST_MARKS:
                parts.append(Markup("\N{REPLACEMENT CHARACTER}" * number))
                continue
            times = f" \N{MULTIPLICATION SIGN}{number:,}" if number > 1 else ""
            parts.append(Markup('<span class="unseen">U+{:04X}{}</span>').format(ord(character), times))
    return Markup("").join(parts)


def _is_hidden(character: str) -> bool:
    return character not in _VISIBLE_CONTROLS and unicodedata.category(character) in _HIDDEN_CATEGORIES


def told(text: object) -> Markup:
    """As `marked`, for Ostinato's own sentences: text between backticks is shown as code."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:
        return marked(text)
    each = (Markup("<code>{}</code>").format(marked(part)) if n % 2 else marked(part) for n, part in enumerate(parts))
    return Markup("").join(each)


def bare(text: object) -> str:
    """Return people's text without invisible characters, for form fields, which cannot hold markup."""
    return "".join(each for each in str(text)[:LONGEST_TEXT] if not _is_hidden(each))


def capital(text: str) -> str:
    """Return the text with a capital first letter; the rest is unchanged."""
    return text[:1].upper() + text[1:]


def flat(value: object) -> list[tuple[str, str]]:
    """Flatten a tree of JSON types into (name, value). Example: ``flat({"a": {"b": 1}}) == [("a.b", "1")]``"""
    lines: list[tuple[str, str]] = []
    _flatten("", value, lines)
    return lines


def _flatten(name: str, value: Any, lines: list[tuple[str, str]]) -> None:
    if isinstance(value, Mapping):
        tree: Mapping[str, Any] = value
        for key, each in tree.items():
            _flatten(f"{name}.{key}" if name else str(key), each, lines)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | list) for each in value):
        for number, each in enumerate(value):
            _flatten(f"{name}[{number}]", each, lines)
    elif isinstance(value, list | tuple):
        lines.append((name, ", ".join(map(_as_text, value))))
    else:
        lines.append((name, _as_text(value)))


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return DASH if value is None else str(value)
