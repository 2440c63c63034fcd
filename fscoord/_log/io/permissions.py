"""`copy_permissions`: let those who can use one file use another one, too."""

from __future__ import annotations

from typing import Final

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["copy_permissions"]

_ACLS: Final = ("system.posix_acl_access", "system.nfs4_acl")
"""Where the kernel shows access control lists: acl(5), and nfs4_acl(5) on mounts of NFS 4."""
_NO_ACL: Final = frozenset(getattr(system.errno, name, -1) for name in ("ENODATA", "ENOTSUP", "EOPNOTSUPP", "EINVAL"))


def copy_permissions(source: str, target: str) -> None:
    """Give the file `target`, which this process has just made, the group, access control list and mode of `source`.

    Root gives it the owner as well.

    Raises:
        OSError: this process may not; then others that can use `source` could not use `target`.
    """
    wanted, found = system.os.stat(source), system.os.stat(target)
    owner = wanted.st_uid if found.st_uid != wanted.st_uid and system.os.geteuid() == 0 else -1
    group = wanted.st_gid if found.st_gid != wanted.st_gid else -1
    if (owner, group) != (-1, -1):
        system.os.chown(target, owner, group)
    if not system.is_fake_fs():
        for name in _ACLS:
            _copy_acl(source, target, name)
    mode = system.stat.S_IMODE(wanted.st_mode)
    if system.stat.S_IMODE(system.os.stat(target).st_mode) != mode:
        system.os.chmod(target, mode)


def _copy_acl(source: str, target: str, name: str) -> None:
    wanted, found = _acl(source, name), _acl(target, name)
    if wanted == found:
        return
    if wanted is None:
        system.os.removexattr(target, name)
    else:
        system.os.setxattr(target, name, wanted)


def _acl(path: str, name: str) -> bytes | None:
    try:
        return system.os.getxattr(path, name)
    except OSError as error:
        raise_if_foreign(error)
        if error.errno in _NO_ACL:
            return None
        raise
