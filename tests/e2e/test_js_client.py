"""The JavaScript client against a running gateway: feedback that counts once, is retried, and is refused by name.

Needs Node 20 or newer, on the PATH or where `make agents` puts it; the tarball's test needs npm, too.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
from itertools import count
from pathlib import Path

import pytest
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.proxy import LosesAnswers

from ostinato.core.records import Signal
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client" / "js" / "index.js"
MODULE = CLIENT.as_uri()
DIALS = CLIENT.with_name("dials.js").as_uri()
AGENTS = Path(os.environ.get("OSTINATO_AGENTS", ROOT / ".agents"))
PATHS = f"{AGENTS / 'node_modules' / '.bin'}:{os.environ['PATH']}"
NODE, NPM = shutil.which("node", path=PATHS), shutil.which("npm", path=PATHS)
PATIENT_MS = (
    1000 * WHOLE_PROGRAM_S
)  # a client gives up after 5 s unless told, a busy machine takes longer for 500 events
KEY, SECRET = "sk-0123456789abcdef", "us-0123456789abcdef"

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node: install it, or make agents")


async def run(script, *, failures=0, setup="", module=MODULE, cwd=None):
    """What a script prints, as JSON, and the signals that are in the log afterwards. `signals` is a client of `module`, seen from `cwd`."""
    log, seconds = MemoryLog(), count(1000)
    config = ServeConfig(api_keys=(KEY,), user_keys=(SECRET,))
    app = create_app(
        engine=FakeEngine(),
        renderer=ByteRenderer(),
        log=log,
        config=config,
        clock=lambda: float(next(seconds)),
        model_name="m",
    )
    async with serving(LosesAnswers(app, failures)) as url:
        given = f"const url = {json.dumps(url)}, key = {json.dumps(KEY)}, secret = {json.dumps(SECRET)}, patient = {PATIENT_MS};"
        words = [
            setup,
            f"const m = await import({json.dumps(module)});",
            given,
            "const signals = new m.Ostinato(url, { apiKey: key, deadlineMs: patient });",
            script,
        ]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            NODE, "--input-type=module", stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd
        )
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            out, err = await process.communicate("\n".join(words).encode())
    assert process.returncode == 0, err.decode()
    return json.loads(out), [row for row in log.rows if isinstance(row, Signal)]


SHOW = "const show = (value) => console.log(JSON.stringify(value));"
NAMED = "(error) => ({ name: error.name, message: error.message, field: error.field })"


async def test_what_is_said_is_durable_when_it_resolves_and_counts_once():
    told, signals = await run(
        SHOW
        + """
        const given = { id: "s1", comment: "fine", occurredAt: new Date(900000), source: "implicit" };
        const first = await signals.feedback("chatcmpl-3f:0", "accepted", true, given);
        show([first, await signals.feedback("chatcmpl-3f:0", "accepted", true, given)]);
        """
    )
    assert told == [{"id": "s1", "status": "early"}, {"id": "s1", "status": "repeated"}]
    (signal,) = signals
    assert (signal.turn, signal.name, signal.value, signal.comment) == ("chatcmpl-3f:0", "accepted", 1.0, "fine")
    assert (signal.source, signal.occurred_at) == ("implicit", 900.0)


async def test_a_failed_attempt_is_repeated_under_the_same_id():
    told, signals = await run(SHOW + 'show(await signals.feedback("chatcmpl-3f", "undone", true));', failures=2)
    assert told["status"] == "repeated"
    assert [signal.turn for signal in signals] == ["chatcmpl-3f:0"]


@pytest.mark.parametrize(
    ("client", "call", "name", "text"),
    [
        ("new m.Ostinato(url, { apiKey: key, deadlineMs: patient })", '"a:0", "accepted"', "Refused", "value"),
        (
            "new m.Ostinato(url, { apiKey: 'sk-another-0123456', deadlineMs: patient })",
            '"a:0", "accepted", true',
            "NotAllowed",
            "key",
        ),
        ("new m.Ostinato('http://127.0.0.1:9', { deadlineMs: 300 })", '"a:0", "accepted", true', "NotTaken", "300 ms"),
    ],
)
async def test_what_cannot_be_taken_is_told_by_name(client, call, name, text):
    told, signals = await run(f"{SHOW} show(await ({client}).feedback({call}).then(() => 'taken', {NAMED}));")
    assert told["name"] == name
    assert text in told["message"]
    assert told.get("field") == ("value" if name == "Refused" else None)
    assert signals == []


async def test_many_are_sent_in_lists_and_in_the_background():
    told, signals = await run(
        SHOW
        + """
        const many = Array.from({ length: 1200 }, (_, i) => ({ target: `c-${i}`, name: "accepted", value: true }));
        const receipts = await signals.feedbackMany(many);
        for (let i = 0; i < 700; i++) signals.enqueue(`d-${i}`, "rejected", true);
        show([receipts.length, new Set(receipts.map((each) => each.id)).size, await signals.close()]);
        """,
        failures=1,
    )
    assert told == [1200, 1200, True]
    assert len(signals) == 1900
    assert len({signal.id for signal in signals}) == 1900


async def test_one_bad_event_does_not_take_its_neighbours_with_it():
    told, signals = await run(
        SHOW
        + """
        const errors = [];
        const quiet = new m.Ostinato(url, { apiKey: key, deadlineMs: patient, onError: (error) => errors.push(error.name) });
        quiet.enqueue("a:0", "accepted", true);
        quiet.enqueue("b:0", "accepted");
        quiet.enqueue("c:0", "accepted", true);
        show([await quiet.flush(patient), errors]);
        """
    )
    assert told == [True, ["Refused", "Refused"]]
    assert sorted(signal.turn for signal in signals) == ["a:0", "c:0"]


async def test_a_handler_that_throws_does_not_end_the_sending():
    told, signals = await run(
        SHOW
        + """
        console.error = () => {};
        const onError = (error) => { throw new Error(`a handler's own: ${error.name}`); };
        const client = new m.Ostinato(url, { apiKey: key, deadlineMs: patient, onError });
        client.enqueue("a:0", "accepted");
        const first = await client.flush(patient);
        client.enqueue("b:0", "accepted", true);
        show([first, await client.close()]);
        """
    )
    assert told == [True, True]
    assert [signal.turn for signal in signals] == ["b:0"]


PAGE = (
    "globalThis.document = {}; const page = new EventTarget(); "
    "globalThis.addEventListener = page.addEventListener.bind(page);"
)


async def test_what_waits_is_sent_when_the_page_goes():
    told, signals = await run(
        SHOW
        + """
        signals.enqueue("a:0", "accepted", true);
        page.dispatchEvent(new Event("pagehide"));
        await signals.flush(patient);
        await new Promise((resume) => setTimeout(resume, 300));
        show("gone");
        """,
        setup=PAGE,
    )
    assert told == "gone"
    assert [signal.turn for signal in signals] == ["a:0"]


async def test_a_page_that_goes_sends_at_once_what_is_json():
    told, _ = await run(
        SHOW
        + """
        const sent = [];
        globalThis.fetch = (_, { keepalive, body }) => {
            sent.push([keepalive, JSON.parse(body).target]);
            return new Promise(() => {});
        };
        signals.enqueue("b:0", "accepted", 3n);
        signals.enqueue("a:0", "accepted", true);
        page.dispatchEvent(new Event("pagehide"));
        show(sent);
        process.exit(0);
        """,
        setup=PAGE,
    )
    assert told == [[True, "a:0"]]


@pytest.mark.parametrize(("document", "kept"), [("{}", 1), ("undefined", 0)], ids=["a page", "an edge worker"])
async def test_a_page_keeps_no_client_that_was_closed_and_a_worker_none(document, kept):
    page = (
        f"globalThis.document = {document}; const page = new Set(); globalThis.addEventListener = (_, heard) => page.add(heard);"
        "globalThis.removeEventListener = (_, heard) => page.delete(heard);"
    )
    script = 'signals.enqueue("a:0", "accepted", true); const open = page.size; show([open, await signals.close(), page.size]);'
    told, signals = await run(SHOW + script, setup=page)
    assert told == [kept, True, 0]
    assert [signal.turn for signal in signals] == ["a:0"]


async def test_a_signed_user_is_who_the_product_says():
    told, _ = await run(
        SHOW
        + """
        const body = JSON.stringify({ model: "m", user: "ann", messages: [{ role: "user", content: "hi" }] });
        const ask = async (signature) => {
            const headers = { authorization: `Bearer ${key}`, "content-type": "application/json", "X-Ostinato-User-Signature": signature };
            return (await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body })).status;
        };
        const now = { now: 1000 };
        show([await ask(await m.signUser(secret, "ann", now)), await ask(await m.signUser(secret, "bob", now))]);
        """
    )
    assert told == [200, 401]


async def test_a_name_goes_into_a_header_as_the_readme_shows():
    named = re.search(r'"x-ostinato-user": (.+?), //', (CLIENT.parent / "README.md").read_text())
    told, _ = await run(
        SHOW
        + f"""
        const users = [];
        for (const user of ["李", "Zoë", "ann"]) {{
            const headers = {{ authorization: `Bearer ${{key}}`, "x-ostinato-user": {named[1]} }};
            users.push((await (await fetch(`${{url}}/v1/consent`, {{ headers }})).json()).user);
        }}
        show(users);
        """
    )
    assert told == ["李", "Zoë", "ann"]


@pytest.mark.parametrize("url", ["127.0.0.1:8321", "ftp://x", "//other.site", ""])
async def test_an_address_that_is_none_is_refused_at_once(url):
    told, _ = await run(f"{SHOW} try {{ new m.Ostinato({json.dumps(url)}); }} catch (error) {{ show(error.message); }}")
    assert told.startswith("baseUrl is ")


def test_the_oldest_node_that_is_promised_has_what_the_client_needs():
    promised = json.loads((CLIENT.parent / "package.json").read_text())["engines"]["node"]
    assert promised == ">=20", "node 18 has no global crypto, of which each event's id is made"
    assert "from Node 20 or newer" in (CLIENT.parent / "README.md").read_text()


@pytest.mark.skipif(NPM is None, reason="needs npm: install it, or make agents")
async def test_the_tarball_installs_into_an_empty_project_and_reaches_a_gateway(tmp_path):
    def npm(*words, cwd):
        quiet = ("--no-audit", "--no-fund", "--offline", f"--cache={tmp_path / 'cache'}")
        given = os.environ | {"PATH": PATHS}
        done = subprocess.run(
            [NPM, *words, *quiet],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=WHOLE_PROGRAM_S,
            check=False,
            env=given,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (packed,) = json.loads(npm("pack", "--json", f"--pack-destination={tmp_path}", cwd=CLIENT.parent))
    files = {each["path"] for each in packed["files"]}
    own = {"dials.d.ts", "dials.js", "index.d.ts", "index.js", "sending.js"}
    assert files == {"LICENSE", "README.md", "package.json", *own}
    project = tmp_path / "project"
    project.mkdir()
    (project / "package.json").write_text('{"private": true, "type": "module"}')
    npm("install", str(tmp_path / packed["filename"]), cwd=project)
    told, signals = await run(
        SHOW
        + 'const dials = Object.keys(await import("ostinato-client/dials"));'
        + 'show([Object.keys(m).sort(), await signals.feedback("chatcmpl-3f", "accepted", true), dials]);',
        module="ostinato-client",
        cwd=project,
    )
    assert told[1]["status"] == "early"
    assert told[2] == ["OstinatoDials"], "where there is no page it is only a class"
    assert [(signal.turn, signal.name) for signal in signals] == [("chatcmpl-3f:0", "accepted")]
    types = (project / "node_modules" / "ostinato-client" / "index.d.ts").read_text()
    assert told[0] == sorted(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE))


async def test_an_event_that_is_no_json_does_not_take_its_neighbours_along():
    told, signals = await run(
        SHOW
        + """
        const told = [];
        const client = new m.Ostinato(url, { apiKey: key, deadlineMs: patient, onError: (error) => told.push(error.message) });
        const ids = ["accepted", "undone"].map((name) => client.enqueue("R", name, true));
        client.enqueue("R", "accepted", 3n);
        show({ done: await client.close(), ids, told });
        """
    )
    assert told["done"]
    assert [signal.id for signal in signals] == told["ids"]
    assert "BigInt" in told["told"][-1]


async def test_nothing_is_tried_any_more_once_a_client_is_closed():
    """Else a program that has closed its client would not end before the round under way does, which takes a minute."""
    told, _ = await run(
        SHOW
        + """
        let tries = 0;
        globalThis.fetch = () => { tries++; return Promise.reject(new Error("down")); };
        const client = new m.Ostinato("http://127.0.0.1:9", { deadlineMs: 300, onError: () => {} });
        client.enqueue("R", "accepted", true);
        while (tries === 0) await new Promise((resolve) => setTimeout(resolve, 10));
        const done = await client.close();
        const before = tries;
        await new Promise((resolve) => setTimeout(resolve, 2500)); // longer than any pause between two tries
        show([done, before > 0, tries - before]);
        process.exit(0);
        """
    )
    assert told == [False, True, 0]


@pytest.mark.parametrize("server", ["hangs", "later", "slow"])
async def test_a_program_ends_by_itself_once_its_client_is_closed(server):
    """Whatever the client waits for when it is closed: an answer, the time that a server names, or many batches."""
    told, _ = await run(
        SHOW
        + f"""
        const server = {json.dumps(server)};
        """
        + """
        const { createServer } = await import("node:http");
        let asked = 0;
        const answer = (request, reply) => {
          asked++;
          if (server === "later") reply.writeHead(503, { "retry-after": "30" }).end();
          if (server !== "slow") return;
          let body = "";
          request.on("data", (data) => (body += data));
          request.on("end", () => setTimeout(() => {
            reply.end(JSON.stringify([JSON.parse(body)].flat().map(({ id }) => ({ id, status: "accepted" }))));
          }, 600));
        };
        const listening = createServer(answer);
        await new Promise((resume) => listening.listen(0, "127.0.0.1", resume));
        listening.unref();
        listening.on("connection", (socket) => socket.unref()); // only the client may hold the program up
        const client = new m.Ostinato(`http://127.0.0.1:${listening.address().port}`, { deadlineMs: 1000, onError: () => {} });
        for (let i = 0; i < 3000; i++) client.enqueue("R", "accepted", true);
        while (asked === 0) await new Promise((resume) => setTimeout(resume, 10));
        await new Promise((resume) => setTimeout(resume, 100)); // until it waits
        const closed = performance.now();
        const done = await client.close();
        const before = asked;
        process.on("exit", () => show([done, asked - before, Math.round(performance.now() - closed)]));
        """
    )
    done, later, took_ms = told
    assert (done, later) == (False, 0)
    assert took_ms < 20_000, "a pause or a round goes on"


async def test_a_deadline_holds_when_the_clock_is_set_back():
    told, _ = await run(
        SHOW
        + """
        let now = Date.now();
        Date.now = () => (now -= 3_600_000);
        const dead = new m.Ostinato("http://127.0.0.1:9", { deadlineMs: 300 });
        const late = new Promise((resolve) => setTimeout(resolve, patient / 2, "late").unref());
        show(await Promise.race([dead.feedback("R", "accepted", true).catch((error) => error.name), late]));
        process.exit(0);
        """
    )
    assert told == "NotTaken"


ELEMENTS = """
class Element extends EventTarget {
  children = []; style = {}; src = "/own";
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  setAttribute() {}
  getAttribute(name) { return this[name]; }
  attachShadow() { return (this.shadow = new Element()); }
  getElementById(id) { return this.children.flatMap((child) => child.id === id ? [child] : [child.getElementById?.(id)]).find(Boolean); }
}
globalThis.HTMLElement = Element;
globalThis.document = { createElement: () => new Element() };
"""


async def test_what_a_person_sets_while_a_call_is_under_way_is_sent_after_it_in_one():
    """A key that is held sets a dial many times, and calls that are under way at once arrive in any order."""
    told, _ = await run(
        SHOW
        + f"const {{ OstinatoDials }} = await import({json.dumps(DIALS)});"
        + """
        const begun = [], waiting = [];
        const dial = { value: 0, low: -1, high: 1, set: null, words: "" };
        const dials = [{ ...dial, name: "brief" }, { ...dial, name: "warm" }];
        globalThis.fetch = async (src, { method, body }) => {
          begun.push(`${src} ${body ?? method}`);
          if (method === "PUT") await new Promise((resume) => waiting.push(resume));
          return Response.json({ dials, most: 2, ratings: 0, last_reset: null, off: null });
        };
        const element = new OstinatoDials();
        await element.connectedCallback();
        const set = (name, value) => {
          const input = element.shadow.getElementById(`dial-${name}`);
          input.value = value;
          input.onchange();
        };
        set("brief", "0.1");
        await new Promise(setImmediate);
        set("brief", "0.2");
        set("warm", "1");
        set("brief", "0.3");
        element.src = "/other";
        set("brief", "0.4");
        await new Promise(setImmediate);
        const first = begun.length;
        const last = element.refresh();
        for (let answered = 0; answered < 3; answered++) {
          while (waiting.length === 0) await new Promise(setImmediate);
          waiting.shift()();
        }
        await last;
        show([first, begun]);
        process.exit(0);
        """,
        setup=ELEMENTS,
    )
    own = ["/own GET", '/own {"brief":0.1}', '/own {"brief":0.3,"warm":1}']
    assert told == [2, [*own, '/other {"brief":0.4}', "/other GET"]]
