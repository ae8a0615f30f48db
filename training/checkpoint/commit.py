"""The commit of one checkpoint: packs are in the store, now the manifest makes it real."""

from __future__ import annotations

from training.checkpoint.manifest import Manifest, Ref, encode_manifest, ref_of
from training.checkpoint.store import NotFound, Store
from training.checkpoint.token import check_not_fenced
from training.errors import Fenced, Unavailable


def commit(store: Store, manifest: Manifest, data: bytes | None = None) -> Ref:
    """Put the manifest between two looks for a newer claim. When this returns, the save is acknowledged.

    The first look only saves work. The second is the guarantee: a newer attempt claims before it reads the
    history, so either it finds this manifest, or this attempt finds its claim and acknowledges nothing.

    Args:
        store: the run's store.
        manifest: what to commit.
        data: its bytes, if they are there already.

    Raises:
        Fenced: a newer attempt exists, or other bytes are under this key. Final for this attempt.
        Unavailable: the store did not answer, and whether the manifest is there could not be found out either.
    """
    data = encode_manifest(manifest)[0] if data is None else data
    check_not_fenced(store, manifest.token, manifest.run)
    try:
        written = store.put_if_absent(manifest.key, data)  # THE COMMIT POINT
    except Unavailable as unknown:
        written = _settled(store, manifest.key, data, unknown)
    if not written and store.get(manifest.key) != data:
        raise Fenced(
            f"{manifest.key} was written by another process",
            run=manifest.run,
            token=manifest.token,
            sequence=manifest.sequence,
        )
    check_not_fenced(store, manifest.token, manifest.run)
    return ref_of(manifest, data)


def _settled(store: Store, key: str, data: bytes, unknown: Unavailable) -> bool:
    """After an unknown outcome: read back, never assume. What is there is put again, until it is durable."""
    try:
        if store.get(key) != data:
            return False
    except NotFound:
        raise unknown from None
    return store.put_if_absent(key, data)
