"""A script for pip's own interpreter: finds and downloads a project's newest source distribution. It builds nothing.

`pip download` of a source distribution runs its build backend, which is foreign code. So this gets the link from pip's finder and the
bytes from pip's session, which use the index, the credentials, the proxies and the certificates that pip is configured with.
Writes one line of JSON to stdout, and the bytes to the named file.
"""

from __future__ import annotations

import json
import sys

MOST_BYTES = 64 << 20


def main() -> None:
    """``pip_link.py REQUIREMENT OUT``"""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(sys.argv[1])
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--quiet", "--quiet", str(wanted)])
    with command.main_context():
        session = command.get_default_session(options)  # pyright: ignore[reportAttributeAccessIssue]
        finder = command._build_package_finder(options=options, session=session)  # pyright: ignore[reportAttributeAccessIssue]
        best = finder.find_best_candidate(wanted.name, wanted.specifier).best_candidate
        if best is None:
            sys.stdout.write(json.dumps({"error": "no source distribution that this Python could use"}))
            return
        response = session.get(best.link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        response.raise_for_status()
        size = 0
        with open(sys.argv[2], "wb") as file:
            for part in response.iter_content(65536):
                size += file.write(part)
                if size > MOST_BYTES:
                    sys.stdout.write(json.dumps({"error": f"more than {MOST_BYTES >> 20} MiB"}))
                    return
    sys.stdout.write(
        json.dumps(
            {
                "version": str(best.version),
                "file": best.link.filename,
                "algorithm": best.link.hash_name,
                "hash": best.link.hash,
            }
        )
    )


if __name__ == "__main__":
    main()
