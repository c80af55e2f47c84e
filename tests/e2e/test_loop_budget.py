"""No request keeps the gateway's event loop for long, whatever a key's holder sends: all streams share that loop.

The budget of a step is 20 ms on an idle core of the machines in docs/measurements/serving.md. Here a step may take five times that,
for slower ones; without the bounds and the threads that keep it, the worst of these bodies took 500 ms.
"""

import httpx2
import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.loop_steps import loop_steps
from tests.fakes.worst_bodies import bodies

from ostinato.model.renderer import HFRenderer
from ostinato.serve.calls.caller import ROUTES
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.serving import serving
from ostinato.testing.tiny import tiny_model

MOST_S = 0.1
CONTEXT = 8_192


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return HFRenderer(tiny_model(tmp_path_factory.mktemp("model"), context=CONTEXT))


async def test_the_worst_bodies_keep_the_loop_for_no_long_step(renderer):
    app = create_app(
        engine=FakeEngine(lambda request: "hello", context=CONTEXT),
        renderer=renderer,
        log=MemoryLog(),
        config=ServeConfig(),
        clock=lambda: 1_000.0,
        model_name="m",
    )
    slow, routes = {}, {route.path for route in ROUTES}
    async with serving(app) as url, httpx2.AsyncClient(base_url=url, timeout=PATIENT_S) as http:
        for path, name, body in bodies():
            asked = http.build_request("POST", path, json=body)
            for _ in range(2):  # the second time if the first was slow: a collection of garbage may fall into any step
                with loop_steps() as steps:
                    answer = await http.send(asked)
                if (longest := max(step.seconds for step in steps)) <= MOST_S:
                    break
            assert answer.status_code < 500, (path, name, answer.text[:200])
            routes.discard(path)
            if longest > MOST_S:
                slow[f"{path} {name}"] = longest
    assert not slow
    assert not routes, "each route that samples has its worst bodies"
