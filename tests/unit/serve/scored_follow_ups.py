"""Next messages that were written after the rules were done, and only scored, once: for this test, not collected from anybody.

Whoever changes a rule because of one of them writes new ones.
"""

from tests.unit.serve.further_follow_ups import read

_LINES = r"""
complaint: The page doesn't render at all
complaint: it is not saving the file
complaint: it's broken, clicking submit does nothing
complaint: this doesnt compile, missing semicolon in main.c
complaint: You didn't add the import
complaint: you forgot about the empty case
complaint: the test still fails
complaint: still getting a 404
complaint: That's wrong
complaint: wrong
complaint: Why did you change the indentation of the whole file?
complaint: the function you wrote returns None every time
complaint: that isn't what I asked
complaint: your last change broke the import
complaint: I told you to keep the comments
complaint: Same error.
complaint: all tests fail now
complaint: no it doesn't
complaint: The migration failed
complaint: this is a mess
complaint: I don't see any change
complaint: it's too slow, takes 30 seconds now
complaint: you put it in the wrong folder
complaint: That package doesn't exist on npm
complaint: it only works for the first row
complaint: Please read my question again. You answered something else.
complaint: the numbers don't add up
complaint: that's a syntax error
correction: no, the staging one
correction: No, don't add a new file. Edit utils.py.
correction: use poetry instead
correction: I meant ascending
correction: revert this please
correction: undo
correction: undo the last change
correction: actually, keep the old name
correction: actually make it async
correction: Do not change the tests
correction: don't use any
correction: should be lowercase, not uppercase
correction: it's spelled Muller, with ue
correction: wait, not that one
correction: not that function, the one above it
correction: put it in a separate file instead
correction: instead of a loop use map
correction: change it back
correction: shorter please
correction: nope, the other button
correction: Sorry, I meant the second paragraph
correction: without jquery please
retry: try again please
retry: ok try again
retry: regenerate
retry: can you try that again
retry: do it again
retry: Again.
retry: please write a poem about autumn << write a poem about autumn
retry: fix the failing test in test_parser.py << Please fix the failing test in test_parser.py
praise: thanks
praise: Great, thanks!
praise: perfect!
praise: it works now
praise: That worked, thank you so much
praise: nice work
praise: Awesome!!
praise: looks good
new topic: next question: what is a closure
new topic: new task. write a script that renames my photos
new topic: Let's move on to the frontend
new topic: different question: how do I reset my git config
new topic: ok now something else, can you plan a workout for me
goes on: now write the tests
goes on: add type hints
goes on: can you also update the readme?
goes on: what does line 12 do?
goes on: why is this needed?
goes on: how do I run it?
goes on: yes please
goes on: ok
goes on: continue
goes on: looks good, commit and push
goes on: great, now the same for orders
goes on: explain it like I'm five
goes on: can it be done without a library?
goes on: and in python 3.8?
goes on: what if the list is empty?
goes on: does it also handle unicode?
goes on: add error handling for when the file doesn't exist
goes on: make the font bigger
goes on: the next step is the login form, it should have two fields
goes on: use the logger for that too
goes on: here is the error from the log: ValueError: bad date
goes on: the user can't log in if the cookie is missing, write a test for that
goes on: I don't know yet, what do you think?
goes on: Let's do option A
goes on: we don't need that any more, you can delete it
goes on: remove the debug prints
goes on: please rename the variable to count
goes on: it works. next: the css
goes on: thanks! can you also explain the regex?
goes on: is there an easier way?
goes on: what's the difference between the two?
goes on: I have a bug in my code, the loop never ends. can you find it?
goes on: the second test is flaky, mark it as slow
goes on: it needs to work offline
goes on: no, go ahead >> Should I wait for your review before merging?
goes on: No. >> Is the database shared with other services?
goes on: not really >> Do you have any preference for the layout?
goes on: could you make it so that it does not wake the dog?
goes on: merge it
goes on: show me how it is used
goes on: write it to a file
goes on: stop here for today
goes on: increase the timeout to 60 seconds
goes on: what is wrong with the first version, in your opinion?
goes on: I need this for a talk, so add some comments
goes on: Can you check if the other endpoints are wrong in the same way?
goes on: sort by date, newest first
goes on: who wrote this library?
"""

ONLY_SCORED = read(_LINES)
