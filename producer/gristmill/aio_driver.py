"""Connections for asyncio: as :mod:`gristmill.driver`, which see for the reasons, with ``await``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool

from gristmill import scripts
from gristmill.driver import CONNECTIONS, RESTED_S, check_role, open_pool, raise_first, router
from gristmill.routing import ERRORS, SOCKET_TIMEOUT_S, Args, Place, Router


class AsyncConnections:
    """:class:`gristmill.driver.Connections` for one event loop: each coroutine gets a connection."""

    calls: Callable[..., Awaitable[list[Any]]]
    """Send commands together and return their replies, or raise the first error among these."""

    def __init__(self, url: str) -> None:
        route = router(url)
        self._server = _Server(Place(url)) if route is None else _Routed(route)
        self.calls = self._server.calls

    async def call(self, *command: Any) -> Any:
        """Carry out one command. Raises one of ERRORS."""
        return (await self.calls(command))[0]

    async def run(self, script: str, names: Sequence[str], args: Sequence[Any]) -> Any:
        """Run one of :mod:`gristmill.scripts`."""
        try:
            return await self.call("EVALSHA", scripts.digest(script), len(names), *names, *args)
        except exceptions.NoScriptError:
            return await self.call("EVAL", scripts.source(script), len(names), *names, *args)

    async def close(self) -> None:
        """Close all connections; a command opens them again."""
        await self._server.close()


class _Server:
    """Connections to one server."""

    def __init__(self, place: Place) -> None:
        self._pool = open_pool(ConnectionPool, place.url, timeout_s=place.timeout_s, **_greeting(place))
        self._all: list[Any] = []
        self._idle: list[tuple[Any, float]] = []  # and since when; the last one used is the next
        self._free = asyncio.Semaphore(CONNECTIONS)

    async def calls(self, *commands: Args) -> list[Any]:
        return raise_first(await self.send(commands))

    async def send(self, commands: Sequence[Args]) -> list[Any]:
        """Send commands together and return their replies, errors among them."""
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            message = f"all {CONNECTIONS} connections are in use"
            raise exceptions.ConnectionError(message) from None
        try:
            connection = await self._take()
            try:
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await _reply(connection) for _ in commands]
            except BaseException:  # a cancelled coroutine too
                await connection.disconnect(nowait=True)
                raise
            finally:
                self._idle.append((connection, time.monotonic()))
        finally:
            self._free.release()

    async def _take(self) -> Any:
        if not self._idle:
            connection = self._pool.make_connection()
            self._all.append(connection)
            return connection
        connection, since = self._idle.pop()
        if connection.is_connected and time.monotonic() - since > RESTED_S:
            # redis-py 8 gave it another name
            can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
            try:
                closed = await can_read()
            except ERRORS:
                closed = True
            if closed:
                await connection.disconnect(nowait=True)
        return connection

    async def hang_up(self) -> None:
        """Close the connections that nobody uses: the server failed."""
        closed = []
        while self._idle:
            closed.append(self._idle.pop())
            await closed[-1][0].disconnect(nowait=True)
        self._idle += closed

    async def close(self) -> None:
        for connection in self._all:
            await connection.disconnect()


class _Routed:
    """Connections to all servers that a router names."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._servers: dict[Place, _Server] = {}

    async def calls(self, *commands: Args) -> list[Any]:
        route = self._router.route(commands)
        try:
            send = next(route)
            while True:
                server = self._servers.get(send.place) or self._servers.setdefault(
                    send.place, _Server(send.place)
                )
                try:
                    replies = await server.send(send.commands)
                except ERRORS as error:
                    await server.hang_up()
                    send = route.throw(error)
                else:
                    send = route.send(replies)
        except StopIteration as stop:
            return raise_first(stop.value)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error


def _greeting(place: Place) -> dict[str, Any]:
    async def greet(connection: Any) -> None:
        await connection.on_connect()
        await connection.send_command("ROLE")
        check_role(await connection.read_response())

    return {"redis_connect_func": greet} if place.primary else {}
