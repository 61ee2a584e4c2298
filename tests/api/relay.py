"""Passes connections to a port of this machine on to a unix socket: relay.py SOCKET PORT-FILE."""

import socket
import sys
import threading
from pathlib import Path


def pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    Path(sys.argv[2]).write_text(str(listener.getsockname()[1]))
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(sys.argv[1])
        except OSError:
            client.close()
            continue
        for ends in ((client, server), (server, client)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


main()
