"""Stages `stdlib_sources` and `stdlib_text`: source text of Python's standard library, as one file.

    corpus.txt   UTF-8, LF line ends, the modules of MODULES in that order, each behind a line that names it

The text is another one under another Python, so the interpreter is a part of the data's version. The first
stage always runs and writes stdlib_sources.yaml (Python's version, number of modules, digest of their text);
the second takes these values as parameters. They are in dvc.lock, readable: under another Python `dvc repro`
makes another corpus and records it there as another data version, which git shows as a changed dvc.lock.
Licence: the standard library is under the PSF License Agreement, (c) Python Software Foundation.

    python make_stdlib_text.py sources | corpus
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

import yaml

HERE = Path(__file__).parent
LEAST_BYTES = 500_000

# Written by hand, widely read, and present in Python 3.11 to 3.14. A module that is missing is left out.
MODULES = """
    abc ast base64 bdb bisect calendar cmd code codecs codeop collections/__init__ configparser contextlib copy
    csv dataclasses datetime difflib dis enum filecmp fileinput fnmatch fractions functools getopt glob graphlib
    gzip hashlib heapq hmac ipaddress json/decoder json/encoder json/scanner linecache logging/__init__ numbers
    operator os pickle pkgutil plistlib posixpath pprint queue random reprlib sched selectors shelve shlex shutil
    smtplib socket socketserver statistics string subprocess tempfile textwrap threading timeit tokenize trace
    traceback types urllib/parse uuid warnings weakref
"""


def main() -> None:
    """Run one of the two stages."""
    text, modules = read_sources()
    if sys.argv[1:] == ["sources"]:
        sources = {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "modules": modules,
            "bytes": len(text),
            "md5": hashlib.md5(text, usedforsecurity=False).hexdigest(),
        }
        (HERE / "stdlib_sources.yaml").write_text(yaml.safe_dump(sources, sort_keys=False))
    elif sys.argv[1:] == ["corpus"]:
        part = HERE / "stdlib_text.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        (part / "corpus.txt").write_bytes(text)
        part.rename(HERE / "stdlib_text")  # whole or not there: a killed stage leaves no half data set
    else:
        raise SystemExit(__doc__)


def read_sources() -> tuple[bytes, int]:
    """The whole corpus, and the number of modules in it."""
    library = Path(sysconfig.get_path("stdlib"))
    parts = []
    for module in MODULES.split():
        file = library / f"{module}.py"
        if file.is_file():
            text = file.read_text(encoding="utf-8").rstrip("\n")  # universal newlines: CRLF becomes LF
            parts.append(f"# ==== {module}.py ====\n{text}\n")
    corpus = "\n".join(parts).encode()
    if len(corpus) < LEAST_BYTES:
        raise SystemExit(f"only {len(corpus)} bytes of sources in {library}; this Python ships without them?")
    return corpus, len(parts)


if __name__ == "__main__":
    main()
