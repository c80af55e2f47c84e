"""Every error that crosses a boundary. Each message names the field or part at fault and the remedy.

OstinatoError
├── BadRequest          a client's input cannot be used (HTTP 400)
│   ├── TooLarge        too many bytes or tokens (HTTP 413)
│   ├── GrammarTooComplex  a format that cannot be enforced to its end (HTTP 400)
│   └── NotFound        no such model, turn or ref (HTTP 404)
├── Unauthorized        missing or wrong key (HTTP 401)
├── Unavailable         cannot be done now; try again (HTTP 503)
│   ├── Overloaded      all capacity is in use
│   └── SandboxBroken   a sandbox's programs exceeded its limits
├── Cancelled           the caller gave up; everything is as before the call
├── StorageFull         nothing was written, nothing acknowledged was lost (HTTP 507)
├── Corrupt             stored bytes do not have their promised hash or form
├── Conflict            a compare-and-swap lost, or another process holds the store
│   └── LeaseLost       another process has taken over our role
├── NoSignal            a batch that would teach nothing
├── BadRoutes           recorded router choices that cannot be replayed
├── BadWeights          NaN, wrong shape, unsafe file: never loaded, never released
├── BadConfig           a key, value or file of the configuration
└── SandboxRefused      this kernel cannot isolate generated code
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Base of all errors whose message is written for people."""

    status = 500
    code = "internal_error"


class BadRequest(OstinatoError, ValueError):
    """A client's input cannot be used. `field` is the offending part of the request, or None."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TooLarge(BadRequest):
    """More bytes or tokens than the limit, which the message states."""

    status = 413
    code = "too_large"


class NotFound(BadRequest, LookupError):
    """No such model, turn, ref or object."""

    status = 404
    code = "not_found"


class GrammarTooComplex(BadRequest):
    """The grammar of the requested format compiled, but exceeded the limits on the cost of one token while an answer was sampled.

    Args:
        field: the fields of the request that may contain the grammar.
    """

    code = "grammar_too_complex"

    def __init__(self, field: str) -> None:
        super().__init__(
            f"The form that {field} demands takes too much work at one token to be enforced to the answer's end. Simplify its patterns: "
            "fewer and smaller repetitions ({n,m}, minLength, maxLength), fewer alternatives.",
            field=field,
        )


class Unauthorized(OstinatoError):
    """Missing or wrong key."""

    status = 401
    code = "unauthorized"


class Unavailable(OstinatoError):
    """Cannot be done now (starting, draining, overloaded); the same call may succeed later."""

    status = 503
    code = "unavailable"


class Overloaded(Unavailable):
    """All capacity is in use; the same call will succeed when some of it is free again."""

    code = "overloaded"


class NotFetched(Unavailable):
    """A server is healthy but cannot fetch a version of the weights now."""


class SandboxBroken(Unavailable):
    """A sandbox was ended because its programs exceeded its limits. This is their own fault, so a retry would not help."""

    code = "sandbox_broken"


class Cancelled(OstinatoError):
    """The caller gave up midway; everything is as before the call."""

    code = "cancelled"


class StorageFull(OstinatoError, OSError):
    """The disk refused a write. Nothing of this call was kept; everything acknowledged before is safe."""

    status = 507
    code = "storage_full"


class Corrupt(OstinatoError, ValueError):
    """Stored bytes do not have their promised hash or form."""

    code = "corrupt"


class Conflict(OstinatoError):
    """A compare-and-swap lost against another writer, or another process owns the store."""

    status = 409
    code = "conflict"


class LeaseLost(Conflict):
    """Another process has taken over the role in which a write was made. Nothing of the write was kept, and this process must exit."""

    code = "lease_lost"


class NoSignal(OstinatoError, ValueError):
    """A batch that would teach nothing; the message says why."""

    code = "no_signal"


class BadRoutes(OstinatoError, ValueError):
    """Recorded router choices that cannot be replayed. `reason` is one word for counting: "missing", "truncated", "stale", "zero"..."""

    code = "bad_routes"

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BadWeights(OstinatoError, ValueError):
    """NaN, wrong shape, missing tensor or unsafe file: never loaded, never released."""

    code = "bad_weights"


class BadConfig(OstinatoError, ValueError):
    """A key, value or file of the configuration; the message names the nearest valid name."""

    code = "bad_config"


class SandboxRefused(OstinatoError, OSError):
    """This kernel or container does not let generated code be isolated; the message says which part is missing."""

    code = "sandbox_refused"
