"""`mlx_lm.server` on the CPU, as a child of `server_process`."""

from __future__ import annotations

import json
import socket
import sys

from harness.engines.server_process import announce, end_with_owner


def main() -> None:
    """Serve the folder that the settings name; its arithmetic is in the dtype that its weights are stored in."""
    settings = json.loads(sys.argv[1])
    out = end_with_owner()
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    mx.set_default_device(mx.cpu)  # pyright: ignore[reportArgumentType]
    from mlx_lm import server  # pyright: ignore[reportMissingImports]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.argv = [server.__name__, "--model", settings["folder"], "--host", "127.0.0.1", "--port", str(port)]
    sys.argv += ["--temp", "0", "--decode-concurrency", str(settings["concurrency"])]
    sys.argv += ["--prompt-concurrency", str(settings["concurrency"]), "--log-level", "ERROR"]
    announce(out, f"http://127.0.0.1:{port}")
    server.main()


if __name__ == "__main__":
    main()
