"""The wire between a node and a server: bytes are passed on, held back, or let go again."""

from __future__ import annotations

import asyncio
import contextlib
import threading

LOOPBACK = "127.0.0.1"
READ_BYTES = 1 << 16
START_SECONDS = 10.0


class Relay:
    """Listens on `host` and passes everything on to a port of this machine, in a thread of its own.

    While it is cut, connections stay open and new ones are accepted, but nothing arrives: no error tells either
    side, as when a cable is pulled. What was under way arrives when it is healed.

    Attributes:
        port: where it listens.
        delay_seconds: by which each piece of data is late.
    """

    def __init__(self, target_port: int, host: str = LOOPBACK) -> None:
        self._target_port, self.host = target_port, host
        self.port = 0
        self.delay_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._open: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="retoma-relay", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or not self.port:
            raise OSError(f"no relay could listen on {host}")

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    def cut(self) -> None:
        """Nothing passes any more."""
        self._loop.call_soon_threadsafe(self._gate().clear)

    def heal(self) -> None:
        """Everything passes again, what was held back first."""
        self._loop.call_soon_threadsafe(self._gate().set)

    def close(self) -> None:
        """Close all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)

    def _gate(self) -> asyncio.Event:
        assert self._open is not None  # noqa: S101 - made before `_ready` was set
        return self._open

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._open = asyncio.Event()
            self._open.set()
            server = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, 0))
            self.port = int(server.sockets[0].getsockname()[1])
            self._ready.set()
            self._loop.run_forever()
            server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._gate().wait()
        try:
            there, back = await asyncio.open_connection(LOOPBACK, self._target_port)
        except OSError:  # the server is away: so says the wire
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side closes; then both are closed."""
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                await self._gate().wait()
                writer.write(data)
                await writer.drain()
            await self._gate().wait()
        writer.close()
