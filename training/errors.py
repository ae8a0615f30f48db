"""One kind of error for each thing the caller would do next.

RetomaError
├── Unavailable   retry later: the store, a server or the network did not answer        exit 3
├── Corrupt       fall back to an older checkpoint: bytes are missing or not the same   exit 4
├── Fenced        stop this attempt: a newer one has taken over; not an alarm           exit 5
├── Invalid       fix the configuration, the data or the state; never retried           exit 2
├── Diverged      the training produced a non-finite number; do not publish it          exit 6
└── Preempted     the machine is being taken away; resume elsewhere                     exit 7
"""

from __future__ import annotations

from typing import Any, ClassVar


class RetomaError(Exception):
    """Base of all errors of this project. Carries where it happened and what to do next.

    Attributes:
        hint: the next command or edit for a person, or None.
        run, token, sequence, key: which run, attempt, checkpoint and store object it is about.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        run: str | None = None,
        token: int | None = None,
        sequence: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.run = run
        self.token = token
        self.sequence = sequence
        self.key = key

    @property
    def kind(self) -> str:
        """Name of the kind, as it appears in messages between processes; of a subclass, that of its kind."""
        return next((cls.__name__ for cls in type(self).__mro__ if cls.__name__ in KINDS), type(self).__name__)

    def __str__(self) -> str:
        """One line: what, where, hint."""
        place = ", ".join(
            f"{name} {value}"
            for name in ("run", "token", "sequence", "key")
            if (value := getattr(self, name)) is not None and str(value) not in self.message
        )
        text = f"{self.message} ({place})" if place else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the keyword fields when an error crosses a process boundary."""
        return (_rebuild, (type(self), self.message, self.fields()))

    def fields(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error."""
        return {name: getattr(self, name) for name in ("hint", "run", "token", "sequence", "key")}


def _rebuild(cls: type[RetomaError], message: str, fields: dict[str, Any]) -> RetomaError:
    return cls(message, **fields)


class Unavailable(RetomaError):
    """The other side did not answer. Retry later."""

    exit_code = 3


class Corrupt(RetomaError):
    """Bytes are missing or differ from what was committed. Fall back to an older checkpoint."""

    exit_code = 4


class Fenced(RetomaError):
    """A newer attempt owns the run. Final for this attempt, and not an alarm."""

    exit_code = 5


class Invalid(RetomaError, ValueError):
    """Configuration, data or state is wrong. A person must fix it; retrying changes nothing."""

    exit_code = 2


class Diverged(RetomaError):
    """The loss or the weights are not finite. The state must not become head."""

    exit_code = 6


class Preempted(RetomaError):
    """The process was asked to leave. What was committed is safe; resume elsewhere."""

    exit_code = 7


KINDS: dict[str, type[RetomaError]] = {
    cls.__name__: cls for cls in (Unavailable, Corrupt, Fenced, Invalid, Diverged, Preempted)
}


def error_of_kind(kind: str, message: str, **fields: Any) -> RetomaError:
    """Rebuild an error from its kind's name; an unknown kind becomes a plain RetomaError."""
    return KINDS.get(kind, RetomaError)(message, **fields)
