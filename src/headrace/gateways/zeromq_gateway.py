"""The ZeroMQ gateway: a SUB or PULL socket, bound or connected. A message's last part is its body;
a first part before it is its subject.

ZeroMQ has no acknowledgements. With the policy `block` a PUSH socket is held up by its own
high-water mark, and nothing is lost as long as both sides live; a PUB socket drops for subscribers
that are slow, and tells nobody.
"""

from __future__ import annotations

from typing import Any

from headrace.errors import ConfigurationError, MissingExtra
from headrace.gateways.base import GatewaySpec, ThreadReceiving, content_of, now_us, rows_of
from headrace.gateways.inbox import Delivery
from headrace.log.api import Log

HIGH_WATER_MESSAGES = 1_000
"""Messages that ZeroMQ itself holds for us, for each sender."""
MAX_AT_ONCE = 1_000
POLL_MS = 100


class ZeromqReceiving(ThreadReceiving):
    def __init__(self, gateway: GatewaySpec, log: Log) -> None:
        super().__init__(gateway, log)
        self._messages = 0
        try:
            import zmq
        except ImportError:
            raise MissingExtra("pyzmq", "zeromq") from None
        self._zmq: Any = zmq

    def begin(self) -> None:
        """The socket is bound here, where whoever starts the gateway sees what is wrong, and used
        by its thread alone from then on.
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
            self.end()
            raise ConfigurationError(
                f"ZeroMQ cannot bind or connect: {error}.",
                fix="give addresses such as tcp://127.0.0.1:5556.",
            ) from None
        self.address = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        super().begin()

    def end(self) -> None:
        super().end()
        self._socket.close(0)
        self._context.term()

    def details(self) -> dict[str, int]:
        return {"messages": self._messages}

    def receive(self) -> None:
        zmq = self._zmq
        while not self.stopped.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            for _ in range(MAX_AT_ONCE):
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._take(parts)

    def _take(self, parts: list[bytes]) -> None:
        self._messages += 1
        subject = parts[0].decode(errors="replace") if len(parts) > 1 else None
        content = content_of(parts[-1], self.gateway.options["format"], {"subject": subject})
        size = sum(map(len, parts))
        self.inbox.submit(
            Delivery(
                self.gateway.topics[0], content, rows_of(content), size, now_us(), payload=parts[-1]
            ),
            self.stopped,
        )
