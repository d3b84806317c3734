"""The flags of ``twinpool status``."""

from __future__ import annotations

import argparse
import os

DEFAULT_URL = "http://127.0.0.1:8000"


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them. The environment gives the defaults, so that a shell set up once need not repeat them."""
    parser.description = "Show the workers of a running server."
    parser.add_argument("--url", default=os.environ.get("TWINPOOL_URL", DEFAULT_URL), help="the server (TWINPOOL_URL)")
    parser.add_argument(
        "--admin-key",
        default=os.environ.get("TWINPOOL_ADMIN_KEY"),
        help="the --admin-key given to serve, or else its --api-key (TWINPOOL_ADMIN_KEY)",
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")
