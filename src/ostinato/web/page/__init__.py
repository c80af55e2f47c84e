"""The page that `ostinato up` serves: its handlers and the data that they show. Templates and static files are beside this folder."""
