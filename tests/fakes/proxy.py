"""A gateway behind a proxy that loses answers."""


class LosesAnswers:
    """An application that handles its first `left` requests but loses their answers: the client gets a proxy's error instead."""

    def __init__(self, app, left, status=503):
        self.app, self.left, self.status = app, left, status

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or self.left == 0:
            await self.app(scope, receive, send)
            return
        self.left -= 1

        async def nowhere(message):
            pass

        await self.app(scope, receive, nowhere)
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
