"""Reading other people's pickles without running them."""

from __future__ import annotations

import pickle
import re
import warnings
from typing import IO, Any

import torch

from training.errors import Corrupt, Invalid, RetomaError

_HINT = "where you trust the file: load it there, and save state_dict()s of tensors and plain values again"
_GLOBAL = re.compile(r"GLOBAL ([A-Za-z_][\w.]*)")


def load_plain(source: str | IO[bytes], what: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote, if it is made of tensors and plain values. No class of it is ever called.

    Args:
        source: path, or an open file.
        what: names it in errors.
        mmap: read the tensors' bytes when they are used; for files in the zip format.

    Raises:
        Invalid: it needs a class or a function; named.
        Corrupt: it is cut or damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rare dtypes and newer pickle protocols
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refusal(error, what) from error
    except Exception as error:
        # Anything can come out of a damaged or a hostile file.
        raise Corrupt(f"{what} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


def load_restricted(file: IO[bytes], what: str, admitted: dict[tuple[str, str], Any]) -> Any:
    """Unpickle what is made of plain values and of `admitted` names, each replaced by a stand-in of ours.

    Raises:
        Invalid: it needs another name; named.
        Corrupt: it is cut or damaged.
    """

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            if (module, name) in admitted:
                return admitted[module, name]
            dtype = getattr(torch, name, None) if module == "torch" else None
            if isinstance(dtype, torch.dtype):
                return dtype
            raise _needs(what, [f"{module}.{name}"])

    try:
        return Restricted(file).load()
    except RetomaError:
        raise
    except Exception as error:
        raise Corrupt(f"{what} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


def _refusal(error: Exception, what: str) -> RetomaError:
    names = sorted(set(_GLOBAL.findall(str(error))))
    if names:
        return _needs(what, names)
    reasons = [line.strip() for line in str(error).splitlines() if "Unpickler error" in line]
    reason = reasons[0] if reasons else _first_line(error)
    return Invalid(f"{what} is not made of tensors and plain values; it was not run ({reason})", hint=_HINT)


def _needs(what: str, names: list[str]) -> Invalid:
    return Invalid(
        f"{what} can only be read by running {', '.join(names)}, which could be anything; it was not run",
        hint=_HINT,
    )


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
