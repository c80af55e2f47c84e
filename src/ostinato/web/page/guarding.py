"""Keeps the page safe in a browser: the headers of every answer, the caching rules, and the check of a form's origin."""

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
    # not "no-referrer": with it browsers send forms from the origin "null", which cannot be told from another site's
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
"""Headers of pages that a browser may cache but must revalidate each time, so that they are not shown after a sign-out."""


class ForeignForm(OstinatoError):
    """A form that was not sent from the page."""

    status = 403
    code = "foreign_form"


def check_form(headers: Mapping[str, str]) -> None:
    """Raise ForeignForm unless the headers (lower-case names) say that this page sent the form.

    A browser that does not send `Sec-Fetch-Site` must send the origin, and it must be this host.
    """
    site = headers.get("sec-fetch-site")
    if site is None:
        origin = urlsplit(headers.get("origin", ""))
        if origin.netloc and origin.netloc.lower() == headers.get("host", "").lower():
            return
    elif site == "same-origin":
        return
    raise ForeignForm("This form was not sent from this page: nothing was done. Open the page itself and press again.")
