"""The Dockerfile as the image's examination reads it."""

from pathlib import Path

import pytest
from tests.examinations.image.steps import filled, instructions, stages

DOCKERFILE = (Path(__file__).parents[3] / "deploy" / "Dockerfile").read_text()
SMALL = """\
ARG OF=3.11
FROM python:${OF}-slim AS built
# a comment
ARG INDEX=https://a.example
WORKDIR /build
RUN pip install \\
    --index-url "${INDEX}" torch \\
    && true

FROM python:${OF}
ENV PATH=/opt/bin:$PATH HOME="/srv/a b"
USER 10001:10001
COPY --from=built --chmod=0755 /opt/x ./bin/
HEALTHCHECK --interval=15s CMD ["python", "-c", "1"]
CMD ["up"]
"""


def test_every_step_of_the_projects_own_is_understood():
    built, image = stages(DOCKERFILE, {}, {"PATH": "/usr/bin"})
    assert built.base == image.base
    assert [step.kind for step in built.steps if step.kind == "RUN"] == ["RUN"] * 4
    assert image.user != "0:0"
    assert image.command[0] == "ostinato"
    assert image.health[0] == "python"
    assert image.environment["PATH"].endswith(":/usr/bin")


def test_arguments_variables_and_users_are_those_of_the_line():
    built, image = stages(SMALL, {"INDEX": "https://b.example"}, {"PATH": "/usr/bin"})
    assert (built.base, built.name, image.base, image.name) == ("python:3.11-slim", "built", "python:3.11", "")
    run = built.steps[-1]
    assert run.text == 'pip install --index-url "${INDEX}" torch && true'
    assert (run.directory, run.user, run.environment["INDEX"]) == ("/build", "0:0", "https://b.example")
    (copy,) = image.steps
    assert copy.words() == ["--from=built", "--chmod=0755", "/opt/x", "./bin/"]
    assert copy.user == "10001:10001"
    assert image.environment == {"PATH": "/opt/bin:/usr/bin", "HOME": "/srv/a b"}
    assert (image.command, image.health) == (["up"], ["python", "-c", "1"])


def test_what_is_not_known_is_refused_and_not_left_out():
    with pytest.raises(ValueError, match="ONBUILD"):
        instructions("FROM a\nONBUILD RUN b")
    assert filled("$A-${B}-$C", {"A": "1", "B": "2"}) == "1-2-"
