"""A script, run by pip's interpreter, that finds and downloads a project's newest source distribution without building it.

`pip download` of a source distribution would run its build backend, which is third-party code. So this gets the link from pip's finder and
the bytes from pip's session, which honour pip's configured index, credentials, proxies and certificates. It writes one line of JSON to
stdout, and the bytes to the named file.
"""

from __future__ import annotations

import json
import sys

MAX_BYTES = 64 << 20


def main() -> None:
    """Run ``pip_link.py REQUIREMENT OUT``."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.requirements import Requirement

    requirement = Requirement(sys.argv[1])
    command = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "--quiet", "--quiet", str(requirement)])
    with command.main_context():
        session = command.get_default_session(options)  # pyright: ignore[reportAttributeAccessIssue]
        finder = command._build_package_finder(options=options, session=session)  # pyright: ignore[reportAttributeAccessIssue]
        best = finder.find_best_candidate(requirement.name, requirement.specifier).best_candidate
        if best is None:
            sys.stdout.write(json.dumps({"error": "no source distribution that this Python could use"}))
            return
        response = session.get(best.link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        response.raise_for_status()
        size = 0
        with open(sys.argv[2], "wb") as file:
            for part in response.iter_content(65536):
                size += file.write(part)
                if size > MAX_BYTES:
                    sys.stdout.write(json.dumps({"error": f"more than {MAX_BYTES >> 20} MiB"}))
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
