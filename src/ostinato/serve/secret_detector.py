r"""Detects secrets and personal data in texts: regular expressions, each with a check of what it matched (Luhn, mod 97, ...).

One search finds the first match of any expression, in time linear in the text (RE2). Each expression matches a bounded number of bytes, and
only a bounded number of bytes after it is read until the match is confirmed, so finding all values of a text takes linear time, too.

The lists follow the issuers' documentation and the published rules of gitleaks and detect-secrets. Names and addresses of people are not
found, since no form distinguishes them from other words.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from ipaddress import IPv6Address
from typing import NamedTuple

import re2

# ---------------------------------------------------------------- checks


_TOO_FEW = 5  # different characters; excludes xxxxxxxx and 12121212
_WORDS = re.compile(rb"[a-z]+(?:[_.:/-][a-z0-9]+)*|[A-Z]+(?:_[A-Z0-9]+)*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(.*)?")
_CAMEL = re.compile(rb"(?:[A-Z][a-z]+[0-9]*){2,}")
_WORD_RUN = re2.compile(rb"(?:[A-Z]?[a-z]{2,}|[A-Z]{2,})+")  # words in a row; `re` would backtrack through every split
_STAND_INS = re.compile(
    rb"(?i)your|example|placeholder|redacted|dummy|x{4}|\*{3}|\.{3}|[<>{}]|^\[[A-Z_]+$|\$\(|%\(|\xe2\x9f\xa8"
)
_TRAILING = b".,;:!?)]}>"  # punctuation that ends a sentence or a bracket, not a value
_PICTURES = (b".png", b".jpg", b".jpeg", b".gif", b".svg", b".webp")  # logo@2x.png
_COUNTING = b"01234567890123456789"
_DAY = re.compile(rb"\+?[12][0-9]{3}-[0-9]{2}-[0-9]{2}\b")
_GROUPS = re.compile(rb"[0-9]+")
_IBAN_LENGTHS = range(15, 35)

Check = Callable[[bytes], int]
"""Returns how many bytes of a match, from its first, are the value; 0 if it is no value."""


def _whole(value: bytes) -> int:
    return len(value)


def _random(value: bytes) -> int:
    """Check for a generated value: digits and letters, and enough different ones."""
    digits = sum(48 <= byte < 58 for byte in value)
    return len(value) if digits and digits < len(value) and len(set(value)) >= 2 * _TOO_FEW else 0


def _varied(value: bytes) -> int:
    """Check for a value in a distinctive form, rather than a description of that form: enough different characters."""
    return len(value) if len(set(value)) > 2 * _TOO_FEW - 2 else 0


def _service(value: bytes) -> int:
    """Check for a key next to the name of a service."""
    value = value.rstrip(_TRAILING)
    return 0 if _WORDS.fullmatch(value) or _CAMEL.fullmatch(value) or _STAND_INS.search(value) else _random(value)


def _quoted_secret(value: bytes) -> int:
    """Check for a quoted password or key in an assignment: not a word, an identifier or a placeholder."""
    value = value.rstrip(_TRAILING)
    plain = _WORDS.fullmatch(value) or (value.isalpha() and (len(value) < 10 or _WORD_RUN.fullmatch(value)))
    if len(value) < 6 or plain or len(set(value)) < _TOO_FEW or _STAND_INS.search(value):
        return 0
    return len(value)


def _unquoted_secret(value: bytes) -> int:
    """Like `_quoted_secret`, but without quotes it may be an expression: it needs mixed case and a digit, or a character of no name."""
    value = value.rstrip(_TRAILING)
    kinds = (b"[0-9]", b"[a-z]", b"[A-Z]")
    mixed = all(re.search(kind, value) for kind in kinds) or re.search(rb"[^\w./:\[\]()-]", value)
    random = mixed or (len(value) >= 20 and re.search(rb"[0-9]", value))
    return _quoted_secret(value) if random and not _CAMEL.fullmatch(value) else 0


def _basic(value: bytes) -> int:
    """Check for base64 of `name:password`."""
    try:
        return len(value) if b":" in base64.b64decode(value + b"=" * (-len(value) % 4), validate=True) else 0
    except (binascii.Error, ValueError):
        return 0


def _mail(value: bytes) -> int:
    bare = value.rstrip(_TRAILING)
    remote = bare.startswith(b"git@")  # git@github.com:a/b.git
    return 0 if bare.lower().endswith(_PICTURES) or remote or b".." in bare else len(bare)


def _luhn(digits: bytes) -> bool:
    total = 0
    for place, byte in enumerate(reversed(digits)):
        number = (byte - 48) * (1 + place % 2)
        total += number - 9 if number > 9 else number
    return total % 10 == 0


def _prefixes(value: bytes, least: int, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the prefixes of a number that end with one of its groups, longest first: their lengths, and their digits."""
    ends = [found.end() for found in _GROUPS.finditer(value)]
    for end in reversed(ends):
        digits = bytes(byte for byte in value[:end] if 48 <= byte < 58)
        if least <= len(digits) <= most:
            yield end, digits


def _card(value: bytes) -> int:
    for end, digits in _prefixes(value, 13, 19):
        first, two = digits[:1], int(digits[:2])
        length = {b"4": (13, 16, 19), b"5": (16,), b"2": (16,), b"6": (16, 17, 18, 19)}.get(first, ())
        if first == b"3":
            length = (15,) if two in (34, 37) else (14, 16) if two in (30, 36, 38) else (16,) if two == 35 else ()
        if two in (50, 56, 57, 58):
            length = range(13, 20)
        if digits[:4] in (b"1800", b"2131"):
            length = (15,)
        known = first != b"2" or len(digits) == 15 or 2221 <= int(digits[:4]) <= 2720
        if len(digits) in length and known and len(set(digits)) > 1 and _luhn(digits):
            return end
    return 0


def _iban(value: bytes) -> int:
    ends = [found.end() for found in re.finditer(rb"[A-Z0-9]+", value)]
    for end in reversed(ends):
        plain = value[:end].replace(b" ", b"").decode()
        if len(plain) in _IBAN_LENGTHS and int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1:
            return end
    return 0


def _phone(value: bytes) -> int:
    bare = value.rstrip(b" .-(")
    if _DAY.match(bare):
        return 0
    digits = bytes(byte for byte in bare if 48 <= byte < 58)
    return len(bare) if 7 <= len(digits) <= 15 and len(set(digits)) > 2 and digits not in _COUNTING else 0


def _ssn(value: bytes) -> int:
    area, group, serial = value.split(b"-")
    real = area not in (b"000", b"666") and area < b"900" and group != b"00" and serial != b"0000"
    return len(value) if real else 0


def _dni(value: bytes) -> int:
    """Check Spain's DNI and NIE: the last letter encodes the number modulo 23."""
    number = value[:-1].replace(b"-", b"").translate(bytes.maketrans(b"XYZ", b"012"))
    return len(value) if b"TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == value[-1] else 0


_ODD = dict(
    zip(
        "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
        strict=True,
    )
)  # fmt: skip


def _fiscale(value: bytes) -> int:
    """Check Italy's codice fiscale: the last letter encodes the sum of the characters' values modulo 26."""
    plain = value.decode()
    even = sum(int(c) if c.isdigit() else ord(c) - 65 for c in plain[1:15:2])
    return len(value) if chr(65 + (sum(_ODD[c] for c in plain[:15:2]) + even) % 26) == plain[15] else 0


def _nir(value: bytes) -> int:
    """Check France's NIR: the last two digits are 97 minus the number modulo 97."""
    plain = value.replace(b" ", b"").replace(b"2A", b"19").replace(b"2B", b"18")
    return len(value) if 97 - int(plain[:13]) % 97 == int(plain[13:]) else 0


def _cpf(value: bytes) -> int:
    """Check Brazil's CPF: two check digits."""
    digits = [byte - 48 for byte in value if 48 <= byte < 58]
    for place in (9, 10):
        rest = sum(digit * weight for digit, weight in zip(digits, range(place + 1, 1, -1), strict=False)) * 10 % 11
        if digits[place] != rest % 10:
            return 0
    return len(value) if len(set(digits)) > 1 else 0


def _is_date(year: int, month: int, day: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True


def _personnummer(value: bytes) -> int:
    """Check Sweden's personal number: a birthday, and Luhn's check over the last ten digits."""
    digits = bytes(byte for byte in value if 48 <= byte < 58)[-10:]
    year, month, day = (int(digits[at : at + 2]) for at in (0, 2, 4))
    return len(value) if _is_date(2000 + year, month, day) and _luhn(digits) else 0


def _cpf_or_pesel(value: bytes) -> int:
    """Check Brazil's CPF without punctuation, or Poland's PESEL: a birthday, whose month encodes the century, and a check digit."""
    if _cpf(value):
        return len(value)
    digits = [byte - 48 for byte in value]
    year, month, day = (10 * digits[at] + digits[at + 1] for at in (0, 2, 4))
    century = {0: 1900, 1: 2000, 2: 2100, 3: 2200, 4: 1800}[month // 20]
    weights = (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1)
    right = sum(digit * weight for digit, weight in zip(digits, weights, strict=True)) % 10 == 0
    return len(value) if right and _is_date(century + year, month % 20, day) else 0


def _resident(value: bytes) -> int:
    """Check China's resident number: a birthday and a check character modulo 11."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    rest = sum((byte - 48) * weight for byte, weight in zip(value[:17], weights, strict=True)) % 11
    born = _is_date(int(value[6:10]), int(value[10:12]), int(value[12:14]))
    return len(value) if born and b"10X98765432"[rest] == value[17] else 0


def _ipv4(value: bytes) -> int:
    parts = value.split(b".")
    real = all(int(part) < 256 for part in parts) and int(parts[0]) not in (0, 127, 255)
    return len(value) if real else 0


def _ipv6(value: bytes) -> int:
    try:
        address = IPv6Address(value.decode())
    except ValueError:
        return 0
    return 0 if address.is_loopback or address.is_unspecified else len(value)


# ---------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One expression: what precedes a value, the value's first bytes, and what must follow them.

    `rest`: an expression whose first group is the rest of the value; without a match there is no value. `left`: characters before the match
    that belong to the value, at most `_MOST_LEFT`. `check`: see `Check`; it gets at most `window` bytes of the rest. `decimals` False:
    there is no value after a decimal point.

    Example: ``Pattern(kind="NPM_TOKEN", value=r"npm_[A-Za-z0-9]{36}")``
    """

    kind: str
    value: str
    before: str = r"\b"
    rest: str = "([A-Za-z0-9_]*)"
    left: bytes = b""
    check: Check = _whole
    window: int = 64
    decimals: bool = True


_MOST_LEFT = 64
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_EMAIL_CHARS = _LETTERS + _LETTERS.upper() + b"0123456789._%+-"
_KEYWORD = (
    r"(?i:passw(?:or)?d|passwort|passphrase|pwd|secret|api[_-]?key|token|access[_-]?key|auth[_-]?key|private[_-]?key)"
)
_NAMED = rf"{_KEYWORD}[A-Za-z0-9_-]{{0,16}}"
_SIGN, _QUOTE = r"[ \t]{0,4}(?:=>|:=|==?|:)\s{0,4}", "\\\\?[\"'`]"
_DASHED, _BASE64 = "([A-Za-z0-9_-]*)", "([A-Za-z0-9+/_=-]*)"
_KEY_BODY = (
    r"((?:[A-Za-z0-9+/=\s:,.\\]|-[A-Za-z0-9])*-----END [A-Z0-9 ]{0,40}-----|"
    r"(?:(?:\s|\\[nrt])*[A-Za-z0-9+/=]{20,})*(?:(?:\n|\\n)[A-Za-z0-9+/=]+)?)"
)
# services whose keys have no distinctive form
_SERVICES = (
    "adafruit|adobe|airtable|algolia|alibaba|aliyun|asana|atlassian|bamboo|beamer|bitbucket|bittrex|cloudant|cloudflare|codecov|cohere|coinbase|confluent|"
    "contentful|datadog|discord|drone_?ci|dropbox|facebook|fastly|finicity|finnhub|flickr|freshbooks|gitter|gocardless|heroku|hubspot|ibm_?c|"
    "intercom|jfrog|artifactory|kraken|kucoin|launchdarkly|linkedin|looker|mailgun|mapbox|mattermost|meraki|messagebird|netlify|new_?-?relic|"
    "nytimes|okta|plaid|private_?ai|rapidapi|sendbird|sentry|sidekiq|snyk|softlayer|sonar[_.-]?(?:login|token)|squarespace|sumo|telegr|travis|"
    "twitch|twitter|twilio|typeform|yandex|zendesk"
)
# prefixes of tokens with 16 or more further characters
_PREFIXED = (
    r"d(?:op|oo|or)_v1_|shp(?:at|ca|pa|ss)_|dapi|sq0(?:atp|csp)-|lin_api_|ntn_|gsk_|xai-|pplx-|r8_|dckr_pat_|hv[sb]\.|"
    r"pscale_(?:tkn|pw|oauth)_|sntry[su]_|dp\.(?:pt|st|ct)\.|gl(?:c|sa)_|NRAK-|PMAK-|pul-|rubygems_|ATATT3|ATBB|figd_|HRKU-|"
    r"nfp_|sbp_|ph[cx]_|AGE-SECRET-KEY-1|p8e-|AKCp|cmVmd|CLOJARS_|4b1d|dt0c01\.|duffel_(?:test|live)_|EZ[AT]K|EAA[A-Z]|FLW(?:SECK|PUBK)_|fo1_|fm[12][ar]?_|"
    r"fio-u-|GR1348941|glffct-|eyJrIjoi|[ps]at\.|ico-|s-s4t2(?:ud|af)-|API-|sha256~|pnu_|rdme_|tk-us-|sm_[aps]at_|sgp_|pat[A-Za-z0-9]{14}\.|"
    r"shippo_(?:live|test)_|xkeysib-|nvapi-|tgp_v1_|LTAI|ya29\.|key-"
)


def _pem(value: bytes) -> int:
    """Check for a whole key, rather than a mention of its first line."""
    return len(value) if len(value) > 80 else 0


def _prefixed(value: bytes) -> int:
    return _random(value) if len(value) > 20 else 0


def _in_url(value: bytes) -> int:
    return 0 if _STAND_INS.search(value) or value.startswith((b"$", b"%")) else len(value)


def _alone(kind: str, value: str, check: Check = _whole, *, before: str = r"\b", decimals: bool = True) -> Pattern:
    """Make an expression that matches whole values, so that nothing after them is read."""
    return Pattern(kind=kind, value=value, check=check, before=before, rest="()", decimals=decimals)


SECRETS: Sequence[Pattern] = (
    Pattern(kind="AWS_KEY_ID", value=r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}", check=_varied),
    Pattern(
        kind="AWS_SECRET",
        before=rf"(?i:secret_?-?access_?-?key|aws_?-?secret(?:_?-?key)?)\\?[\"']?{_SIGN}(?:{_QUOTE})?",
        value=r"[A-Za-z0-9/+]{40}",
        rest=_BASE64,
        check=_random,
    ),
    Pattern(kind="GITHUB_TOKEN", value=r"gh[pousr]_[A-Za-z0-9]{36}", check=_varied),
    Pattern(kind="GITHUB_TOKEN", value=r"github_pat_[A-Za-z0-9_]{50}", check=_varied),
    Pattern(
        kind="GITLAB_TOKEN",
        value=r"gl(?:pat|ptt|dt|rt|cbt|oas|soat|ft|imt|agent)-[A-Za-z0-9_-]{20}",
        rest=_DASHED,
        check=_varied,
    ),
    Pattern(kind="SLACK_TOKEN", value=r"xox[abeoprs]-[A-Za-z0-9-]{10}", rest=_DASHED, check=_random),
    Pattern(kind="SLACK_TOKEN", value=r"(?i:xapp)-\d-[A-Za-z0-9]{6}", rest=_DASHED, check=_random),
    Pattern(
        kind="SLACK_WEBHOOK",
        value=r"hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{30}",
        rest="([A-Za-z0-9+/]*)",
    ),
    Pattern(kind="STRIPE_KEY", value=r"(?:[srp]k_(?:live|test|prod)|whsec)_[A-Za-z0-9]{10}", check=_random),
    Pattern(kind="ANTHROPIC_KEY", value=r"sk-ant-[A-Za-z0-9_-]{20}", rest=_DASHED, check=_random),
    Pattern(kind="OPENAI_KEY", value=r"sk-[A-Za-z0-9_-]{20}", rest=_DASHED, check=_random),
    Pattern(kind="GOOGLE_KEY", value=r"(?:AIza|GOCSPX-)[A-Za-z0-9_-]{28}", rest=_DASHED, check=_random),
    Pattern(
        kind="JWT",
        value=r"ey[A-Za-z0-9][A-Za-z0-9_-]{10}",
        rest=r"([A-Za-z0-9_-]{0,600}\.ey[A-Za-z0-9_-]{9,}(?:\.[A-Za-z0-9_=-]+)?)",
        window=640,
    ),
    Pattern(
        kind="PRIVATE_KEY",
        before="",
        value=r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----",
        rest=_KEY_BODY,
        window=4096,
        check=_pem,
    ),
    Pattern(kind="NPM_TOKEN", value=r"npm_[A-Za-z0-9]{36}", check=_varied),
    Pattern(kind="PYPI_TOKEN", value=r"pypi-[A-Za-z0-9_-]{40}", rest=_DASHED, check=_varied),
    Pattern(kind="HF_TOKEN", value=r"(?:hf|api_org)_[A-Za-z0-9]{30}", check=_varied),
    Pattern(kind="SENDGRID_KEY", value=r"SG\.[A-Za-z0-9_=.-]{60}", rest=_DASHED, check=_varied),
    Pattern(kind="TWILIO_KEY", value=r"(?:SK|AC)[0-9a-zA-Z]{32}\b", check=_random),
    Pattern(kind="MAILCHIMP_KEY", value=r"[0-9a-z]{32}-us\d{1,2}", check=_random),
    Pattern(
        kind="DISCORD_TOKEN",
        value=r"[MNO][A-Za-z0-9_-]{22,28}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27}",
        rest=_DASHED,
        check=_random,
    ),
    Pattern(
        kind="DISCORD_WEBHOOK",
        value=r"discord(?:app)?\.com/api/webhooks/\d{17,20}/[A-Za-z0-9_-]{30}",
        rest=_DASHED,
    ),
    Pattern(kind="TELEGRAM_TOKEN", value=r"\d{8,10}:[A-Za-z0-9_-]{35}", rest=_DASHED, check=_random),
    Pattern(
        kind="API_KEY",
        value=rf"(?:{_PREFIXED})[A-Za-z0-9_=.-]{{16}}",
        rest=r"((?:[.=]*[A-Za-z0-9_-]+)*=*)",
        check=_prefixed,
    ),
    Pattern(kind="API_KEY", value=r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40}", rest=_BASE64),
    Pattern(kind="API_KEY", value=r"[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk", check=_varied),
    Pattern(kind="API_KEY", value=r"\d{15,16}(?:\||%7C)[0-9A-Za-z_-]{27}", rest=_DASHED, check=_varied),
    Pattern(kind="API_KEY", value=r"A3-[A-Z0-9]{6}-(?:[A-Z0-9]{5,11}-){4,5}[A-Z0-9]{5}", check=_varied),
    Pattern(kind="AZURE_KEY", value=r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31}", check=_varied),
    Pattern(
        kind="SERVICE_KEY",
        before=rf"(?i:{_SERVICES})[A-Za-z0-9_.-]{{0,20}}[ \t\"'\\\\]{{0,3}}(?:=>|:=|\|\||[:?]?=|:{{1,3}}=?|>|,)[ \t\"'`=\\\\]{{0,5}}",
        value=r"[A-Za-z0-9_=/+.-]{16}",
        rest=r"([A-Za-z0-9_=/+.-]*)",
        check=_service,
    ),
    Pattern(
        kind="AZURE_KEY",
        before=r"(?i:AccountKey|SharedAccessKey)=",
        value=r"[A-Za-z0-9+/]{40}",
        rest=_BASE64,
        check=_random,
    ),
    Pattern(
        kind="AZURE_KEY", before=r"[?&;]sig=", value=r"[A-Za-z0-9%+/]{40}", rest="([A-Za-z0-9%+/=]*)", check=_random
    ),
    Pattern(
        kind="URL_PASSWORD",
        before=r"://[^\s:/@\"'<>]{0,64}:",
        value=r"[^\s@/\"'<>]",
        rest=r"([^\s@/\"'<>]{2,200})@",
        window=201,
        check=_in_url,
    ),
    Pattern(
        kind="AUTHORIZATION",
        before=rf"(?i:authorization)\\?[\"']?{_SIGN}(?:{_QUOTE})?(?i:basic|bearer|token)[ \t]{{1,4}}",
        value=r"[A-Za-z0-9+/._~-]{12}",
        rest=r"([A-Za-z0-9+/._~=-]*)",
        check=_random,
    ),
    Pattern(
        kind="AUTHORIZATION",
        before=r"\b[Bb]asic[ \t]{1,4}",
        value=r"[A-Za-z0-9+/]{12}",
        rest="([A-Za-z0-9+/]*={0,2})",
        check=_basic,
    ),
    Pattern(
        kind="AUTHORIZATION",
        before=r"\b[Bb]earer[ \t]{1,4}",
        value=r"[A-Za-z0-9+/._~-]{20}",
        rest=r"([A-Za-z0-9+/._~=-]*)",
        check=_random,
    ),
    Pattern(
        kind="PASSWORD",
        before=rf"{_NAMED}\\?[\"']?\]?{_SIGN}[rbf]?{_QUOTE}",
        value="[^\\s\"'`\\\\]{6}",
        rest="([^\\s\"'`\\\\]{0,300})[\"'`\\\\]",
        window=301,
        check=_quoted_secret,
    ),
    Pattern(
        kind="PASSWORD",
        before=rf"{_NAMED}[ \t]{{0,2}}[:=][ \t]{{0,2}}",
        value="[^\\s\"'`,;(){}\\[\\]<>$\\\\]{8}",
        rest="([^\\s\"'`,;(){}\\[\\]<>$\\\\]*)(?:[\\s\"'`,;)}\\]<>$\\\\]|$)",
        check=_unquoted_secret,
    ),
    Pattern(
        kind="PASSWORD",
        before=r"(?i:\b(?:password|passphrase|passwort|kennwort|pin)[ \t]{1,2}(?:is|was|ist|lautet|est|:)[ \t:]{1,3})[\"'`]?",
        value="[^\\s\"'`\\\\]{4}",
        rest="([^\\s\"'`\\\\]*)",
        check=_quoted_secret,
    ),
)
"""Secrets. Where several begin at the same place, the first in this order is tried first."""

PERSONAL: Sequence[Pattern] = (
    Pattern(
        kind="EMAIL",
        before="",
        value=r"[A-Za-z0-9._%+-]@[A-Za-z0-9]",
        rest=r"([A-Za-z0-9-]{0,62}\.(?:[A-Za-z0-9-]{1,63}\.){0,8}[A-Za-z]{2,24})",
        left=_EMAIL_CHARS,
        window=256,
        check=_mail,
    ),
    _alone("IBAN", r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _iban),
    _alone("NATIONAL_ID", r"\d{3}-\d{2}-\d{4}\b", _ssn),
    _alone("NATIONAL_ID", r"(?:\d{8}|[XYZ]\d{7})-?[A-Z]\b", _dni, decimals=False),
    _alone("NATIONAL_ID", r"[A-Z]{6}\d{2}[A-EHLMPR-T]\d{2}[A-Z]\d{3}[A-Z]\b", _fiscale),
    _alone(
        "NATIONAL_ID", r"[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?(?:\d{2}|2[AB]) ?\d{3} ?\d{3} ?\d{2}\b", _nir, decimals=False
    ),
    _alone("NATIONAL_ID", r"\d{3}\.\d{3}\.\d{3}-\d{2}\b", _cpf),
    _alone("NATIONAL_ID", r"(?:\d{2})?\d{6}[-+]\d{4}\b", _personnummer),
    _alone("NATIONAL_ID", r"\d{11}\b", _cpf_or_pesel, decimals=False),
    _alone("NATIONAL_ID", r"\d{17}[0-9X]\b", _resident, decimals=False),
    _alone("NATIONAL_ID", r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d{2} ?\d{2} ?\d{2} ?[A-D]\b"),
    _alone(
        "CARD",
        r"(?:\d{4}[ -]?\d{4}[ -]?\d{4}[ -]?\d{1,4}(?:[ -]?\d{1,4})?|\d{4}[ -]?\d{6}[ -]?\d{4,5}(?:[ -]\d{3,4})?)\b",
        _card,
        decimals=False,
    ),
    _alone("PHONE", r"\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ ./-]?\d{2,8}){1,5}\b", _phone, before=r"\B"),
    _alone("PHONE", r"\(\d{3}\) ?\d{3}[ .-]\d{4}(?:x\d{1,5})?\b", _phone, before=r"\B"),
    _alone("PHONE", r"(?:1[-.])?\d{3}[-.]\d{3}[-.]\d{4}(?:x\d{1,5})?\b", _phone),
    _alone("PHONE", r"\(0\d{1,5}\) ?\d{3,8}(?: \d{3,4})?\b", _phone, before=r"\B"),
    _alone(
        "PHONE",
        r"0[1-9](?:[ .]\d{2}){4}\b|0[1-9]\d{8,9}\b|0[1-9]\d{1,3} \d{3,4} ?\d{3,4}\b|[1-9]\d 9?\d{4}-\d{4}\b",
        _phone,
        decimals=False,
    ),
    _alone(
        "PHONE",
        r"\(?\d{1,5}\)?(?:[ ./-]{0,3}\d{2,8}){1,5}\b",
        _phone,
        before=r"(?i:\b(?:phone|tel|telefon|telephone|mobile|mobil|cell|fax|handy|whatsapp)\b)[^\w\n+(]{1,4}"
        r"(?i:(?:number|nr|no|is|ist)\b[^\w\n+(]{0,4}){0,2}",
    ),
    _alone("IP", r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", _ipv4),
    _alone("IP", r"[0-9a-fA-F]{1,4}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{1,4}\b", _ipv6),
)
"""Personal data in a distinctive form."""

KINDS: Sequence[str] = tuple(dict.fromkeys(pattern.kind for pattern in (*SECRETS, *PERSONAL)))
CONTEXTUAL_KINDS = frozenset({"PASSWORD", "URL_PASSWORD", "AUTHORIZATION", "AWS_SECRET", "AZURE_KEY", "SERVICE_KEY"})
"""Kinds that are recognised by the words before a value, since the value alone has no distinctive form."""


# ---------------------------------------------------------------- detector


class Finding(NamedTuple):
    """A value: its kind, and its start and end in the text's UTF-8 bytes."""

    kind: str
    start: int
    end: int


_NAME = re2.compile(_KEYWORD.encode())


def is_named_secret(name: str, value: str) -> bool:
    """Return True if a field's name says that its value is a secret, and the value looks like one.

    Example: ``is_named_secret("dbPassword", 'h"unter2') and not is_named_secret("tokenizer", "gpt2-medium")``
    """
    data = value.encode(errors="surrogatepass")
    named = len(name) <= 64 and _NAME.search(name.encode(errors="surrogatepass")) is not None
    return named and not re.search(rb"\s", data) and _quoted_secret(data) == len(data)


PLACEHOLDER = r"\x{27e8}[A-Z][A-Z0-9_]{1,23}_[0-9a-f]{8,64}\x{27e9}"
"""The placeholders in masked text, which are never findings. Example: ⟨EMAIL_3f2a91c4⟩"""
_WORD = re.compile(rb"\w*")
_MEMORY = 1 << 26  # bytes for RE2's cache of automaton states


class SecretDetector:
    """Finds values of all kinds except `ignored`. Thread-safe.

    Example: ``SecretDetector().find(b"write to ann@example.com") == [Finding("EMAIL", 9, 24)]``
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._patterns = [pattern for pattern in (*SECRETS, *PERSONAL) if pattern.kind not in ignored]
        options = re2.Options()
        options.max_mem, options.log_errors = _MEMORY, False
        bodies = [f"{each.before}({each.value})" for each in self._patterns]
        self._any = re2.compile("|".join([f"({PLACEHOLDER})", *bodies]).encode(), options)
        self._rests = [re2.compile(each.rest.encode(), options) for each in self._patterns]

    def find(self, text: bytes) -> list[Finding]:
        """Return the values in a text, in order and without overlaps."""
        found, at = list[Finding](), 0
        while (match := self._any.search(text, at)) is not None:
            number = match.lastindex or 0
            start, end = match.span(number)
            if number == 1:
                at = end
                continue
            pattern, rest = self._patterns[number - 2], self._rests[number - 2]
            ends, edge = rest.match(text, end, end + pattern.window), end + pattern.window
            if ends is not None and (pattern.decimals or text[max(0, start - 1) : start] != b"."):
                first = _leftmost(text, start, max(at, start - _MOST_LEFT), pattern.left)
                length = pattern.check(text[first : ends.end(1)])
                if length and ends.end() >= edge and (whole := rest.match(text, end)) is not None:
                    length = whole.end(1) - first
                if length:
                    at = first + length
                    found.append(Finding(pattern.kind, first, at))
                    continue
            # the text before a rejected value holds no other value
            at = start if start > match.start() else _after_word(text, start)
        return found


def _leftmost(text: bytes, start: int, least: int, belongs: bytes) -> int:
    while belongs and start > least and text[start - 1] in belongs:
        start -= 1
    return start


def _after_word(text: bytes, start: int) -> int:
    """Return the end of the word at `start`; one byte further if no word begins there."""
    match = _WORD.match(text, start)
    return max(start + 1, start if match is None else match.end())


@lru_cache(maxsize=8)
def detector(ignored: frozenset[str]) -> SecretDetector:
    """Return the detector of all kinds except those ignored; compiled once."""
    return SecretDetector(ignored)
