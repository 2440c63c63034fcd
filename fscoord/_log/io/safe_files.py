"""Open the path of a log safely: born whole, no link or stranger's file followed, nothing truncated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

from fscoord._log.io.safe_files import copy_permissions
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, InsecurePathError, StoreUnavailableError

__all__ = ["check", "create", "damaged", "open_descriptor", "resolve", "same_file", "sync_directory", "unavailable"]

TEMPORARY_SUFFIX = ".new"
_ONCE = ((),)
_NO_LINKS = frozenset((system.errno.EPERM, system.errno.EOPNOTSUPP, system.errno.ENOSYS, system.errno.EMLINK))


def resolve(path: Any) -> str:
    """Return `path` as an absolute path whose directory holds no symbolic link; a later chdir(2) changes nothing."""
    name = system.os.fsdecode(system.os.fspath(path))
    if not name:
        raise ValueError("the path of a store is empty")
    directory, base = system.os.path.split(system.os.path.abspath(name))
    return system.os.path.join(system.os.path.realpath(directory), base)


def unavailable(error: OSError, path: str, doing: str, *, maybe_applied: bool = False) -> StoreUnavailableError:
    """Return `error`, met while `doing` something with the log, as one of our own, with the next step."""
    number, text = error.errno, error.strerror or str(error)
    directory = system.os.path.dirname(path)
    advice = {
        system.errno.ENOENT: _absent(directory),
        system.errno.ENOTDIR: f"; {directory} is not a directory",
        system.errno.EACCES: "; check who owns the log and its directory, and their modes",
        system.errno.EROFS: "; pass read_only=True to read it, or choose a path that can be written",
        system.errno.ENOSPC: "; free some space and try again",
        system.errno.EDQUOT: "; free some of the quota and try again",
        system.errno.EMFILE: "; close stores or files, or raise the limit (ulimit -n)",
    }.get(number or 0, "")
    return StoreUnavailableError(
        f"{path}: {doing} failed: {text}{advice}", path=path, maybe_applied=maybe_applied, errno=number
    )


def damaged(path: str, file: str, offset: int, reason: str) -> CorruptLogError:
    """Return what to raise because `file`, of the log `path`, is damaged at `offset`, with the next step."""
    return CorruptLogError(
        f"{file} is damaged at offset {offset}: {reason}. Nothing was repaired; `fscoord verify {path}` tells what is"
        " safe to do",
        path=path,
        offset=offset,
        reason=reason,
    )


def _absent(directory: str) -> str:
    if system.os.path.isdir(directory):
        return "; there is no such log: a handle that may write creates it"
    return f"; its directory {directory} does not exist: create it first"


def open_descriptor(path: str, flags: int, mode: int = 0o600, owned_fds: set[int] | None = None) -> int:
    """Open `path` without following a symbolic link, waiting for a FIFO, or leaking to an exec'ed program.

    The descriptor is added to `owned_fds` in the same chain of C calls, which no signal handler can split, so that an
    interruption doesn't lose it. Without `owned_fds` it is among those that `close_quietly` closes (`system.loose`).
    """
    extra = system.O_CLOEXEC | system.O_NOFOLLOW | system.O_NONBLOCK | system.O_BINARY
    try:
        if owned_fds is None and system.is_fake_fs():
            return system.os.open(path, flags | extra, mode)
        return _open_kept(path, flags | extra, mode, system.loose if owned_fds is None else owned_fds)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno == system.errno.ELOOP:
            raise InsecurePathError(f"{path} is a symbolic link; name the file itself", path=path) from error
        if error.errno in (system.errno.EISDIR, system.errno.ENXIO):
            raise InsecurePathError(f"{path} is no regular file; name a file", path=path) from error
        raise


def _open_kept(path: str, flags: int, mode: int, owned_fds: set[int]) -> int:
    opened: list[int] = []
    opening = partial(opened.extend, map(system.os.open, (path,), (flags,), (mode,)))
    system.in_one_chain(opening, partial(owned_fds.update, opened))
    return opened[0]  # and not what is new in `owned_fds`: another thread may have added to it


def close_owned(fd: int, owned_fds: set[int]) -> None:
    """Close `fd`, and take it out of `owned_fds` before, in one chain of C calls."""
    try:
        forget = partial(owned_fds.discard, fd), partial(system.loose.discard, fd)
        system.in_one_chain(*forget, partial(system.os.close, fd))
    except OSError as error:
        raise_if_foreign(error)


def check(path: str, fd: int, mode: int, *, read_only: bool) -> None:
    """Refuse the open file `fd` if it is not a regular file that only those whom `mode` allows can write.

    A reader checks every byte, so it may read whatever it is allowed to open.

    Raises:
        InsecurePathError: the text says what is wrong, and what to do.
    """
    found = system.os.fstat(fd)
    if not system.stat.S_ISREG(found.st_mode):
        raise InsecurePathError(f"{path} is no regular file; name a file", path=path)
    if read_only:
        return
    strangers = found.st_mode & 0o022 & ~mode
    if strangers:
        raise InsecurePathError(
            f"{path} has mode {system.stat.S_IMODE(found.st_mode):#o}, so that others can write it;"
            f" chmod it, or pass mode={system.stat.S_IMODE(found.st_mode):#o} if they are meant to",
            path=path,
        )
    if not mode & 0o022 and found.st_uid != system.os.geteuid() and found.st_uid != _uid_given_to_ours(path):
        raise InsecurePathError(
            f"{path} belongs to uid {found.st_uid}, not to {system.os.geteuid()}; remove it or choose another path",
            path=path,
        )
    if found.st_nlink > 1:
        _remove_births(path, found)
        if system.os.fstat(fd).st_nlink > 1:
            raise InsecurePathError(f"{path} has several names (hard links); remove the others", path=path)


def _uid_given_to_ours(path: str) -> int:
    """Return the owner that a file of ours gets beside `path`: root squash and id mapping may show another than us."""
    probe = temporary_name(path)
    opened = system.Descriptors()
    try:
        return system.os.fstat(create_descriptor(probe, 0o600, opened)).st_uid
    except OSError as error:
        raise_if_foreign(error)
        return -1
    finally:
        try:
            if opened:
                list(map(system.os.close, starmap(opened.pop, _ONCE)))  # out of `opened` first
        except OSError as error:
            raise_if_foreign(error)
        unlink_quietly(probe)


def _remove_births(path: str, found: Any) -> None:
    """Unlink temporary names of the log's own birth: its maker is about to, or died before it could."""
    directory, base = system.os.path.split(path)
    for name in system.os.listdir(directory):
        if name.startswith(base + ".") and name.endswith(TEMPORARY_SUFFIX):
            other = system.os.path.join(directory, name)
            try:
                if same_file(system.os.stat(other, follow_symlinks=False), found):
                    system.os.unlink(other)
            except OSError as error:
                raise_if_foreign(error)
                continue


def inherit_permissions(source: str, target: str) -> None:
    """Let those who can use `source` use the file `target`, which was just made, as far as this process may do that.

    A side-car that others cannot open costs them only what it would have told them.
    """
    try:
        copy_permissions(source, target)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno is None:
            raise


def names_same_file(path: str, identity: tuple[int, int]) -> bool:
    """Return whether `path` is a name of the file with this device and inode number, which is open."""
    try:
        named = system.os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise_if_foreign(error)
        return False
    return (named.st_dev, named.st_ino) == identity


def unlink_quietly(path: str, life: int | None = None) -> None:
    """Remove the name `path`, if it is there and may be removed.

    With a `life`, it is removed only in the process that had that one: where a signal handler forks in the middle of
    an operation, the operation goes on in the child, too, and cleans up after itself, but the file is the parent's.
    """
    try:
        if life is None or system.process_epoch() == life:  # no signal handler runs from here to the call
            system.os.unlink(path)
    except OSError as error:
        raise_if_foreign(error)


def same_file(one: Any, other: Any) -> bool:
    """Return whether two stat results are of one file, both of which are open or were looked at just now."""
    return bool(one.st_ino == other.st_ino and one.st_dev == other.st_dev)


def create(path: str, content: Callable[[int], bytes], mode: int, *, durable: bool, like: str | None = None) -> None:
    """Let a file appear at `path`, whole, unless something is there already.

    link(2) refuses an existing name and never shows half a file. Where there are no hard links the file appears empty,
    and its first opener initialises it under the lock.

    Args:
        path: its name.
        content: is called with a descriptor of the file, and returns what is written to it.
        mode: its permissions.
        durable: sync file and directory.
        like: a file whose group and access control list it gets, as far as this process may give them.
    """
    life, birth = system.process_epoch(), temporary_name(path)
    opened = system.Descriptors()
    try:
        try:
            fd = create_descriptor(birth, mode, opened)
            if like is not None:
                inherit_permissions(like, birth)
            write_all(fd, content(fd))
            if durable:
                system.os.fsync(fd)
        finally:
            try:
                if opened:  # before anything that can be interrupted
                    list(map(system.os.close, starmap(opened.pop, _ONCE)))  # out of `opened` first
            except OSError as error:
                raise_if_foreign(error)
        try:
            system.os.link(birth, path)
        except FileExistsError as error:
            raise_if_foreign(error)
        except OSError as error:
            raise_if_foreign(error)
            if error.errno not in _NO_LINKS:
                raise
            _create_empty(path, mode)
    finally:
        unlink_quietly(birth, life)
    if durable:
        opened = system.Descriptors()
        try:
            sync_directory(path, opened)
        finally:
            try:
                if opened:
                    list(map(system.os.close, starmap(opened.pop, _ONCE)))  # out of `opened` first
            except OSError as error:
                raise_if_foreign(error)


def _create_empty(path: str, mode: int) -> None:
    opened = system.Descriptors()
    try:
        create_descriptor(path, mode, opened)
    except FileExistsError as error:
        raise_if_foreign(error)
    except BaseException:
        if opened:
            unlink_quietly(path)
        raise
    finally:
        try:
            if opened:
                list(map(system.os.close, starmap(opened.pop, _ONCE)))  # out of `opened` first
        except OSError as error:
            raise_if_foreign(error)


def create_descriptor(path: str, mode: int, owned_fds: set[int]) -> int:
    """Create the file `path`, which must not exist, with this mode whatever the umask, and open it for writing.

    The descriptor is added to `owned_fds` in one chain of C calls, as by `open_descriptor`.
    """
    flags = system.os.O_CREAT | system.os.O_EXCL | system.os.O_WRONLY | system.O_CLOEXEC | system.O_NOFOLLOW
    fd = _open_kept(path, flags, mode, owned_fds)
    if system.stat.S_IMODE(system.os.fstat(fd).st_mode) != mode:
        system.os.chmod(path, mode)
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as the kernel wants."""
    while data:
        data = data[system.os.write(fd, data) :]


def sync_directory(path: str, owned_fds: set[int]) -> None:
    """Make the name of `path` survive a power loss, fsync(2). `owned_fds`: as in `open_descriptor`."""
    fd = open_descriptor(system.os.path.dirname(path), system.os.O_RDONLY, owned_fds=owned_fds)
    try:
        system.os.fsync(fd)
    finally:
        close_owned(fd, owned_fds)


def publish(birth: str, path: str) -> None:
    """Give the file `birth` the name `path`, too, or instead where there are no hard links.

    Raises:
        FileExistsError: there is something at `path`; nothing is overwritten.
    """
    try:
        system.os.link(birth, path)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno not in _NO_LINKS:
            raise
        if system.os.path.lexists(path):
            raise FileExistsError(system.errno.EEXIST, "it is there", path) from None
        system.os.rename(birth, path)


def temporary_name(path: str) -> str:
    """Return a name beside `path`, of nobody else, for what is to appear there."""
    return f"{path}.{system.random_bytes(6).hex()}{TEMPORARY_SUFFIX}"
