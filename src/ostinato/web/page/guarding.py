"""What keeps the page safe in a browser: headers of every answer, what it may keep, and who may send a form."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from ostinato.core.errors import OstinatoError

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # not "no-referrer": with it browsers send forms from the origin "null", which nobody could tell from another site's
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-store",
}
KEPT: Mapping[str, str] = {
    **HEADERS,
    "cache-control": "private, no-cache",
    "vary": "cookie, x-ostinato-key, authorization, x-api-key",
}
"""Of pages that a browser may keep, and must ask about each time: who signed out gets nothing of them."""


class ForeignForm(OstinatoError):
    """A form that was not sent from the page."""

    status = 403
    code = "foreign_form"


def check_form(headers: Mapping[str, str]) -> None:
    """Raise ForeignForm unless a browser says that its own page sends this (lower-case names).

    Browsers that do not say so (`Sec-Fetch-Site`) must send the origin, and it must be this host.
    """
    site = headers.get("sec-fetch-site")
    if site is None:
        origin = urlsplit(headers.get("origin", ""))
        if origin.netloc and origin.netloc.lower() == headers.get("host", "").lower():
            return
    elif site == "same-origin":
        return
    raise ForeignForm("This form was not sent from this page: nothing was done. Open the page itself and press again.")
