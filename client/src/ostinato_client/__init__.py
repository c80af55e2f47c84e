"""Feedback for an Ostinato server, and signatures for a product's users. Standard library only."""

from ostinato_client.asynchronous import AsyncOstinato
from ostinato_client.errors import FeedbackError, NotAllowed, NotTaken, Refused
from ostinato_client.events import Event, Receipt
from ostinato_client.signing import sign_user
from ostinato_client.synchronous import Ostinato

__all__ = [
    "AsyncOstinato",
    "Event",
    "FeedbackError",
    "NotAllowed",
    "NotTaken",
    "Ostinato",
    "Receipt",
    "Refused",
    "sign_user",
]
