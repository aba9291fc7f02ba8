"""A process with one node, for tests that kill or stop it: argv is engine id, host and port to connect to."""

from __future__ import annotations

import sys
import threading

from neuron_pushkv.peers import Node
from neuron_pushkv.wire import AnyMessage, Hello, Identity, Rank
from tests.peers.party import KEY


class Echo:
    """Sends back whatever comes."""

    node: Node

    def identity(self, role: str, hello: Hello) -> tuple[Identity, None]:
        return Identity(hello.engine_id, hello.incarnation, hello.rank), None

    def check(self, role: str, theirs: Identity) -> None:
        pass

    def discard(self, token: int) -> None:
        pass

    def up(self, *_: object) -> None:
        pass

    def down(self, *_: object) -> None:
        pass

    def unreachable(self, *_: object) -> None:
        pass

    def received(self, connection: int, message: AnyMessage) -> None:
        self.node.send(connection, message)


def main() -> None:
    name, host, port = sys.argv[1:]
    echo = Echo()
    echo.node = Node(handler=echo, engine_id=name, incarnation=5, rank=Rank(), key=KEY)
    echo.node.open("worker", host, int(port))
    threading.Event().wait()


if __name__ == "__main__":
    main()
