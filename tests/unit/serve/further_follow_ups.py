"""More next messages with what they are, which were in sight while the rules were made: written for these tests in the tone of people at
work with an assistant, not collected from anybody. Many are about failures, refusals and negations without complaining of the answer:
plans, questions, quotes, replies, agents' own notes. " << " stands before the request, " >> " before the answer that it followed, where
they matter.
"""

from ostinato.serve.feedback.next_message import NextMessage

_LINES = r"""
goes on: No, that's all for now >> Shall I also update the tests?
goes on: no >> Would you like me to run the linter as well?
goes on: nope, leave it >> Do you want the old function removed?
goes on: No need, I'll run it myself. >> Should I run the migration now?
goes on: nah it's fine as it is >> Should I split this file?
goes on: No, only the first one please >> I can convert both modules. Do you want both?
goes on: not yet >> Should I open the pull request?
goes on: no I don't have a test database >> Do you have a database that I could use for this?
goes on: what should I do if it doesn't work on the server?
goes on: And what happens if it fails halfway through?
goes on: make sure it doesn't break when the list is empty
goes on: add a retry in case the request fails
goes on: let me know if this is wrong
goes on: when the build breaks it should post to the channel
goes on: handle the case where the user did not ask for a receipt
goes on: tell the user that the password is incorrect
goes on: remove the useless imports too
goes on: show the same error page for 404 and 500
goes on: now write the parser, but don't use regular expressions
goes on: Add a cache in front of it. Please don't change the public API.
goes on: ok now the cli. never print to stdout, always stderr
goes on: why do you use a mutex here?
goes on: Why did you choose sqlite over postgres, out of interest?
goes on: why would you need a lock if it's single threaded?
goes on: wait for CI and then merge
goes on: actually that reminds me, can you also bump the version?
goes on: sorry for the delay, here is the config you asked for
goes on: hmm ok, and how does it perform with a million rows?
goes on: what if we used redis instead of memcached?
goes on: can you explain why we'd use a generator instead of a list?
goes on: do we still get the discount if the order is split?
goes on: do I still need the old migration?
goes on: I still see two TODOs in there, are they meant for later?
goes on: if you haven't already, run the formatter
goes on: as I said the endpoint is internal, so no auth needed. go ahead with the handler
goes on: is it bad practice to commit the lock file?
goes on: it should be fast, not necessarily pretty. continue with the next step
goes on: mark wrong answers in red and right ones in green
goes on: write a test that fails when the cache is not cleared
goes on: rename it to is_broken
goes on: the customer says that their export is broken. where would I look first?
goes on: Our staging deploy crashed last night with an OOM, could you look at the memory settings next?
goes on: there's another bug: when I log out and in again the cart is empty
goes on: My tests in another repo are failing, unrelated to this, but what does exit code 137 mean?
goes on: could you undo-proof the delete button, i.e. ask for confirmation?
goes on: implement undo for the editor
goes on: add a revert command to the cli
goes on: how do I revert this later if I have to?
goes on: can I undo this migration?
goes on: Here's the log:\n```\nERROR it does not work\nTraceback: wrong type\n```
goes on: the full output was\n> this is wrong\n> you forgot the semicolon\nwhat does the compiler mean?
goes on: the error message says "that is incorrect" - where does that text come from?
goes on: translate "this does not work" into French
goes on: write a polite reply to a customer who says the product is useless
goes on: yes, do not add tests for now
goes on: yes but keep the old name
goes on: sure, but skip the docs
goes on: looks good, but can you also handle None?
goes on: great, now do it for the admin pages as well
goes on: thanks. next, the readme
goes on: Perfect. Can you open a PR with it?
goes on: ok thanks, and how would I deploy that?
goes on: that works for me, go with plan A
goes on: Exactly what does the second argument do?
goes on: nice to have: a progress bar
goes on: great circle distance would be better here, can you add that as an option?
goes on: should it be async?
goes on: is this right?
goes on: are you sure that this is thread safe?
goes on: does this also work on windows
goes on: I don't understand the last part, can you elaborate?
goes on: what do you mean by idempotent?
goes on: can we make it not depend on pandas?
goes on: keep going
goes on: 1 and 3
goes on: option 2, but with the names from option 1
goes on: please also add logging when it crashes
goes on: next step?
goes on: the second approach, instead of the first >> Which of the two do you prefer?
goes on: instead, let's say we had ten thousand users, would you still do it like that?
goes on: I tried it with python 3.9 and it printed 12
goes on: try it with a bigger batch size
goes on: run it again with -v so I can see the output
goes on: run the tests again, I fixed the env var
goes on: can you try the same with the other dataset
goes on: do the same for users.py
goes on: generate another one, for the winter campaign
goes on: again for the French version please
goes on: write another test like this one
goes on: Please continue from where you left off
goes on: now make the button blue << make the button red
goes on: add a test for the logout function << add a test for the login function
goes on: what is the capital of Norway? << what is the capital of Sweden?
goes on: and for the third file please? << and for the second file please?
goes on: I forgot to mention: it has to run on arm too
goes on: forget the tests for now, finish the handler
goes on: the new version of the library dropped that function, keep it in mind
goes on: never mind the warning, it's from a dependency
goes on: no rush. whenever you have the diff ready show it to me
goes on: no idea. what would you suggest? >> How many rows do you expect?
goes on: no more than 50 lines please
goes on: not sure, maybe postgres >> Which database do you use?
goes on: wrong tab on my side, the tests did pass. go on
goes on: stop at 3pm and summarise what you have
goes on: I want it to stop retrying after five attempts
complaint: That broke the login page.
complaint: it doesn't work, I get a 500 now
complaint: Still the same TypeError as before.
complaint: nope, still failing
complaint: No, this is still wrong. The total should include tax.
complaint: you deleted half of my file
complaint: You changed the wrong function!
complaint: the tests don't pass
complaint: 3 tests fail now that passed before
complaint: this isn't even valid yaml
complaint: that's not true, the method exists since 3.8
complaint: That's not what I meant at all
complaint: I asked for bullet points, not an essay
complaint: I told you not to touch the migrations
complaint: you forgot to close the file handle
complaint: You didn't update the tests as I asked
complaint: Your code throws KeyError: 'name'
complaint: doesnt compile
complaint: this makes it slower, not faster
complaint: the button is gone now
complaint: this is not helpful
complaint: Come on, that's obviously wrong
complaint: are you kidding me? you removed the whole class
complaint: seriously? that function doesn't exist in the library
complaint: that import does not exist
complaint: you hallucinated that flag
complaint: There is no such option in git.
complaint: wrong file
complaint: That's incorrect. 17 is a prime.
complaint: why did you remove the error handling??
complaint: why are you changing files I never mentioned
complaint: stop rewriting the whole file every time
complaint: it's broken again
complaint: you keep ignoring the style guide
complaint: The answer is wrong, it should be 42.
complaint: not working :(
complaint: This fails with "module not found".
complaint: that didn't help
complaint: nothing happens when I click it
complaint: Now the whole page is blank
complaint: same problem
complaint: same error, line 14
complaint: i get the exact same result
complaint: it crashed
complaint: Hm, this doesn't do anything
complaint: you missed the second requirement
complaint: Can you please read the file before editing? You duplicated the function.
complaint: The formatting is completely off
complaint: that is way too long, nobody will read it
complaint: This doesn't answer my question.
correction: no, I meant the other branch
correction: No - use the existing helper instead of writing a new one.
correction: actually no, make it a dataclass
correction: please revert that change
correction: Revert your last edit, I want to keep the loop
correction: undo this
correction: undo that please and only change the docstring
correction: don't add comments
correction: do not create new files, edit the existing one
correction: not the css, the html
correction: I meant in the frontend, not the backend
correction: it's called get_user not fetch_user
correction: should be 8 spaces, not 4
correction: use typescript, not javascript
correction: wait no, put it before the loop
correction: wait, that's the wrong file, I meant config.prod.yaml
correction: Sorry, I meant the year 2024
correction: sorry, wrong link, the docs are at docs.example.com/v2
correction: Instead, return early.
correction: Use a set instead
correction: I'd rather have it as a plain function
correction: let's not use inheritance here
correction: keep the old name please, just change the type
correction: put the old version back
correction: nope, other way round
correction: No, the first parameter is the width.
correction: That's the wrong table, it is orders_v2
correction: actually, use UTC everywhere
correction: make it shorter and without the emojis this time
correction: without any new dependency please, as I wrote
correction: roll that back and try a smaller change
correction: leave the tests alone, fix the code
correction: the function must return None, not an empty list
correction: I want you to edit the file, not print it here
correction: please don't explain, just give me the code
correction: no no, keep the config where it was
retry: try again
retry: Try it again please
retry: please try once more
retry: retry.
retry: redo
retry: can you redo this?
retry: regenerate please
retry: again
retry: once more
retry: give it another go
retry: another attempt please
retry: try that again but carefully
retry: Do it over.
retry: Please answer the question again
retry: how do I center a div? << how do I center a div
retry: I need a regex that matches ISO dates << I need a regex which matches ISO dates
retry: please fix the flaky test in test_api.py << fix the flaky test in test_api.py
retry: Write the release notes for 2.3 from the commits. << write the release notes for 2.3 from the commits
retry: list all files bigger than 10 MB << list all files bigger than 10 MB!!
retry: hello? add the column to the users table << add the column to the users table
praise: thanks a lot
praise: Thank you!!
praise: ty
praise: cheers mate
praise: awesome
praise: that's perfect
praise: Works like a charm, thanks
praise: it works!
praise: yes! that fixed it
praise: brilliant, merging this
praise: LGTM
praise: very nice
praise: great job
praise: Wonderful, exactly what I was looking for.
praise: good bot
praise: that was quick, thanks
praise: love it
praise: super, danke
praise: all green now, thank you
praise: Excellent explanation, thank you very much.
new topic: new topic: what's a good book on compilers?
new topic: different question, how do I exit vim
new topic: ok next thing: the billing page
new topic: Let's switch to something else. I need a birthday message for my sister.
new topic: unrelated question: is our license compatible with GPL?
new topic: Moving on. Can you draft the job ad?
new topic: on another note, who maintains the docs?
new topic: separate issue: the search is slow
new topic: changing the subject, can you help me plan a trip to Rome
new topic: ok that's done. something different now: explain monads
new topic: another question: what is a good chunk size for s3 uploads?
new topic: next task: add dark mode
complaint: hey so I ran this on my machine and it just hangs forever
complaint: nothing got written to disk
complaint: Unfortunately your solution is O(n^2) which is exactly what I wanted to avoid
complaint: um, the second test you added asserts the opposite of what the spec says
complaint: This is the third time I'm asking for the same thing
complaint: I'm getting "undefined is not a function" now
complaint: now I get a segfault
complaint: it printed garbage
complaint: the diff is empty?!
complaint: You're just guessing, aren't you
complaint: That can't be right, 2+2 isn't 5
complaint: your answer contradicts what you said two messages ago
complaint: bad answer
complaint: ugh, it removed all my comments
complaint: this was working before you touched it
complaint: The link you gave is dead
complaint: it won't start anymore
complaint: Didn't work.
complaint: the CI is red after your commit
complaint: There's a syntax error in line 3 of what you gave me
complaint: I can't believe you force pushed to main
complaint: what a mess
complaint: Half of the rows are missing from the table you made
complaint: wrong again!
complaint: you're not reading what I write
correction: hold on, that's meant to be optional
correction: let's go back to the previous version
correction: scratch that, use the first design
correction: nope. tabs.
correction: not quite, the header comes after the body
correction: I think you misread: the limit is per user, not per day
correction: the date format is DD/MM/YYYY
correction: oh and it's Postgres 12, so no MERGE statement
correction: more like the second example I gave
correction: less formal please, it's for a friend
correction: change foo back to bar
correction: only the test file, please leave main.py as it was
correction: I'd prefer a plain loop
correction: Don't apologise, just fix it.
correction: in English please
correction: without the regex
retry: one more go please
retry: same again but properly
retry: can you give it another shot?
retry: pls retry
retry: Once again.
retry: let's try this again
praise: you're a lifesaver
praise: Sweet, thanks!
praise: yep that did the trick, thank you
praise: 👍 great
praise: this is exactly what I wanted, thank you
praise: nice, tests pass
new topic: completely different thing: how tall is the Eiffel tower
new topic: btw what's the weather like
new topic: let's leave that for today. can you help me with my CV?
new topic: second question: what does yield do
goes on: no worries, take the simple approach
goes on: That makes sense. Wrong inputs should raise ValueError then, right?
goes on: the old code was broken anyway, so feel free to rewrite it
goes on: it was broken before you started, so don't worry about that test
goes on: nothing else changed on our side, so deploy when ready
goes on: the page is missing a footer, can you design one?
goes on: You did not mention costs yet, what would this be per month?
goes on: I did not know that! tell me more
goes on: stop the server and start it on port 9000
goes on: Stop using the staging key from next week on, until then it's fine
goes on: not in the mood for javascript today, let's do the backend part
goes on: not that it matters much, but which license is it?
goes on: it does not have to be fast
goes on: this should not be public, so put it behind the admin login
goes on: the tests are red on purpose, implement the function now
goes on: everything is broken down into steps in the ticket, start with step 1
goes on: the file is missing in the repo, create it
goes on: they are wrong about that, aren't they? what does the RFC say?
goes on: That was not what I expected but it's good! How does it work?
goes on: it is still not clear to me how the cache is filled, can you explain?
goes on: wait, how does that even work?
goes on: actually I like it. what's next
goes on: undo everything at the end of the script so that the test leaves no traces
goes on: do not merge yet, I want to look at it first
goes on: never seen that operator, what does it do?
goes on: use requests instead of urllib in the new module as well
goes on: make the retries configurable, use seconds, not milliseconds
goes on: keep the original order of the rows when you write the csv
goes on: leave the second paragraph alone, translate the rest
goes on: it should return early, not throw, when the list is empty. Then write the docs
goes on: again, the deadline is Friday. What can we cut?
goes on: I get the same result with numpy, so it's fine
goes on: the same error handling should go into the other client
goes on: they look wrong to me in the old report, check the new one too
goes on: thanks for the explanation. so what happens with a negative number?
goes on: 502 Bad Gateway is what the proxy answers, can you log the body?
goes on: error in prod: it fails with a timeout since yesterday. where do I start?
goes on: I asked for access to the repo, will have it tomorrow
goes on: I never used docker before, explain it from the start
goes on: the answer is wrong in my textbook, is it? I think yours is right
goes on: SEARCH/REPLACE block failed to match, the file has changed on disk
goes on: # Fix any errors below, if possible.\nF401 os imported but unused
goes on: You did not call any tool. Every answer must call exactly one tool.
goes on: Your task is to write a summary of the conversation so far. Do not use any tools.
goes on: This session continues an earlier one that ran out of context. The summary stands below. Nothing was lost.
goes on: Continue from where you left off. Do not repeat what you wrote.
goes on: Todos have changed. Do not mention this to the user.
"""


def read(lines):
    """(kind, message, the request before it, the answer before it) of each line."""
    found = []
    for line in lines.strip().splitlines():
        kind, _, rest = line.replace("\\n", "\n").partition(": ")
        rest, _, answer = rest.partition(" >> ")
        message, _, before = rest.partition(" << ")
        found.append(
            (NextMessage(kind), message, before or "Please help me with this piece of work.", answer or "Done.")
        )
    return found


IN_SIGHT = read(_LINES)
