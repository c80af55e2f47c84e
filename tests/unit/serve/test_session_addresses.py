"""A client that can be given nothing but an address names its session in it."""

import pytest
from gateway_world import ADMIN, ASK, world

AGAIN = {"role": "user", "content": "and then?"}


async def ask(w, session, *, messages=None, **headers):
    body = {**ASK, "messages": messages or ASK["messages"]}
    status, _, answer = await w.post(f"/s/{session}/v1/chat/completions", body, headers=headers)
    assert status == 200, answer
    return answer


async def test_calls_of_one_address_are_one_episode_whoever_asks():
    async with world() as w:
        first = await ask(w, "run-7")
        more = [*ASK["messages"], {"role": "assistant", "content": "hello"}, AGAIN]
        follow, stranger = await ask(w, "run-7", messages=more), await ask(w, "run-8", messages=more)
        turns = {turn.id: turn for turn in w.log.turns()}
        one, two, other = (turns[each["ostinato"]["turns"][0]] for each in (first, follow, stranger))
        assert (one.episode, two.episode, two.parent) == ("run-7", "run-7", one.id)
        assert (other.episode, other.parent) == ("run-8", None), "another session's turn is not continued"


async def test_a_header_says_more_than_the_address():
    async with world() as w:
        answer = await ask(w, "run-7", **{"X-Ostinato-Episode": "mine"})
        assert answer["ostinato"]["episode"] == "mine"


async def test_every_path_below_v1_can_be_reached_so():
    async with world() as w:
        status, text = await w.get("/s/run%207/v1/models")
        assert (status, '"id":"m"' in text) == (200, True)
        assert (await w.get("/s/run-7/v1/models/m"))[0] == 200
        turn = (await ask(w, "naïve 陳"))["ostinato"]["turns"][0]
        event = {"id": "s1", "target": turn, "name": "accepted", "value": True, "source": "human"}
        assert (await w.post("/s/run-7/v1/feedback", event))[0] == 202
        for path in ("/s/run-7/health", "/s/run-7", "/s/run-7/", "/s/v1/models", "/s/run-7/s/run-8/v1/models"):
            assert (await w.get(path))[0] == 404, path


@pytest.mark.parametrize("name", ["", "x" * 513, "a%0Ab", "a%E2%80%AEb"])
async def test_a_name_that_is_none_is_refused(name):
    async with world() as w:
        status, _, body = await w.post(f"/s/{name}/v1/chat/completions", ASK)
        assert (status, "session" in body["error"]["message"]) == (400, True)


async def test_an_answer_names_itself_as_agents_and_clients_look_for_it():
    async with world() as w:
        _, headers, body = await w.chat()
        assert headers["request-id"] == headers["x-request-id"] == body["id"]


async def test_the_operator_may_decide_how_tokens_are_drawn():
    rules = {"acme": {"temperature": 0.7}, "*": {"temperature": 1.0, "top_p": 1.0}}
    keys = ("acme:sk-acme-0123456789", "bolt:sk-bolt-0123456789")
    async with world(sampling=rules, api_keys=keys, admin_keys=(ADMIN,)) as w:

        async def sampled(key, headers=None, **fields):
            status, said, answer = await w.chat(headers=w.key(key, **(headers or {})), **fields)
            assert status == 200, answer
            turn = next(turn for turn in w.log.turns() if turn.id == answer["ostinato"]["turns"][0])
            return turn.sampling.temperature, turn.sampling.top_p, said.get("x-ostinato-sampling")

        assert await sampled("sk-acme-0123456789", temperature=0.0, top_p=0.5) == (0.7, 0.5, "temperature=0.7")
        assert await sampled("sk-bolt-0123456789", temperature=0.0, top_p=0.5) == (1.0, 1.0, "temperature=1, top_p=1")
        assert await sampled("sk-bolt-0123456789") == (1.0, 1.0, None), "nothing was changed"
        measuring = {"x-ostinato-key": ADMIN, "x-ostinato-slot": "live"}
        assert await sampled("sk-acme-0123456789", measuring, temperature=0.0) == (0.0, 1.0, None)


@pytest.mark.parametrize(
    ("path", "episode"),
    [
        ("//v1/chat/completions", None),
        ("/v1//chat/completions", None),
        ("/v1/chat/completions/", None),
        ("//v1//chat///completions//", None),
        ("/s/run-7//v1/chat/completions", "run-7"),
        ("//s/run-7/v1//chat/completions/", "run-7"),
    ],
)
async def test_doubled_and_trailing_slashes_change_nothing(path, episode):
    async with world() as w:
        status, _, body = await w.post(f"http://127.0.0.1{path}", ASK)
        assert status == 200, body
        assert episode in (None, body["ostinato"]["episode"])
        assert (await w.http.get("http://127.0.0.1//v1/models/m/")).json()["id"] == "m"


@pytest.mark.parametrize(
    "path",
    ["//evil.example/v1/models", "//evil.example", "///health", "//metrics", "/v1", "//v1//", "/\\evil.example"],
)
async def test_slashes_lead_to_no_other_place_and_no_other_site(path):
    async with world(api_keys=("sk-0123456789abcdef",), admin_key=ADMIN) as w:
        reply = await w.http.get(f"http://127.0.0.1{path}")
        assert (reply.status_code, "location" in reply.headers) == (404, False), path


async def test_slashes_do_not_pass_by_the_keys():
    async with world(api_keys=("sk-0123456789abcdef",), admin_key=ADMIN) as w:
        for path in ("//v1/models", "/v1/models/", "//v1//models/m/", "//s/x//v1/models"):
            assert (await w.http.get(f"http://127.0.0.1{path}")).status_code == 401, path
        assert (await w.post("http://127.0.0.1//v1//feedback/", {}))[0] == 401
