"""Next messages with what they are: written for these tests in the tone of people at work with an assistant, not collected from anybody.

Two halves, written at the same time: the rules were made with the first in sight; the second was only scored. Each line is the kind,
and the message; the request before it stands behind " << " where it matters.
"""

from ostinato.serve.feedback.next_message import NextMessage

_SEEN = """
retry: try again
retry: Please try that again.
retry: retry
retry: do it again, please
retry: regenerate
retry: one more try
retry: Fix the login test so that it passes << fix the login test so that it passes
retry: write a haiku about the sea, please << write a haiku about the sea
complaint: that doesn't work
complaint: It still fails with the same error.
complaint: this is wrong
complaint: The tests are still red
complaint: you broke the build
complaint: That's not what I asked for.
complaint: I said no new dependencies!
complaint: why did you delete the comments?
complaint: wrong, the port is 8080
complaint: still not working
complaint: You ignored the second half of my question
complaint: your fix made it worse, it crashes on startup now
complaint: useless
complaint: It doesn't compile.
complaint: the output is incorrect
complaint: I already told you that the API is v2
complaint: this is broken
complaint: stop adding print statements
complaint: you forgot the return type
correction: No, use pathlib instead.
correction: actually I meant the staging config
correction: revert that
correction: undo your last change
correction: don't use regular expressions here
correction: I meant the second one
correction: instead of a class make it a function
correction: put it back the way it was
correction: wait, the file is in src/
correction: it should return a list, not a tuple
correction: please don't touch the tests
correction: nope, the other directory
correction: Use the async client instead
praise: thanks!
praise: Perfect, thank you
praise: great
praise: that works
praise: lgtm
praise: Nice one.
praise: awesome, exactly what I needed
praise: It works now, thanks
new topic: new question: how do I sort a dict by value?
new topic: Ok next task: write the changelog
new topic: moving on, let's look at the deployment
new topic: different topic - what is a monad?
new topic: unrelated, but which Python do we need?
goes on: now add a test for it
goes on: and what about windows?
goes on: can you explain the second step?
goes on: yes
goes on: continue
goes on: commit it
goes on: Add a docstring too.
goes on: what does this function return?
goes on: run the tests
goes on: ok
goes on: 2
goes on: how long will it take?
goes on: Great. Now do the same for the other three files in that folder, please
goes on: option b sounds right
goes on: the error is on line 40
goes on: Here is the traceback you asked for: KeyError 'id'
goes on: is there a way without a loop?
goes on: make it shorter
goes on: translate it to German
goes on: Thanks, but could you also add types?
goes on: My colleague says that the tests are flaky. Can you look at the CI config?
goes on: no problem, go ahead
"""
_HELD = """
retry: Again please
retry: can you try again?
retry: redo it
retry: run it again
retry: hmm, try once more
retry: Summarise the attached report in five bullet points << summarise the attached report in five bullet points
retry: rename the helper to load_config everywhere << please rename the helper to load_config everywhere
retry: generate it again
complaint: Doesn't work.
complaint: that did not fix it
complaint: I get the same error again
complaint: this makes no sense
complaint: still broken on my machine
complaint: You didn't run the tests
complaint: that's wrong, Paris is the capital
complaint: the code you wrote crashes with a TypeError
complaint: not what I wanted
complaint: You removed my comments again!
complaint: why are you editing the lock file?
complaint: it's still missing the header
complaint: that answer is just wrong
complaint: wtf
complaint: I asked for JSON
complaint: this function does not exist
complaint: You keep making the same mistake
complaint: Nothing changed
complaint: no good, the layout is off
complaint: the fix breaks the import
complaint: it isn't working at all
correction: no, in the other repository
correction: Actually, make that three retries
correction: Not that file, the one in lib/
correction: roll back your changes
correction: change it back please
correction: I wanted tabs, not spaces
correction: never mock the database in these tests
correction: use the v2 endpoint instead
correction: sorry, I meant Tuesday
correction: rather write it in Go
correction: it must be an int not a string
correction: hmm no, keep the old signature
correction: Wait. The customer is Acme, not Apex.
correction: that variable should be called total, not sum
correction: do not change the public API
praise: thank you so much!
praise: thx
praise: perfect
praise: wow great, it did it
praise: Looks good to me
praise: excellent work
praise: that fixed it
praise: yes exactly
new topic: Now a different question: which database should we use?
new topic: next issue: the footer overlaps on mobile
new topic: let's talk about the roadmap
new topic: forget that. What's the weather like in Oslo in May?
new topic: one unrelated thing, how do I mute a Slack channel?
goes on: please add error handling
goes on: and the tests?
goes on: ok do it
goes on: why is that?
goes on: show me the diff
goes on: what would happen if the file does not exist?
goes on: go on
goes on: Also support YAML.
goes on: I ran it and got 42
goes on: sounds good, implement it
goes on: Could you write it as a table?
goes on: use four spaces
goes on: y
goes on: the second one
goes on: which of these is faster?
goes on: make the title bigger
goes on: Nice, but can the button be on the left?
goes on: push it
goes on: what's the same in French?
goes on: The user isn't logged in at that point, so handle that as well
goes on: is it thread safe?
goes on: here are the logs
"""


def _read(lines):
    """(kind, message, the request before it)."""
    found = []
    for line in lines.strip().splitlines():
        kind, _, rest = line.partition(": ")
        message, _, before = rest.partition(" << ")
        found.append((NextMessage(kind), message, before or "Please help me with this piece of work."))
    return found


SEEN, HELD = _read(_SEEN), _read(_HELD)
