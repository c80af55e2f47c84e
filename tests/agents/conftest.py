import pytest
from tests.agents.running import AGENTS
from tests.agents.solving import broken, installed


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request):
    if not installed(request.param):
        pytest.skip("needs the agents: make agents")
    return request.param


@pytest.fixture
def repo(tmp_path):
    return broken(tmp_path / "repo")


@pytest.fixture
def home(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    return home
