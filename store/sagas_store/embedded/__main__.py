"""`python -m sagas_store.embedded`: start a server, print its URI, stay until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import signal
import sys

from sagas_store.embedded import EmbeddedError, EmbeddedMongo


def main() -> int:
    """Return 0 after an ordinary end, 3 when no server could be started. stdout carries the URI, stderr the talk."""
    parser = argparse.ArgumentParser(prog="python -m sagas_store.embedded", description=__doc__)
    parser.add_argument("--folder", help="keep the data here, and go on with it on the next start (default: temporary)")
    parser.add_argument("--nodes", type=int, default=1, choices=range(1, 8), help="how many mongods (default: 1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with EmbeddedMongo.start(nodes=options.nodes, folder=options.folder, keep=options.folder is not None) as mongo:
            sys.stdout.write(f"{mongo.uri}\n")
            sys.stdout.flush()
            sys.stderr.write(f"MongoDB runs in {mongo.folder}; Ctrl-C stops it\n")
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except EmbeddedError as error:
        sys.stderr.write(f"{error}\n")
        return 3


if __name__ == "__main__":
    sys.exit(main())
