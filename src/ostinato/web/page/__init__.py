"""The page that `ostinato up` serves: handlers, what they ask for (`sources.py`), templates and files beside it."""
