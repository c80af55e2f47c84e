"""Requests for a summary as coding agents send them, cut to the lines by which they can be told and some between.

Read in the agents' packages, in the versions of `make agents`, and those of Cline 3.0.65 and Continue 1.5.47 from npm.
"""

from ostinato.core.conversation import Conversation, Message, Role, Tool, ToolCall

CLAUDE = """CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.

- Do NOT use Read, Bash, Grep, Glob, Edit, Write, or ANY other tool.
- Your entire response must be plain text: an <analysis> block followed by a <summary> block.

Your task is to create a detailed summary of the conversation so far, paying close attention to the user's explicit requests and your \
previous actions.

Your summary should include the following sections:

1. Primary Request and Intent: Capture all of the user's explicit requests and intents in detail

REMINDER: Do NOT call any tools. Respond with plain text only \u2014 an <analysis> block followed by a <summary> block. Tool calls will be \
rejected and you will fail the task."""
CLAUDE_PART = """Your task is to create a detailed summary of this conversation. This summary will be placed at the start of a continuing \
session; newer messages that build on this context will follow after your summary (you do not see them here).

Your summary should include the following sections:

1. Primary Request and Intent: Capture the user's explicit requests and intents in detail"""
CODEX = """You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will resume the task.

Include:
- Current progress and key decisions made

Be concise, structured, and focused on helping the next LLM seamlessly continue the work.
"""
OPENCODE_SYSTEM = """You are a context summarization agent. You are given a conversation between a user and an agent. Your goal is to \
produce a structured summary matching the format specified so another coding agent can continue the work.

Do not continue the conversation. Do not respond to any questions in the conversation."""
OPENCODE = """Here is the conversation so far:

<conversation>
User: Mend it.
</conversation>

Create a new anchored summary from the conversation history in the <conversation> tags above so another coding agent can continue the work.

Output exactly the Markdown structure shown inside <template> and keep the section order unchanged. Do not include the <template> tags in \
your response."""
QWEN = """You are the component that summarizes a conversation when its context window is about to overflow. The summary you produce will \
become the agent's ONLY memory of everything that happened before this point.

Then produce the final summary as the EXACT XML structure below. Be dense. Omit conversational filler.

<state_snapshot>
</state_snapshot>"""
QWEN_DIRECTIVE = "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML."
# with the tools
QWEN_SHARED = f"{QWEN}\n\nDo not call tools; tool execution is disabled for this request. {QWEN_DIRECTIVE}"
AIDER = """*Briefly* summarize this partial conversation about programming.
Include less detail about older parts and more detail about the most recent messages.
Start a new paragraph every time the topic changes!"""
CLINE = "Summarize the provided coding session into a concise continuation note with detailed next steps."
CONTINUE = (
    "Please provide a concise summary of our conversation so far, capturing the key context, decisions made, and current state. "
    "Format this as a single comprehensive message that preserves all important information needed to continue our work."
)

TOOLS = (Tool(name="read"), Tool(name="write"))
_CALL = ToolCall(id="c1", name="read", arguments='{"path": "calc.py"}')
WORK = (
    Message(role=Role.USER, text="Mend calc.py."),
    Message(role=Role.ASSISTANT, calls=(_CALL,)),
    Message(role=Role.TOOL, text="def add(a, b): ...", answers="c1"),
    Message(role=Role.ASSISTANT, text="It subtracts."),
)


def asked(request, *, system="You are an agent.", work=WORK, tools=()):
    """A conversation that ends with this message of the user's."""
    first = (Message(role=Role.SYSTEM, text=system),) if system else ()
    return Conversation(messages=(*first, *work, Message(role=Role.USER, text=request)), tools=tools)


REQUESTS = {
    "claude-code": asked(CLAUDE, tools=TOOLS),
    "claude-code, behind a tool's result": asked(CLAUDE, work=WORK[:3], tools=TOOLS),
    "claude-code, behind the user's own words": asked(f"And the lexer, please.\n{CLAUDE}", tools=TOOLS),
    "claude-code, with instructions and a paragraph behind it": asked(
        CLAUDE.replace("\n\nREMINDER", "\n\nAdditional Instructions:\nKeep the names.\n\nREMINDER")
        + "\n\n"
        + "Some results. " * 60
    ),
    "claude-code, of a part": asked(CLAUDE_PART, tools=TOOLS),
    "codex": asked(CODEX),
    "opencode": asked(OPENCODE, system=OPENCODE_SYSTEM, work=()),
    "opencode, after an overflow": asked(OPENCODE, system="", work=()),
    "qwen-code": asked(QWEN_DIRECTIVE, system=QWEN),
    "qwen-code, with the conversation's prefix": asked(QWEN_SHARED, tools=TOOLS),
    "aider": asked("# USER\nMend it.\n# ASSISTANT\nDone.\n", system=AIDER, work=()),
    "cline": asked("The session: ...", system=CLINE, work=()),
    "continue": asked(CONTINUE),
}

NO_REQUESTS = {
    "a file that quotes the prompt": Conversation(
        messages=(*WORK[:2], Message(role=Role.TOOL, text=CLAUDE, answers="c1")), tools=TOOLS
    ),
    "a question about the prompt": asked(
        "Why does it say 'CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.'?", tools=TOOLS
    ),
    "the prompt pasted, and a question behind it": asked(
        CLAUDE + "\n\n" + "Shorten this prompt of mine, and explain. " * 80
    ),
    "another's prompt quoted": asked(f"Review my prompt:\n{CODEX}", tools=TOOLS),
    "a person who wants a summary": asked("Please summarise the conversation so far.", tools=TOOLS),
    "a system message that speaks of it later": asked("Go on.", system="You are an agent. " * 120 + AIDER),
    "a title": asked("Mend calc.py.", system="You are a title generator. You output ONLY a thread title.", work=()),
    "a summary that was answered": Conversation(
        messages=(*WORK, Message(role=Role.USER, text=CODEX), Message(role=Role.ASSISTANT, text="Done so far.")),
        continued=True,
    ),
    "an empty conversation": Conversation(messages=()),
    "a system message alone": Conversation(messages=(Message(role=Role.SYSTEM, text=AIDER),)),
}
