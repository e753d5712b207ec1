"""The ZeroMQ gateway: a SUB or PULL socket, bound or connected. The last part of a message is its
body; a part in front of it is its subject.

ZeroMQ has no acknowledgements. With the policy "block" a PUSH socket stops at its own high-water
mark, and nothing is lost as long as both sides live. A PUB socket silently drops messages for
subscribers that are slow.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import ConfigurationError, MissingExtra
from headrace.gateways.base import GatewaySpec, ThreadedGatewayServer
from headrace.log.api import Log

HIGH_WATER_MESSAGES = 1_000
"""Messages that ZeroMQ itself buffers, for each sender."""
MAX_POLL_MESSAGES = 1_000
POLL_MS = 100


class ZeromqGatewayServer(ThreadedGatewayServer):
    """Receives from one socket."""

    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._messages = 0
        try:
            import zmq
        except ImportError:
            raise MissingExtra("pyzmq", "zeromq") from None
        self._zmq: Any = zmq

    def start(self) -> None:
        """Bind the socket here, so that whoever starts the gateway sees what is wrong. From then on
        only the thread uses it.
        """
        options, zmq = self.gateway.options, self._zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB if options["socket"] == "sub" else zmq.PULL)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, options["message_bytes"])
        try:
            for subject in options["subjects"] if options["socket"] == "sub" else ():
                self._socket.set(zmq.SUBSCRIBE, subject.encode())
            for address in options["bind"]:
                self._socket.bind(address)
            for address in options["connect"]:
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self.stop()
            raise ConfigurationError(
                f"ZeroMQ cannot bind or connect: {error}.",
                fix="give addresses such as tcp://127.0.0.1:5556.",
            ) from None
        self.address = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._socket.close(0)
        self._context.term()

    def details(self) -> dict[str, int]:
        return {"messages": self._messages}

    def receive(self) -> None:
        zmq = self._zmq
        while not self.stopped.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            for _ in range(MAX_POLL_MESSAGES):
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._submit(parts)

    def _submit(self, parts: list[bytes]) -> None:
        self._messages += 1
        subject = parts[0].decode(errors="replace") if len(parts) > 1 else None
        self.accept(parts[-1], format=self.gateway.options["format"], metadata={"subject": subject})
