"""The page that `ostinato up` serves: its handlers and the data that they ask for (`sources.py`). Templates and files lie beside it."""
