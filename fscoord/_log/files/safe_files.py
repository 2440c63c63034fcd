"""Open, create and publish files safely: follow no symbolic link, use no other user's file, truncate nothing.

A signal handler may raise an exception between two lines of Python, for example KeyboardInterrupt. A descriptor that is
only in a local variable would then stay open, with its locks, until the process ends. To prevent this leak,
`system.open_file` opens a descriptor and adds the descriptor to a set, ``owned_fds``. No signal handler runs between
these two steps. The owner of the set closes the descriptors that are left in the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.escaping import shell_word
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import CorruptLogError, InsecurePathError, StoreUnavailableError

TEMPORARY_SUFFIX = ".new"
_NO_LINKS = frozenset((system.errno.EPERM, system.errno.EOPNOTSUPP, system.errno.ENOSYS, system.errno.EMLINK))
GONE: Final = frozenset((system.errno.ENOENT, getattr(system.errno, "ESTALE", -1)))
"""The errors of open(2) for a file that was removed, on this host or on a file server."""
_ACLS: Final = ("system.posix_acl_access", "system.nfs4_acl")
"""The extended attributes that hold access control lists: acl(5), and nfs4_acl(5) on mounts of NFS 4."""
_NO_ACL: Final = frozenset(getattr(system.errno, name, -1) for name in ("ENODATA", "ENOTSUP", "EOPNOTSUPP", "EINVAL"))


_ENDS_OF_DIRECTORIES: Final = frozenset(("", ".", ".."))
"""A path whose last component is one of these names a directory and never a file: path_resolution(7)."""

FilePath = str | bytes | system.os.PathLike[str] | system.os.PathLike[bytes]
"""The path of a log, as the user of the library passes it."""


NAME_BYTES_MAX: Final = 238


def resolve(path: FilePath) -> str:
    """Return `path` as an absolute path. Resolve symbolic links, except in the last component.

    Raises:
        ValueError: the path is empty.
        StoreUnavailableError: the name is too long, or the path is relative and the working directory was removed.
        InsecurePathError: the path ends with a slash or a dot, so that it names a directory, and the directory does not
            exist. (An existing directory is refused when it is opened.)
    """
    name = system.os.fsdecode(system.os.fspath(path))
    if not name:
        raise ValueError("the path of a store is empty")
    end = system.os.path.basename(name)
    if len(system.os.fsencode(end)) > NAME_BYTES_MAX:
        raise StoreUnavailableError(
            f"{name}: the name of the file has {len(system.os.fsencode(end))} bytes; use a name of at most"
            f" {NAME_BYTES_MAX}, because the names of the files beside it are up to 17 bytes longer",
            path=name,
            errno=system.errno.ENAMETOOLONG,
        )
    if end in _ENDS_OF_DIRECTORIES and not system.os.path.isdir(name):
        raise InsecurePathError(
            f"{name} ends with {end or '/'!r}, so it names a directory, which does not exist; remove that ending, or"
            " create the directory and name a file in it",
            path=name,
        )
    try:
        directory, base = system.os.path.split(system.os.path.abspath(name))
    except FileNotFoundError as error:
        raise_if_foreign(error)
        raise StoreUnavailableError(
            f"{name}: the working directory of this process was removed; pass an absolute path, or change to another"
            " directory first",
            path=name,
            errno=error.errno,
        ) from error
    return system.os.path.join(system.os.path.realpath(directory), base)


def unavailable(error: OSError, path: str, doing: str, *, maybe_applied: bool = False) -> StoreUnavailableError:
    """Convert `error` into a StoreUnavailableError that says what failed (`doing`), and what to do about it."""
    number, text = error.errno, error.strerror or str(error)
    directory = system.os.path.dirname(path)
    is_draft = isinstance(error.filename, str) and error.filename.endswith(TEMPORARY_SUFFIX)
    if number == system.errno.ENOENT and system.os.path.isdir(directory) and not is_draft:
        message = f"no store at {path}; check the path (`set` creates one)"
        return StoreUnavailableError(message, path=path, maybe_applied=maybe_applied, errno=number)
    advice = {
        system.errno.ENOENT: (
            f"; no file can be created in {directory}: choose another directory"
            if system.os.path.isdir(directory)
            else f"; its directory {directory} does not exist: create it first"
        ),
        system.errno.ENOTDIR: f"; {directory} is not a directory",
        system.errno.EACCES: "; check the owners and modes of the log and its directory",
        system.errno.EROFS: "; to read it, open it with read_only=True, or choose a path that can be written",
        system.errno.ENOSPC: "; free some space and try again",
        system.errno.EDQUOT: "; free some of the quota and try again",
        system.errno.EMFILE: "; close stores or files, or raise the limit (ulimit -n)",
    }.get(number or 0, "")
    return StoreUnavailableError(
        f"{path}: {doing} failed: {text}{advice}", path=path, maybe_applied=maybe_applied, errno=number
    )


def damaged(path: str, file: str, offset: int, reason: str) -> CorruptLogError:
    """Return the error for damage at `offset` in `file`, a file of the log `path`."""
    return CorruptLogError(
        f"{file} is damaged at offset {offset}: {reason}. Nothing was repaired; `fscoord verify"
        f" {shell_word(path)}` reports what is safe to do",
        path=path,
        offset=offset,
        reason=reason,
    )


def open_descriptor(path: str, flags: int, mode: int = 0o600, owned_fds: set[int] | None = None) -> int:
    """Open `path` and return the descriptor. Follow no symbolic link, and do not block on a FIFO.

    The descriptor is closed on exec. The function adds the descriptor to `owned_fds`. If `owned_fds` is None, the
    function adds the descriptor to `system.loose`, and `system.close_quietly` removes it from there.
    """
    if owned_fds is None:
        owned_fds = set() if system.is_fake_fs() else system.loose
    try:
        return system.open_file(path, flags, mode, owned_fds)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno == system.errno.ELOOP:
            raise InsecurePathError(f"{path} is a symbolic link; name the file itself", path=path) from error
        if error.errno in (system.errno.EISDIR, system.errno.ENXIO):
            raise InsecurePathError(
                _not_a_file(path, is_directory=error.errno == system.errno.EISDIR), path=path
            ) from error
        raise


def _not_a_file(path: str, *, is_directory: bool) -> str:
    if is_directory:
        example = system.os.path.join(path, "store")
        return f"{path} is not a regular file, but a directory; name a file in it, such as {example}"
    return f"{path} is not a regular file; pass the path of a file"


def close_owned(fd: int, owned_fds: set[int]) -> None:
    """Remove `fd` from `owned_fds` and close it. One chain of C calls makes both steps, so `fd` is closed once."""
    try:
        forget = partial(owned_fds.discard, fd), partial(system.loose.discard, fd)
        system.in_one_chain(*forget, partial(system.os.close, fd))
    except OSError as error:
        raise_if_foreign(error)


@contextmanager
def closing_owned(fd: int, owned_fds: set[int]) -> Iterator[int]:
    """Context manager that yields `fd`, and closes it at the end. `fd` is in `owned_fds`."""
    try:
        yield fd
    finally:
        close_owned(fd, owned_fds)


def check(path: str, fd: int, mode: int, *, read_only: bool, is_fifo: bool = False) -> None:
    """Raise an error unless the open file `fd` is a regular file that only the users whom `mode` allows can write.

    If `read_only` is true, the file may belong to any user, because its bytes are verified. If `is_fifo` is true, the
    file must be a FIFO.

    Raises:
        InsecurePathError: the file is of another kind, or other users can write it. The message says what to do.
    """
    found = system.os.fstat(fd)
    if is_fifo and not system.stat.S_ISFIFO(found.st_mode):
        raise InsecurePathError(f"{path} is not a FIFO; remove it", path=path)
    if not is_fifo and not system.stat.S_ISREG(found.st_mode):
        raise InsecurePathError(_not_a_file(path, is_directory=system.stat.S_ISDIR(found.st_mode)), path=path)
    if read_only:
        return
    strangers = found.st_mode & 0o022 & ~mode
    if strangers:
        given = system.stat.S_IMODE(found.st_mode)
        raise InsecurePathError(
            f"{path} has mode {given:#o}, so that others can write it; chmod it, or pass mode={given:#o} if they are"
            f" meant to (in an address ?mode={given:04o})",
            path=path,
        )
    if not mode & 0o022 and found.st_uid != system.os.geteuid() and found.st_uid != _uid_given_to_ours(path):
        raise InsecurePathError(
            f"{path} belongs to uid {found.st_uid}, not to {system.os.geteuid()}; remove it or choose another path",
            path=path,
        )
    if found.st_nlink > 1:
        _remove_temporary_names(path, found)
        if system.os.fstat(fd).st_nlink > 1:
            raise InsecurePathError(f"{path} has several names (hard links); remove the others", path=path)


def _uid_given_to_ours(path: str) -> int:
    """Create a file beside `path` for a moment, and return the uid of the file; -1 if no file can be created.

    On NFS, the uid may differ from the uid of this process, because the server may map users (root squash).
    """
    probe = temporary_name(path)
    opened, close = system.owned_for_a_while()
    try:
        return system.os.fstat(create_descriptor(probe, 0o600, opened)).st_uid
    except OSError as error:
        raise_if_foreign(error)
        return -1
    finally:
        close()
        unlink_quietly(probe)


def _remove_temporary_names(path: str, found: Any) -> None:
    """Unlink the temporary names of the file `path`. A creator of the file leaves such a name if it dies too early."""
    directory, base = system.os.path.split(path)
    for name in system.os.listdir(directory):
        if name.startswith(base + ".") and name.endswith(TEMPORARY_SUFFIX):
            other = system.os.path.join(directory, name)
            with ignoring(OSError):
                if same_file(system.os.stat(other, follow_symlinks=False), found):
                    system.os.unlink(other)


def inherit_permissions(source: str, target: int) -> None:
    """Give the new file `target` (a descriptor) the permissions of the file `source` (a path), if this process may.

    Errors are ignored, because the small files beside a log hold only hints. A user who may rename files in the
    directory can put another file at `source`. But the same user could also replace the new file, and so gains no
    further permission.
    """
    opened, close = system.owned_for_a_while()
    try:
        copy_permissions(open_descriptor(source, system.os.O_RDONLY, owned_fds=opened), target)
    except (OSError, InsecurePathError) as error:
        raise_if_foreign(error)
    finally:
        close()


def copy_permissions(source: int, target: int) -> None:
    """Give the file `target`, which this process has created, the group, access control list and mode of `source`.

    Root also sets the owner. Both arguments are descriptors and not paths. A user who may rename files in the directory
    could have put another file, or a link, at the path of the new file.

    Raises:
        OSError: this process may not set the permissions. Users of `source` might then be unable to use `target`.
    """
    wanted, found = system.os.fstat(source), system.os.fstat(target)
    owner = wanted.st_uid if found.st_uid != wanted.st_uid and system.os.geteuid() == 0 else -1
    group = wanted.st_gid if found.st_gid != wanted.st_gid else -1
    if not system.is_fake_fs():
        if (owner, group) != (-1, -1):
            system.os.fchown(target, owner, group)
        for name in _ACLS:
            _copy_acl(source, target, name)
    mode = system.stat.S_IMODE(wanted.st_mode)
    if system.stat.S_IMODE(system.os.fstat(target).st_mode) != mode:
        system.os.fchmod(target, mode)


def _copy_acl(source: int, target: int, name: str) -> None:
    wanted, found = _acl(source, name), _acl(target, name)
    if wanted == found:
        return
    if wanted is None:
        system.os.removexattr(target, name)
    else:
        system.os.setxattr(target, name, wanted)


def _acl(fd: int, name: str) -> bytes | None:
    if not hasattr(system.os, "getxattr"):
        return None
    try:
        return system.os.getxattr(fd, name)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno in _NO_ACL:
            return None
        raise


def names_same_file(path: str, identity: tuple[int, int]) -> bool:
    """Return whether `path` names the open file with this `identity` (device, inode number).

    Return True as well if this process has no permission to look `path` up.
    """
    try:
        named = system.os.stat(path, follow_symlinks=False)
    except OSError as error:
        raise_if_foreign(error)
        return isinstance(error, PermissionError)
    return (named.st_dev, named.st_ino) == identity


def unlink_quietly(path: str, epoch: int | None = None) -> None:
    """Remove the name `path`, if it exists and may be removed.

    If `epoch` is given, remove it only in the process with this `system.process_epoch`. A signal handler may fork in
    the middle of an operation. Then the operation also continues in the child, but the file belongs to the parent.
    """
    with ignoring(OSError):
        if epoch is None or system.process_epoch() == epoch:  # no signal handler runs between this check and the call
            system.os.unlink(path)


def same_file(one: Any, other: Any) -> bool:
    """Return whether two stat results are of one file. Both files must be open: an inode number may be reused."""
    return bool(one.st_ino == other.st_ino and one.st_dev == other.st_dev)


def create(path: str, content: Callable[[int], bytes], mode: int, *, durable: bool, like: str | None = None) -> None:
    """Create the file `path` with its content, unless a file exists there already.

    The file is written under a temporary name and then linked to `path`. So no process sees a part of the file, and no
    file is overwritten. A process that dies during this call leaves at most a temporary name.

    On a file system without hard links, the new file is empty. A process that opens an empty file writes the header.

    Args:
        path: the path of the file.
        content: a function that is called with a descriptor of the file, and returns the bytes to write.
        mode: the permissions of the file.
        durable: whether to sync the file and its directory.
        like: the path of a file whose permissions the new file gets, as far as this process may set them; None: `mode`.
    """
    epoch, temporary = system.process_epoch(), temporary_name(path)
    opened, close = system.owned_for_a_while()
    try:
        try:
            try:
                fd = create_descriptor(temporary, mode, opened)
            except FileExistsError as error:  # a signal handler forked above, and the child has created its file
                raise_if_foreign(error)
                temporary = temporary_name(path)
                fd = create_descriptor(temporary, mode, opened)
            if like is not None:
                inherit_permissions(like, fd)
            write_all(fd, content(fd))
            if durable:
                system.sync_file(fd)
        finally:
            close()  # first of all, before anything that Ctrl-C can interrupt
        try:
            _link(temporary, path)
        except OSError as error:
            raise_if_foreign(error)
            if error.errno not in _NO_LINKS:
                raise
            _create_empty(path, mode)
    finally:
        unlink_quietly(temporary, epoch)
    if durable:
        opened, close = system.owned_for_a_while()
        try:
            sync_directory(path, opened)
        finally:
            close()


def _link(temporary: str, path: str) -> None:
    """Link the complete file `temporary` to `path`, unless a file exists there already."""
    try:
        system.os.link(temporary, path)
    except FileExistsError as error:
        raise_if_foreign(error)
    except FileNotFoundError as error:
        # If a signal handler forked in the caller, the child may have linked the file, too. The next process that
        # opened it then removed the temporary name, see `check`.
        raise_if_foreign(error)
        if not system.os.path.lexists(path):
            raise


def create_fifo(path: str, mode: int, like: int, owned_fds: set[int]) -> None:
    """Create the FIFO `path`, unless a file exists there already.

    The FIFO has its final permissions before it gets the name `path`.

    Args:
        path: the path of the FIFO.
        mode: the permissions of the FIFO. The umask is not applied.
        like: a descriptor of a file whose permissions the FIFO gets in place of `mode`, if this process may set them.
        owned_fds: descriptors are added to this set while they are open.

    Raises:
        OSError: the file system has no FIFOs or no hard links, or this process may not create one.
    """

    def permit(fd: int) -> None:
        system.os.fchmod(fd, mode)
        with ignoring(OSError):
            copy_permissions(like, fd)

    publish = partial(system.os.link, follow_symlinks=False)
    with ignoring(FileExistsError):
        close_owned(system.make_node(path, system.os.mkfifo, mode, permit, publish, owned_fds), owned_fds)


def _create_empty(path: str, mode: int) -> None:
    opened, close = system.owned_for_a_while()
    try:
        create_descriptor(path, mode, opened)
    except FileExistsError as error:
        raise_if_foreign(error)
    except BaseException:
        if opened:
            unlink_quietly(path)
        raise
    finally:
        close()


def create_descriptor(path: str, mode: int, owned_fds: set[int]) -> int:
    """Create the file `path`, open it for writing, and return the descriptor, which is added to `owned_fds`.

    The file must not exist. The umask is not applied to `mode`.
    """
    fd = system.open_file(path, system.os.O_CREAT | system.os.O_EXCL | system.os.O_WRONLY, mode, owned_fds)
    if system.stat.S_IMODE(system.os.fstat(fd).st_mode) != mode:
        system.os.fchmod(fd, mode)
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in as many calls as the kernel needs."""
    while data:
        data = data[system.os.write(fd, data) :]


def read_all(fd: int, size: int, offset: int | None = None) -> bytes:
    """Return `size` bytes of the file `fd`, fewer only at its end, in as many calls as the kernel needs.

    The bytes begin at `offset` (pread(2)). If `offset` is None, the bytes begin at the position of `fd`, and the
    position moves.
    """
    parts = []
    while size > 0:
        data = system.os.read(fd, size) if offset is None else system.os.pread(fd, size, offset)
        if not data:
            break
        parts.append(data)
        size -= len(data)
        offset = None if offset is None else offset + len(data)
    return b"".join(parts)


def sync_directory(path: str, owned_fds: set[int]) -> None:
    """Sync the directory of `path`, so that the file keeps its name after a power failure (fsync(2))."""
    directory = open_descriptor(system.os.path.dirname(path), system.os.O_RDONLY, owned_fds=owned_fds)
    with closing_owned(directory, owned_fds) as fd:
        system.sync_file(fd)


def publish(temporary: str, path: str) -> None:
    """Link the complete file `temporary` to `path`. Without hard links, rename it.

    Raises:
        FileExistsError: a file exists at `path`. It is not overwritten.
    """
    try:
        system.os.link(temporary, path)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno not in _NO_LINKS:
            raise
        if system.os.path.lexists(path):
            raise FileExistsError(system.errno.EEXIST, "it is there", path) from None
        system.os.rename(temporary, path)


def beside(path: str, name: bytes) -> str:
    """Return the path of the file `name` in the directory of `path`."""
    return system.os.path.join(system.os.path.dirname(path), system.os.fsdecode(name))


def temporary_name(path: str) -> str:
    """Return a random path beside `path`, for a file that `publish` will link to `path`."""
    return f"{path}.{system.random_bytes(6).hex()}{TEMPORARY_SUFFIX}"
