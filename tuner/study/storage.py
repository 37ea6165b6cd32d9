"""Optuna storages by URL, and their errors in words.

A URL is what Optuna's own command line takes (SQLAlchemy's `sqlite:///FILE`, `postgresql://..`, `mysql://..`;
`redis://..`; the path of a journal file), or `grpc://HOST:PORT` for a proxy of Optuna's (`run_grpc_proxy_server`).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import optuna
import sqlalchemy.exc
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalRedisBackend

from tuner.errors import HostError

BUSY = 30.0  # seconds that SQLite waits for a database which somebody else has locked
GONE = "Record does not exist"  # what Optuna says of a study or trial that it knew
GRPC_PATIENCE = 10.0
REDIS, GRPC = ("redis://", "rediss://", "redis+"), "grpc://"
JOURNAL = b'{"op_code"'  # how each line of a journal begins


def open_storage(url: str) -> BaseStorage:
    """Open a storage; what lies in a file is made if it is not there.

    Raises:
        HostError: it does not answer, or its driver is missing.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    with answering(url):
        try:
            return _open(url)
        except ImportError as error:
            said = error.__cause__ or error
            hint = "install the driver that this kind of storage needs"
            raise HostError(f"Optuna storage {url}: {said}", hint=hint) from error
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            raise _said(url, error) from error


def close(storage: BaseStorage) -> None:
    """Give back the connections to a database."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def _open(url: str) -> BaseStorage:
    if url.startswith(REDIS):
        return JournalStorage(JournalRedisBackend(url))
    if url.startswith(GRPC):
        parts = urlsplit(url)
        host = parts.hostname or "localhost"
        proxy = GrpcStorageProxy(host=f"[{host}]" if ":" in host else host, port=parts.port or 13000)
        proxy.wait_server_ready(timeout=GRPC_PATIENCE)
        return proxy
    if "://" in url:
        patience = {"connect_args": {"timeout": BUSY}} if url.startswith("sqlite") else {}
        return RDBStorage(url, engine_kwargs=patience)
    file = Path(url)
    if file.is_file():
        _mend_journal(file)
    return JournalStorage(JournalFileBackend(str(file)))


def _mend_journal(file: Path) -> None:
    """Take away the half line that a full disk or a loss of power left: the next one would be written behind it.

    Raises:
        ValueError: it is no journal, and is left as it is.
    """
    lock = JournalFileSymlinkLock(str(file))
    with file.open("r+b") as opened:
        beginning = opened.read(len(JOURNAL))
        if beginning.startswith(b"SQLite"):
            raise ValueError(f"this is a SQLite database: write sqlite:///{file}")
        if not JOURNAL.startswith(beginning):
            raise ValueError("not a journal of Optuna's")
        lock.acquire()
        try:
            text = file.read_bytes()
            opened.truncate(text.rfind(b"\n") + 1)
        finally:
            lock.release()


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Turn what a storage raises into a HostError; anything else passes.

    Raises:
        HostError: the storage did not do what was asked of it.
    """
    try:
        yield
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _said(url, error) from error
    except KeyError as error:
        if GONE not in str(error):
            raise
        raise HostError(f"Optuna storage {url}: the study was deleted while it ran",
                        hint="what is measured is in the run folder; start a new run") from error  # fmt: skip
    except OSError as error:
        if "://" in url or not str(error.filename or url).startswith(url):
            raise
        raise _said(url, error) from error
    except _errors_of_the_driver(url) as error:
        raise _said(url, error) from error


def _errors_of_the_driver(url: str) -> tuple[type[Exception], ...]:
    """Return what a driver raises that neither Optuna nor SQLAlchemy wraps; it is there when its storage is."""
    with suppress(ImportError):  # then nothing of it is raised
        if url.startswith(REDIS):
            import redis  # noqa: PLC0415 (only where it is used)

            return (redis.exceptions.RedisError,)
        if url.startswith(GRPC):
            import grpc  # noqa: PLC0415 (only where it is used)

            return grpc.RpcError, grpc.FutureTimeoutError
    return ()


def _said(url: str, error: Exception) -> HostError:
    root: BaseException = error
    while isinstance(root, optuna.exceptions.StorageInternalError) and root.__cause__ is not None:
        root = root.__cause__
    said = next((line for line in str(root).splitlines() if line.strip()), type(root).__name__)
    return HostError(
        f"Optuna storage {url}: {said}",
        hint="is the disk full, the database locked or the server away? What is measured is kept; mend it and --resume",
    )


def absolute(url: str) -> str:
    """Return a URL that means the same in whatever folder it is read, as far as a journal's path is concerned."""
    return url if "://" in url else str(Path(url).resolve())
