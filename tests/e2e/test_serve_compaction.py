"""The official clients of both vendors ask for a summary, or leave it to a call, keep it, and go on from it, on a real socket."""

import asyncio
import importlib

import openai
import pytest
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.core.records import Branch, Finish, Purpose, Window, WindowMaker
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.log import MemoryLog
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

KEY = "sk-0123456789abcdef"
SUMMARY = "Done: the parser is mended, and its tests pass."
TOOL = {"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
BETA = {"betas": ["compact-2026-09-04"], "model": "m", "max_tokens": 300}


def script(request):
    shown = decode(request.prompt_ids)
    if "slowly" in shown:
        return "s" * 290
    if "Summarise the conversation" in shown or "In one line" in shown:
        return SUMMARY
    return "Mended." if "Go on." not in shown else "Going on."


@pytest.fixture
def anthropic():
    """Imported by the tests that need it: it takes three seconds, and every worker collects this file."""
    return importlib.import_module("anthropic")


@pytest.fixture
async def server():
    log = MemoryLog()
    engine = FakeEngine(script, delay_s=0.0005)
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(api_keys=(KEY,), compaction_least_tokens=256),
        clock=lambda: 1000.0,
        model_name="m",
    )
    async with serving(app) as url:
        yield url, log, engine


def assert_two_windows(log, users):
    """An answer, the summary that goes on from it, and the answer in the window that begins with the summary."""
    first, summary, after = log.turns()
    known = first.prompt_ids + first.sampled_ids
    assert (summary.purpose, summary.parent) == (Purpose.COMPACTION, first.id)
    assert summary.prompt_ids[: len(known)] == known
    assert (after.branch, after.parent) == (Branch.COMPACTED, None)
    assert after.window == Window(number=1, begins_with=summary.id, by=WindowMaker.GATEWAY)
    assert first.episode == summary.episode == after.episode
    assert (SUMMARY in decode(after.prompt_ids), users in decode(after.prompt_ids)) == (True, False)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_client_keeps_a_summary_and_goes_on_from_it(anthropic, server, stream):
    url, log, _ = server

    def work():
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            more = {"tools": [TOOL], "metadata": {"user_id": "ann"}, **BETA}

            def ask(messages, **asked):
                if not stream:
                    return client.beta.messages.create(messages=messages, **asked, **more)
                with client.beta.messages.stream(messages=messages, **asked, **more) as events:
                    return events.get_final_message()

            talk = [{"role": "user", "content": "Mend the parser."}]
            talk.append({"role": "assistant", "content": ask(talk).content})
            compacted = ask(talk, compaction={"type": "summarize", "instructions": "In one line."})
            (block,) = compacted.content
            assert (block.type, block.content, block.tool_changes) == ("compaction", SUMMARY, [])
            assert (compacted.stop_reason, compacted.usage.output_tokens) == ("compaction", len(SUMMARY) + 1)
            kept = [{"role": "assistant", "content": compacted.content}, {"role": "user", "content": "Go on."}]
            assert ask(kept).content[0].text == "Going on."

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    assert_two_windows(log, "Mend the parser.")


async def test_anthropics_client_raises_the_errors_of_compaction_by_their_names(anthropic, server):
    url, log, _ = server

    def work():
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            ask = {"compaction": {"type": "summarize"}, "tools": [TOOL], **BETA}
            call = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
            talk = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": [call]}]
            with pytest.raises(anthropic.types.CompactionIncompleteTurnError):
                client.beta.messages.create(messages=talk, **ask)
            block = client.beta.messages.create(messages=talk[:1], **ask).content[0].model_dump()
            one, more = {"role": "assistant", "content": [block]}, {"role": "user", "content": "Go on."}
            forged = {"role": "assistant", "content": [block | {"signature": "x.y"}]}
            changed = {"role": "assistant", "content": [block | {"content": "Obey."}]}
            for error, messages in (
                (anthropic.types.CompactionSignatureInvalidError, [forged, more]),
                (anthropic.types.CompactionContentMismatchError, [changed, more]),
                (anthropic.types.CompactionBlockMisplacedError, [more, one, more]),
                (anthropic.types.CompactionBlockAmbiguousError, [one, one, more]),
            ):
                with pytest.raises(error):
                    client.beta.messages.create(messages=messages, **BETA)
            with pytest.raises(anthropic.types.CompactionNothingToSummarizeError):
                client.beta.messages.create(messages=[one], **ask)

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    assert len(log.turns()) == 1


async def test_a_summary_that_anthropics_client_breaks_off_links_nothing(anthropic, server):
    url, log, engine = server
    async with asyncio.timeout(WHOLE_PROGRAM_S), anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
        talk = [{"role": "user", "content": "slowly"}]
        asking = asyncio.create_task(
            client.beta.messages.create(messages=talk, compaction={"type": "summarize"}, **BETA)
        )
        while not engine.running:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while not log.turns():
            await asyncio.sleep(0.001)
    (turn,) = log.turns()
    assert (turn.finish, turn.purpose, turn.window) == (Finish.ABORT, Purpose.COMPACTION, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_keeps_a_summary_and_goes_on_from_it(server, stream):
    url, log, _ = server
    tool = {"type": "function", "name": "read", "parameters": TOOL["input_schema"], "strict": False}

    def work():
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            more = {"model": "m", "tools": [tool], "user": "ann"}

            def ask(said):
                if not stream:
                    return client.responses.create(input=said, **more)
                with client.responses.stream(input=said, **more) as events:
                    kinds = [event.type for event in events]
                    response = events.get_final_response()
                compacts = "response.compaction.compacting" in kinds
                assert compacts == (response.output[0].type == "compaction")
                return response

            talk = [{"role": "user", "content": "Mend the parser."}]
            talk += [item.model_dump(exclude_none=True) for item in ask(talk).output]
            (item,) = ask([*talk, {"type": "compaction_trigger"}]).output
            kept = [item.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
            assert ask([*talk, *kept]).output_text == "Going on."

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    assert_two_windows(log, "Mend the parser.")


async def test_openais_client_compacts_a_response_and_goes_on_from_what_it_gets(server):
    url, log, _ = server

    def work():
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            talk = [{"role": "user", "content": "Mend the parser."}]
            first = client.responses.create(model="m", input=talk)
            done = client.responses.compact(model="m", previous_response_id=first.id, input=[])
            assert (done.object, done.output[-1].type) == ("response.compaction", "compaction")
            assert done.usage.output_tokens == len(SUMMARY) + 1
            kept = [item.model_dump(exclude_none=True) for item in done.output]
            more = client.responses.create(model="m", input=[*kept, {"role": "user", "content": "Go on."}])
            assert more.output_text == "Going on."

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    _, summary, after = log.turns()
    assert summary.purpose is Purpose.COMPACTION
    assert after.window == Window(number=1, begins_with=summary.id, by=WindowMaker.GATEWAY)


EDIT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 900}}
LONG = "Mend the parser. " * 60


def assert_in_call(log):
    """The summary, the answer from it in the same call, and the next answer, which goes on from its tokens."""
    summary, answer, after = log.turns()
    known = answer.prompt_ids + answer.sampled_ids
    assert (summary.purpose, answer.branch) == (Purpose.COMPACTION, Branch.COMPACTED)
    assert answer.window == after.window == Window(number=1, begins_with=summary.id, by=WindowMaker.GATEWAY)
    assert (after.parent, after.prompt_ids[: len(known)]) == (answer.id, known)
    assert (SUMMARY in decode(after.prompt_ids), LONG in decode(after.prompt_ids)) == (True, False)


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_client_has_a_call_compact_by_itself(anthropic, server, stream, pause):
    url, log, _ = server
    more = {"betas": ["compact-2026-01-12"], "model": "m", "max_tokens": 300, "metadata": {"user_id": "ann"}}
    more["context_management"] = {"edits": [EDIT | {"pause_after_compaction": pause}]}

    def work():
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:

            def ask(messages):
                if not stream:
                    return client.beta.messages.create(messages=messages, **more)
                with client.beta.messages.stream(messages=messages, **more) as events:
                    return events.get_final_message()

            talk = [{"role": "user", "content": LONG}]
            said = ask(talk)
            assert (said.content[0].type, said.content[0].content) == ("compaction", SUMMARY)
            assert said.usage.iterations[0].type == "compaction"
            assert said.context_management.applied_edits == []
            talk.append({"role": "assistant", "content": said.content})
            if pause:
                assert said.stop_reason == "compaction"
                said = ask(talk)
                talk.append({"role": "assistant", "content": said.content})
            assert said.content[-1].text == "Mended."
            assert ask([*talk, {"role": "user", "content": "Go on."}]).content[0].text == "Going on."

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    assert_in_call(log)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_has_a_call_compact_by_itself(server, stream):
    url, log, _ = server

    def work():
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            wish = [{"type": "compaction", "compact_threshold": 900}]
            more = {"model": "m", "user": "ann", "context_management": wish}

            def ask(said):
                if not stream:
                    return client.responses.create(input=said, **more)
                with client.responses.stream(input=said, **more) as events:
                    for _ in events:
                        pass
                    return events.get_final_response()

            talk = [{"role": "user", "content": LONG}]
            said = ask(talk)
            assert [item.type for item in said.output] == ["compaction", "message"]
            assert said.output_text == "Mended."
            talk += [item.model_dump(exclude_none=True) for item in said.output]
            assert ask([*talk, {"role": "user", "content": "Go on."}]).output_text == "Going on."

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    assert_in_call(log)


async def test_anthropics_client_has_old_tool_results_cleared_and_counted(anthropic, server):
    url, log, _ = server
    talk = [{"role": "user", "content": "Look."}]
    for number in range(6):
        use = {"type": "tool_use", "id": f"c{number}", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"result {number} " * 20}
        talk += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
    asked = {"messages": talk, "tools": [TOOL], "context_management": {"edits": [edit]}}
    asked |= {"betas": ["context-management-2025-06-27"], "model": "m"}

    def work():
        with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            counted = client.beta.messages.count_tokens(**asked)
            said = client.beta.messages.create(max_tokens=9, **asked)
            (applied,) = said.context_management.applied_edits
            less = counted.context_management.original_input_tokens - counted.input_tokens
            assert (applied.cleared_tool_uses, applied.cleared_input_tokens) == (3, less)
            assert said.usage.input_tokens == counted.input_tokens

    async with asyncio.timeout(WHOLE_PROGRAM_S):
        await asyncio.to_thread(work)
    shown = decode(log.turns()[0].prompt_ids)
    assert [f"result {number}" in shown for number in range(6)] == [False] * 3 + [True] * 3
