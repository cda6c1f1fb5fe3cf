"""Asks a front for one path, for probes that cannot send a key: `python -m fdasync_http.probe URL [KEY_FILE]`.

Exit code 0: it answered 200. 1: it answered something else, or nothing in time; stderr says what. Blocks: it is a
process of its own. Called by the probes of `deploy/kubernetes.yaml`.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from pathlib import Path

_WITHIN_S = 5.0


def probe(url: str, key_file: str = "") -> str:
    """What is wrong with the answer of `url`; "": nothing. `key_file`: has the key that is sent, "": none is."""
    if not url.startswith(("http://", "https://")):
        return f"{url} is no http address"
    request = urllib.request.Request(url)
    try:
        if key_file:
            request.add_header("authorization", f"Bearer {Path(key_file).read_text().strip()}")
        with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
            return "" if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}: {error.read(2000).decode(errors='replace')}"
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    problem = probe(*sys.argv[1:3])
    if problem:
        print(problem, file=sys.stderr)
    sys.exit(1 if problem else 0)
